"""Train and evaluate small models on a task that draws its own data.

A recipe gives a `Task` to `main`. scripts/sweep.py runs grids of such recipes.
"""

import json
import logging
import math
import os
import pickle
import sys
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common.errors import reason_of
from torch import Tensor, nn

from mixhead_plugin.nn import MixedAttention, parameter_groups

# --head-mixing of the attentions that `attention` makes. `uniform` is softmax without queries.
HEAD_MIXING_OF = {
    "softmax": "none",
    "A": "position-independent",
    "B": "position-wise",
    "average": "average",
    "uniform": "none",
}
SETS = {"valid": 10_000, "test": 20_000}  # added to a seed; training has the seed itself
EVALUATED = 32  # batches of a set
Batch = tuple[Tensor, ...]


class Task(NamedTuple):
    """The batches that a task draws, the models that learn it, and the numbers that it measures.

    Args:
        name: the name of its folder in examples/
        attentions: the names of the attentions that it compares
        axis: the name of the flag that sets its size: the length of a row, or the model's width
        size: the default of that flag
        steps: the default of --steps
        rate: the default of --lr
        model: (attention, head size, size) -> a model
        batch: (size, random numbers) -> a batch
        measure: (model, batch) -> metrics; the first is trained, and is the endpoint
        problem: (head size, size) -> why there is no such model; an empty text if there is
    """

    name: str
    attentions: Sequence[str]
    axis: str
    size: int
    steps: int
    rate: float
    model: Callable[[str, int, int], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    measure: Callable[[nn.Module, Batch], dict[str, Tensor]]
    problem: Callable[[int, int], str]


class Setting(NamedTuple):
    """Everything that a training of a task depends on.

    Args:
        attention: one of `Task.attentions`
        head_size: the size of one head
        size: the size of the data or of the model, which `Task.axis` names
        rate: the learning rate
        mixing_lr_scale: factor on the rate of the mixing
        steps: the number of updates
        seed: the seed of the data and of the first weights
        warmup_steps: the first steps, in which the rate rises; None for a tenth of the steps
        decay_steps: the last steps, in which the rate falls to 0; None for a fifth of the steps
        valid_interval: steps between two validations; None for no validation
        stop_at: the validation loss that ends a training early; None for none
    """

    attention: str
    head_size: int
    size: int
    rate: float
    mixing_lr_scale: float
    steps: int
    seed: int
    warmup_steps: int | None = None
    decay_steps: int | None = None
    valid_interval: int | None = None
    stop_at: float | None = None


def attention(name: str, *sizes: int, **options: Any) -> MixedAttention:
    """Return an attention of a task.

    In `uniform` all scores stay 0, so it cannot choose among the keys.

    Args:
        name: a key of HEAD_MIXING_OF
        sizes: embed_dim and num_heads of `MixedAttention`
        options: its keywords
    """
    module = MixedAttention(*sizes, batch_first=True, head_mixing=HEAD_MIXING_OF[name], **options)
    if name == "uniform":
        for parameter in module.q_proj.parameters():
            nn.init.zeros_(parameter).requires_grad_(False)
    return module


def share_of_rate(setting: Setting, step: int) -> float:
    """Return the factor on the rate in a step, counted from 0.

    It rises to 1 in the warm-up, and falls towards 0 in the decay; without decay it stays 1.
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

    The seed alone gives the data and the first weights: no mixing here draws random numbers.
    Raise FloatingPointError if the loss or a parameter is no finite number.
    """
    torch.manual_seed(setting.seed)
    model = task.model(setting.attention, setting.head_size, setting.size)
    # Until the first step the rate of a group is its factor on the rate of that step.
    groups = parameter_groups(model, weight_decay=0.0, mixing_lr=setting.mixing_lr_scale)
    optimizer = torch.optim.Adam(groups, lr=1.0, betas=(0.9, 0.98))
    factors = [group["lr"] for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(setting.seed)
    # scripts/studies/fairseq_logs.py counts CPU time from this line on: start-up does not count
    logging.getLogger("train").info("Start iterating over samples")

    for step in range(setting.steps):
        share = share_of_rate(setting, step)
        for group, factor in zip(optimizer.param_groups, factors):
            group["lr"] = setting.rate * share * factor

        batch = task.batch(setting.size, generator)
        loss = next(iter(task.measure(model, batch).values()))
        if not loss.isfinite():
            raise FloatingPointError(
                f"the loss of step {step + 1} is {loss.item()}; try a lower --lr"
            )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        if setting.valid_interval is None or (step + 1) % setting.valid_interval != 0:
            continue
        tokens = batch[0].size(0) * batch[0].size(1)  # of an update; points, for nearest neighbour
        valid_loss = validate(task, setting, model, step + 1, tokens)
        if setting.stop_at is not None and valid_loss <= setting.stop_at:
            break

    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise FloatingPointError(
            "a parameter is no finite number after the last step; try a lower --lr"
        )
    return model


def validate(task: Task, setting: Setting, model: nn.Module, steps: int, tokens: int) -> float:
    """Log the endpoint on the validation set as fairseq logs its loss, and return it.

    scripts/sweep.py reads the line, and keeps it among the points of the run. The loss there has
    the unit of the endpoint; fairseq's own are in bits.
    """
    # the time of a validation does not count as time of updates
    logging.getLogger("train").info('begin validation on "valid" subset')
    loss = next(iter(evaluate(task, setting, model, "valid").values()))
    line = {"valid_num_updates": steps, "valid_loss": loss, "wpb": tokens}
    logging.getLogger("valid").info(json.dumps(line))
    return loss


@torch.no_grad()
def evaluate(task: Task, setting: Setting, model: nn.Module, which: str) -> dict[str, float]:
    """Return the mean metrics on a set that training never sees."""
    generator = torch.Generator().manual_seed(SETS[which] + setting.seed)
    values: dict[str, list[Tensor]] = {}
    for _ in range(EVALUATED):
        batch = task.batch(setting.size, generator)
        for name, value in task.measure(model, batch).items():
            values.setdefault(name, []).append(value)
    return {name: float(torch.stack(some).mean()) for name, some in values.items()}


def run(task: Task, setting: Setting, which: str = "valid") -> dict[str, float]:
    """Train one model and return its metrics."""
    return evaluate(task, setting, train(task, setting), which)


def wrong_number(task: Task, setting: Setting) -> str:
    """Return which number of a run cannot be meant, and why; an empty text if all can."""
    # Without a limit, NaN and infinity would pass, and torch's Adam cannot take more than 3e38.
    if not 0 < setting.rate <= 1000:
        return f"--lr {setting.rate}: must be greater than 0, and at most 1000"
    if not 0 <= setting.mixing_lr_scale <= 1000:
        return f"--mixing-lr-scale {setting.mixing_lr_scale}: must be from 0 to 1000"
    if setting.steps < 1:
        return f"--steps {setting.steps}: must be at least 1"
    if not 0 <= setting.seed < 2**32:
        return f"--seed {setting.seed}: must be from 0 to {2**32 - 1}"
    if setting.warmup_steps is not None and setting.warmup_steps < 0:
        return f"--warmup-steps {setting.warmup_steps}: must be at least 0"
    if setting.decay_steps is not None and setting.decay_steps < 0:
        return f"--decay-steps {setting.decay_steps}: must be at least 0"
    if setting.valid_interval is not None and setting.valid_interval < 1:
        return f"--valid-interval {setting.valid_interval}: must be at least 1"
    if setting.stop_at is not None:
        stop = f"--stop-at {setting.stop_at}"
        if not math.isfinite(setting.stop_at):
            return f"{stop}: must be a finite number"
        if setting.valid_interval is None:
            return f"{stop}: needs --valid-interval"
        if setting.valid_interval > setting.steps:
            return (
                f"{stop}: needs a validation, but --valid-interval {setting.valid_interval} is "
                f"more than --steps {setting.steps}"
            )
    return task.problem(setting.head_size, setting.size)


def save_folder(task: Task) -> Path:
    """Return the folder of the model: SAVE of the environment, else checkpoints/<recipe> here."""
    if os.environ.get("SAVE"):
        return Path(os.environ["SAVE"])
    checkout = Path(__file__).parents[1]
    return checkout / "checkpoints" / task.name


def train_and_save(task: Task, setting: Setting) -> None:
    """Train one model and write it into SAVE; where that cannot be, end the program in one line."""
    problem = wrong_number(task, setting)
    if problem:
        sys.exit(f"train: error: {problem}")
    folder = save_folder(task)
    # The file is complete under its name. Begun before the training, it shows a folder that cannot
    # be written to.
    unfinished = folder / "model.pt.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished.touch()
    except OSError as error:
        sys.exit(f"train: error: SAVE={folder}: cannot be written to ({error.strerror})")

    try:
        model = train(task, setting)
        content = {"setting": setting._asdict(), "model": model.state_dict()}
        write(content, unfinished, folder / "model.pt")
    except FloatingPointError as error:
        sys.exit(f"train: error: {error}")
    finally:
        unfinished.unlink(missing_ok=True)


def write(content: dict[str, Any], unfinished: Path, file: Path) -> None:
    """Write `file`, under the name `unfinished` until it is complete."""
    try:
        torch.save(content, unfinished)
        unfinished.replace(file)
    # torch's own writer raises a RuntimeError, as on a full disk
    except (OSError, RuntimeError) as error:
        sys.exit(
            f"train: error: SAVE={file.parent}: the model cannot be written ({reason_of(error)})"
        )


def load(task: Task) -> tuple[Setting, nn.Module]:
    """Return the model of CHECKPOINT, or else of SAVE.

    The program ends with one line if there is none of this task.
    """
    if os.environ.get("CHECKPOINT"):
        file = Path(os.environ["CHECKPOINT"])
        missing = f"CHECKPOINT={file}: no such file"
    else:
        file = save_folder(task) / "model.pt"
        missing = f"{file}: no such file; train.sh writes it into SAVE"
    if not file.is_file():
        sys.exit(f"evaluate: error: {missing}")

    try:
        saved = dict(torch.load(file, map_location="cpu", weights_only=True))
        setting = Setting(**saved["setting"])
        if setting.attention not in task.attentions or wrong_number(task, setting):
            raise ValueError
        model = task.model(setting.attention, setting.head_size, setting.size)
        model.load_state_dict(saved["model"])
    except (
        EOFError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
        pickle.UnpicklingError,
    ):
        sys.exit(
            f"evaluate: error: {file}: is no model of examples/{task.name}/train.sh, or it is "
            "damaged"
        )
    return setting, model


def evaluate_saved(task: Task, which: str, last: str | None) -> None:
    """Print the metrics of the saved model.

    Args:
        task: the recipe's
        which: a key of SETS
        last: the metric of the last line; None for the endpoint
    """
    setting, model = load(task)
    metrics = evaluate(task, setting, model, which)
    if last is None:
        last = next(iter(metrics))
    if last not in metrics:
        sys.exit(f"evaluate: error: --last {last}: must be one of {', '.join(metrics)}")
    for name, value in metrics.items():
        if not math.isfinite(value):
            sys.exit(f"evaluate: error: the {name} is {value}, which is no finite number")
    others = [name for name in metrics if name != last]
    for name in (*others, last):
        print(f"{name} = {metrics[name]:.6f}")


def main(task: Task, words: Sequence[str] | None = None) -> None:
    """Run `train` or `evaluate`, the two scripts of the recipe.

    Args:
        task: the recipe's
        words: the words of the command line; None for those of the program
    """
    torch.set_num_threads(1)
    args = command_line(task).parse_args(words)
    if args.step == "evaluate":
        evaluate_saved(task, args.gen_subset, args.last)
        return

    # as fairseq's own lines, which scripts/sweep.py reads
    form = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"
    logging.basicConfig(format=form, level=logging.INFO, stream=sys.stdout)
    train_and_save(task, Setting(**{name: getattr(args, name) for name in Setting._fields}))


def command_line(task: Task) -> ArgumentParser:
    """Return the parser of both steps; the flags of `train` are the fields of `Setting`."""
    default = "(default: %(default)s)"
    parser = ArgumentParser(prog=task.name, allow_abbrev=False)
    steps = parser.add_subparsers(dest="step", required=True)

    training = steps.add_parser("train", help="train one model")
    text = f"the attention {default}"
    training.add_argument("--attention", choices=task.attentions, default="B", help=text)
    # its older name, which the grids of finished studies have
    training.add_argument(
        "--arm", dest="attention", choices=task.attentions, default="B", help=SUPPRESS
    )
    training.add_argument("--head-size", type=int, default=8, help=default)
    training.add_argument(f"--{task.axis}", dest="size", type=int, default=task.size, help=default)
    training.add_argument("--lr", dest="rate", type=float, default=task.rate, help=default)
    text = "factor on the rate of the mixing"
    training.add_argument("--mixing-lr-scale", type=float, default=1.0, help=text)
    training.add_argument("--steps", type=int, default=task.steps, help=default)
    text = f"of data and first weights {default}"
    training.add_argument("--seed", type=int, default=1, help=text)
    text = "steps over which the rate rises (default: a tenth of --steps)"
    training.add_argument("--warmup-steps", type=int, metavar="N", help=text)
    text = "last steps, over which the rate falls to 0; 0 for none (default: a fifth of --steps)"
    training.add_argument("--decay-steps", type=int, metavar="N", help=text)
    text = "log the loss on the validation set every N steps (default: never)"
    training.add_argument("--valid-interval", type=int, metavar="N", help=text)
    text = "end the training at the first validation loss of at most this"
    training.add_argument("--stop-at", type=float, metavar="LOSS", help=text)
    text = "scripts/sweep.py gives it to every recipe; no effect"
    training.add_argument("--log-format", help=text)

    text = "print the metrics of the model; the last line is the endpoint"
    evaluation = steps.add_parser("evaluate", help=text)
    evaluation.add_argument("--gen-subset", choices=SETS, default="test", help=default)
    text = "the metric of the last line, instead of the endpoint"
    evaluation.add_argument("--last", help=text)
    return parser
