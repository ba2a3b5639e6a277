"""Train and evaluate small models on a task that draws its own data; scripts/sweep.py runs grids of them."""

import json
import logging
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
    warmup_steps: int | None = None  # None: a tenth of the steps
    decay_steps: int | None = None  # the last ones, over which the rate falls to 0; None: a fifth
    valid_interval: int | None = None  # steps between two validations; None: none before the end
    stop_at: float | None = None  # the validation loss that ends a training early


def attention(arm: str, *sizes: int, **options: Any) -> MixedAttention:
    """Return the attention of an arm. In `uniform` all scores stay 0: it cannot choose among the keys."""
    module = MixedAttention(*sizes, batch_first=True, head_mixing=MIXINGS.get(arm, "none"), **options)
    if arm == "uniform":
        for parameter in module.q_proj.parameters():
            nn.init.zeros_(parameter).requires_grad_(False)
    return module


def share_of_rate(setting: Setting, step: int) -> float:
    """Return the factor on the rate in a step, counted from 0.

    It rises to 1 in the warm-up, and falls towards 0 in the decay. With 0 steps of decay it stays 1.
    """
    if setting.warmup_steps is None:
        rise = 10 * (step + 1) / setting.steps
    else:
        rise = (step + 1) / max(setting.warmup_steps, 1)

    if setting.decay_steps is None:
        fall = 5 * (1 - step / setting.steps)
    elif setting.decay_steps == 0:
        fall = 1.0
    else:
        fall = (setting.steps - step) / setting.decay_steps

    return min(1.0, rise, fall)


def train(task: Task, setting: Setting) -> nn.Module:
    """Train with Adam, to the last step or to the first validation loss of at most `stop_at`.

    The seed alone gives the data and the first weights: no mixing of MIXINGS draws random numbers.
    """
    torch.manual_seed(setting.seed)
    model = task.model(setting.arm, setting.head_size, setting.size)
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(setting.mixing_lr_scale if "head_mixing" in name else 1.0, []).append(parameter)
    optimizer = torch.optim.Adam([{"params": some, "factor": f} for f, some in groups.items()], betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(setting.seed)
    # scripts/fairseq_logs.py counts CPU time from this line on, so that start-up does not count
    logging.getLogger("train").info("Start iterating over samples")

    for step in range(setting.steps):
        share = share_of_rate(setting, step)
        for group in optimizer.param_groups:
            group["lr"] = setting.rate * share * group["factor"]
        loss = next(iter(task.measure(model, task.batch(setting.size, generator)).values()))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        if setting.valid_interval is None or (step + 1) % setting.valid_interval != 0:
            continue
        valid_loss = validate(task, setting, model, step + 1)
        if setting.stop_at is not None and valid_loss <= setting.stop_at:
            break

    return model


def validate(task: Task, setting: Setting, model: nn.Module, steps: int) -> float:
    """Log the endpoint on the validation set as fairseq logs its loss, and return it.

    scripts/sweep.py reads the line, and keeps it among the points of the run. The loss there has the
    unit of the endpoint; fairseq's own are in bits.
    """
    # the time of a validation does not count as time of updates
    logging.getLogger("train").info('begin validation on "valid" subset')
    loss = next(iter(evaluate(task, setting, model, "valid").values()))
    first = task.batch(setting.size, torch.Generator().manual_seed(0))[0]  # [B, N, ...]
    line = {"valid_num_updates": steps, "valid_loss": loss, "wpb": first.size(0) * first.size(1)}
    logging.getLogger("valid").info(json.dumps(line))
    return loss


@torch.no_grad()
def evaluate(task: Task, setting: Setting, model: nn.Module, which: str) -> dict[str, float]:
    """Return the mean metrics on a set that training never sees."""
    generator = torch.Generator().manual_seed(SETS[which] + setting.seed)
    parts = [task.measure(model, task.batch(setting.size, generator)) for _ in range(EVALUATED)]
    return {name: float(torch.stack([part[name] for part in parts]).mean()) for name in parts[0]}


def run(task: Task, setting: Setting, which: str = "valid") -> dict[str, float]:
    """Train one model and return its metrics."""
    return evaluate(task, setting, train(task, setting), which)


def refuse_wrong_schedule(setting: Setting) -> None:
    """End the command with one line if a number of the schedule cannot be meant."""
    if setting.warmup_steps is not None and setting.warmup_steps < 0:
        sys.exit(f"train: error: --warmup-steps {setting.warmup_steps}: must be at least 0")
    if setting.decay_steps is not None and setting.decay_steps < 0:
        sys.exit(f"train: error: --decay-steps {setting.decay_steps}: must be at least 0")
    if setting.valid_interval is not None and setting.valid_interval < 1:
        sys.exit(f"train: error: --valid-interval {setting.valid_interval}: must be at least 1")
    if setting.stop_at is not None and setting.valid_interval is None:
        sys.exit(f"train: error: --stop-at {setting.stop_at}: needs --valid-interval")


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
    text = "steps over which the rate rises (default: a tenth of --steps)"
    training.add_argument("--warmup-steps", type=int, metavar="N", help=text)
    text = "last steps, over which the rate falls to 0; 0 for none (default: a fifth of --steps)"
    training.add_argument("--decay-steps", type=int, metavar="N", help=text)
    text = "log the loss on the validation set every N steps (default: never)"
    training.add_argument("--valid-interval", type=int, metavar="N", help=text)
    text = "end the training at the first validation loss of at most this"
    training.add_argument("--stop-at", type=float, metavar="LOSS", help=text)
    training.add_argument("--log-format", help="scripts/sweep.py gives it to every recipe; no effect")
    evaluation = steps.add_parser("evaluate", help="print the metrics of the model; the last line is the endpoint")
    evaluation.add_argument("--gen-subset", choices=SETS, default="test", help="(default: %(default)s)")
    evaluation.add_argument("--last", help="the metric of the last line, instead of the endpoint")
    args = parser.parse_args(words)
    file = Path(os.environ.get("SAVE", Path(__file__).parents[1] / "checkpoints" / task.name)) / "model.pt"
    if args.step == "train":
        setting = Setting(**{name: getattr(args, name) for name in Setting._fields})
        refuse_wrong_schedule(setting)
        # as fairseq's own lines, which scripts/sweep.py reads
        form = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"
        logging.basicConfig(format=form, level=logging.INFO, stream=sys.stdout)
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
