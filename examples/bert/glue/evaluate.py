"""Predictions of a fine-tuned model and its metrics; `examples/glue/evaluate.sh`.

The flags are those of fairseq-validate, of which this is the part for one set, with the predictions kept.
"""

import ast
import json
import math
import pickle
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy
import torch
from common.errors import failing
from fairseq import checkpoint_utils, options, utils
from glue.metrics import measure
from glue.prepare import SETTINGS
from glue.tasks import HIGHEST, TASKS, Task
from tqdm import tqdm

import mixhead_plugin  # noqa: F401 (registers the architectures)
from mixhead_plugin.errors import OptionError

fail = failing("evaluate")


class Results(NamedTuple):
    """Of a set, in its order."""

    predicted: numpy.ndarray  # [examples]: classes, int64; of a task without classes similarities, float64
    gold: Optional[numpy.ndarray]  # the same, of a set with labels


def task_of(data: Path, subset: str) -> tuple[str, Task]:
    """The task that prepare.sh has made `data` for, provided that it has such a set."""
    try:
        name = json.loads((data / SETTINGS).read_text())["task"]
        task = TASKS[name]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        fail(f"{data}: has no {SETTINGS} of a task; examples/glue/prepare.sh makes it")
    if subset not in task.files or subset == "train":
        sets = ", ".join(key for key in task.files if key != "train")
        fail(f"--valid-subset {subset}: {name} has {sets}; one at a time")
    return name, task


def read_checkpoint(args: Namespace, classes: int) -> dict[str, Any]:
    """The checkpoint --path, provided that it classifies into as many classes."""
    try:
        overrides = {"data": args.data, **ast.literal_eval(args.model_overrides.strip())}
        state = checkpoint_utils.load_checkpoint_to_cpu(args.path, overrides)
        cfg = state["cfg"]
    except OptionError as error:
        fail(f"--path {error}")
    except (RuntimeError, EOFError, pickle.UnpicklingError, LookupError) as error:
        fail(f"--path {args.path}: is no checkpoint of fairseq-train ({str(error).splitlines()[0]})")
    found = cfg.task.get("num_classes") if cfg is not None else None
    if found is None:
        fail(f"--path {args.path}: has no classes; must be of examples/glue/train.sh")
    if found != classes:
        fail(f"--path {args.path}: has {found} classes, not {classes}; is it of another VARIANT?")
    return state


def predict(args: Namespace, classes: int) -> Results:
    """Run the model of --path over --valid-subset."""
    state = read_checkpoint(args, classes)
    (model,), cfg, task = checkpoint_utils.load_model_ensemble_and_task([args.path], state=state)
    head = cfg.criterion.classification_head_name
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    model.eval().to(device)
    if args.fp16:
        model.half()
    task.load_dataset(args.valid_subset)
    data_set = task.dataset(args.valid_subset)
    positions = min(task.max_positions(), model.max_positions())
    longest = max(data_set.size(i) for i in range(len(data_set)))
    if longest > positions:
        fail(f"{args.data}: has examples of {longest} tokens, the model has {positions} positions")
    batches = task.get_batch_iterator(
        data_set,
        max_tokens=args.max_tokens,
        max_sentences=args.batch_size,
        max_positions=positions,
        required_batch_size_multiple=args.required_batch_size_multiple,
        num_workers=args.num_workers,
    ).next_epoch_itr(shuffle=False)
    predicted = numpy.full(len(data_set), numpy.nan)
    gold = numpy.full(len(data_set), numpy.nan)
    for sample in tqdm(batches, args.valid_subset, unit="batch", disable=None):
        inputs = utils.move_to_cuda(sample["net_input"], device) if device.type == "cuda" else sample["net_input"]
        with torch.no_grad():
            logits, _ = model(**inputs, features_only=True, classification_head_name=head)  # [B, classes]
        places = sample["id"].numpy()
        scores = logits.float().cpu()
        predicted[places] = scores.squeeze(-1).numpy() if classes == 1 else scores.argmax(-1).numpy()
        if "target" in sample:
            gold[places] = sample["target"].view(-1).numpy()
    return _results(args, predicted, gold, classes)


def _results(args: Namespace, predicted: numpy.ndarray, gold: numpy.ndarray, classes: int) -> Results:
    if numpy.isnan(predicted).any():
        fail(f"--path {args.path}: {int(numpy.isnan(predicted).sum())} predictions are no numbers")
    known = None if numpy.isnan(gold).any() else gold
    if classes == 1:  # fairseq's recipe has similarities from 0 to 1
        return Results(HIGHEST * predicted, None if known is None else HIGHEST * known)
    return Results(predicted.astype(int), None if known is None else known.astype(int))


def write_predictions(path: Path, predicted: numpy.ndarray, index: Sequence[str], task: Task) -> None:
    """As the evaluation server takes them: the labels' names, or similarities from 0 to 5."""
    if task.labels:
        names = [task.labels[number] for number in predicted]
    else:
        names = [f"{number:.3f}" for number in predicted.clip(0, HIGHEST)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{i}\t{name}\n" for i, name in [("index", "prediction"), *zip(index, names)]))


def main() -> None:
    try:
        args = options.parse_args_and_arch(options.get_validation_parser())
    except OptionError as error:
        fail(str(error))
    data, subset = Path(args.data), args.valid_subset
    name, task = task_of(data, subset)
    if not Path(args.path).is_file():
        fail(f"--path {args.path}: no such file")
    results = predict(args, task.classes)
    folder = Path(args.results_path or f"{args.path.removesuffix('.pt')}.predictions")
    print(f"{name}, {subset}: {len(results.predicted):,} examples")
    if subset in task.predictions:
        path = folder / task.predictions[subset]
        index = (data / f"{subset}.index").read_text().split()
        write_predictions(path, results.predicted, index, task)
        print(f"{path}: for the evaluation server")
        return
    if results.gold is None:
        fail(f"{data}: {subset} has no labels; remove the folder and run examples/glue/prepare.sh again")
    path = folder / f"{name}.{subset}.tsv"
    write_predictions(path, results.predicted, range(len(results.predicted)), task)
    print(f"{path}: what was predicted")
    values = measure(task, results.gold, results.predicted)
    for metric, value in values.items():
        if not math.isfinite(value):
            fail(f"there is no {metric}: all of the {len(results.predicted):,} predictions or labels are the same")
    for metric, value in values.items():
        print(f"{metric} = {value:.2f}")


if __name__ == "__main__":
    main()
