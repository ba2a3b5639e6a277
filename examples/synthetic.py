"""Train and evaluate small models on a task that draws its own data; scripts/sweep.py runs grids of them."""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mixhead_plugin.nn import MixedAttention

MIXINGS = {"A": "position-independent", "B": "position-wise", "average": "average"}
SETS = {"valid": 10_000, "test": 20_000}  # added to a seed; training has the seed itself
EVALUATED = 32  # batches of a set
Batch = tuple[Tensor, ...]


class Task(NamedTuple):
    """Define a task."""

    name: str
    arms: Sequence[str]
    axis: str  # the name of its size, a flag
    size: int
    steps: int
    rate: float
    model: Callable[[str, int, int], nn.Module]  # arm, head size, size
    batch: Callable[[int, torch.Generator], Batch]  # size, random numbers
    measure: Callable[[nn.Module, Batch], dict[str, Tensor]]  # metrics; the first is trained, and the endpoint


class Setting(NamedTuple):
    """Identify a run."""

    arm: str
    head_size: int
    size: int
    rate: float
    mixing_lr_scale: float  # factor on the rate of the mixing
    steps: int
    seed: int


def attention(arm: str, *sizes: int, **options: Any) -> MixedAttention:
    """Return the attention of an arm. In `uniform` all scores stay 0: it cannot choose among the keys."""
    module = MixedAttention(*sizes, batch_first=True, head_mixing=MIXINGS.get(arm, "none"), **options)
    if arm == "uniform":
        for parameter in module.q_proj.parameters():
            nn.init.zeros_(parameter).requires_grad_(False)
    return module


def train(task: Task, setting: Setting) -> nn.Module:
    """Train with Adam; the rate warms up over a tenth of the steps and falls to 0 over the last fifth.

    The seed alone gives the data and the first weights: no mixing of MIXINGS draws random numbers.
    """
    torch.manual_seed(setting.seed)
    model = task.model(setting.arm, setting.head_size, setting.size)
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(setting.mixing_lr_scale if "head_mixing" in name else 1.0, []).append(parameter)
    optimizer = torch.optim.Adam([{"params": some, "factor": f} for f, some in groups.items()], betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(setting.seed)
    for step in range(setting.steps):
        share = min(1.0, 10 * (step + 1) / setting.steps, 5 * (1 - step / setting.steps))
        for group in optimizer.param_groups:
            group["lr"] = setting.rate * share * group["factor"]
        loss = next(iter(task.measure(model, task.batch(setting.size, generator)).values()))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


@torch.no_grad()
def evaluate(task: Task, setting: Setting, model: nn.Module, which: str) -> dict[str, float]:
    """Return the mean metrics on a set that training never sees."""
    generator = torch.Generator().manual_seed(SETS[which] + setting.seed)
    parts = [task.measure(model, task.batch(setting.size, generator)) for _ in range(EVALUATED)]
    return {name: float(torch.stack([part[name] for part in parts]).mean()) for name in parts[0]}


def run(task: Task, setting: Setting, which: str = "valid") -> dict[str, float]:
    """Train one model and return its metrics."""
    return evaluate(task, setting, train(task, setting), which)


def main(task: Task, words: Sequence[str] | None = None) -> None:
    """Run `train` or `evaluate`: the two scripts of the recipe. The model is in the folder SAVE."""
    torch.set_num_threads(1)
    parser = ArgumentParser(prog=task.name, allow_abbrev=False)
    steps = parser.add_subparsers(dest="step", required=True)
    training = steps.add_parser("train", help="train one model")
    training.add_argument("--arm", choices=task.arms, default="B", help="(default: %(default)s)")
    training.add_argument("--head-size", type=int, default=8, help="(default: %(default)s)")
    training.add_argument(f"--{task.axis}", dest="size", type=int, default=task.size, help="(default: %(default)s)")
    training.add_argument("--lr", dest="rate", type=float, default=task.rate, help="(default: %(default)s)")
    training.add_argument("--mixing-lr-scale", type=float, default=1.0, help="factor on the rate of the mixing")
    training.add_argument("--steps", type=int, default=task.steps, help="(default: %(default)s)")
    training.add_argument("--seed", type=int, default=1, help="of data and first weights (default: %(default)s)")
    training.add_argument("--log-format", help="scripts/sweep.py gives it to every recipe; no effect")
    evaluation = steps.add_parser("evaluate", help="print the metrics of the model; the last line is the endpoint")
    evaluation.add_argument("--gen-subset", choices=SETS, default="test", help="(default: %(default)s)")
    evaluation.add_argument("--last", help="the metric of the last line, instead of the endpoint")
    args = parser.parse_args(words)
    file = Path(os.environ.get("SAVE", Path(__file__).parents[1] / "checkpoints" / task.name)) / "model.pt"
    if args.step == "train":
        setting = Setting(**{name: getattr(args, name) for name in Setting._fields})
        model = train(task, setting)
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"setting": setting._asdict(), "model": model.state_dict()}, file)
        return
    if not file.exists():
        sys.exit(f"evaluate: error: {file}: no such file; train.sh writes it into SAVE")
    saved = torch.load(file)
    setting = Setting(**saved["setting"])
    model = task.model(setting.arm, setting.head_size, setting.size)
    model.load_state_dict(saved["model"])
    metrics = evaluate(task, setting, model, args.gen_subset)
    last = args.last or next(iter(metrics))
    if last not in metrics:
        sys.exit(f"evaluate: error: --last {last}: must be one of {', '.join(metrics)}")
    for name in sorted(metrics, key=last.__eq__):
        print(f"{name} = {metrics[name]:.6f}")
