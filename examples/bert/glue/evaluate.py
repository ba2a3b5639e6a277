"""Predict a set with a fine-tuned model, keep the predictions, and print the metrics.

`examples/bert/glue/evaluate.sh` runs this; it takes the flags of fairseq-validate.
"""

import ast
import json
import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bert
import numpy
import torch
from bert.glue.metrics import measure
from bert.glue.tasks import HIGHEST, TASKS, Task
from common.errors import failing, reason_of
from common.prepare import SETTINGS
from fairseq import checkpoint_utils, options, utils
from tqdm import tqdm

from mixhead_plugin.errors import OptionError

fail = failing("evaluate")


def task_of(data: Path, subset: str) -> tuple[str, Task]:
    """Return the task of a folder of prepare.sh; end the program if it has no such set."""
    try:
        name = json.loads((data / SETTINGS).read_text())["task"]
        task = TASKS[name]
    except (OSError, ValueError, LookupError, TypeError):
        fail(f"{data}: has no {SETTINGS} of a task; examples/bert/glue/prepare.sh makes it")
    if subset not in task.files or subset == "train":
        sets = ", ".join(key for key in task.files if key != "train")
        fail(f"--valid-subset {subset}: {name} has {sets}; one at a time")
    return name, task


def read_checkpoint(args: Namespace, classes: int) -> dict[str, Any]:
    """Read the checkpoint --path; end the program if it has another number of classes."""
    try:
        overrides = {"data": args.data, **ast.literal_eval(args.model_overrides)}
        state = checkpoint_utils.load_checkpoint_to_cpu(args.path, overrides)
        own_classes = state["cfg"].task.get("num_classes")
    except OptionError as error:  # names the file, or what nothing reads in --model-overrides
        fail(str(error))
    except (RuntimeError, LookupError, AttributeError) as error:
        fail(f"--path {args.path}: is no checkpoint of fairseq-train ({reason_of(error)})")
    if own_classes is None:
        fail(f"--path {args.path}: has no classes; must be of examples/bert/glue/train.sh")
    if own_classes != classes:
        fail(
            f"--path {args.path}: has {own_classes} classes, not {classes}; it is of another "
            "VARIANT"
        )
    return state


def predict(args: Namespace, classes: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Run the model of --path over --valid-subset.

    Returns:
        predictions and labels in the order of the set, float64 [examples]: classes, or numbers if
        `classes` is 1; labels are nan in a set without labels
    """
    state = read_checkpoint(args, classes)
    (model,), cfg, task = checkpoint_utils.load_model_ensemble_and_task([args.path], state=state)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    model.eval().to(device)
    if args.fp16:
        model.half()
    task.load_dataset(args.valid_subset)
    data_set = task.dataset(args.valid_subset)
    positions = min(task.max_positions(), model.max_positions())
    longest = max(data_set.size(index) for index in range(len(data_set)))
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
    head = cfg.criterion.classification_head_name
    predicted = numpy.full(len(data_set), numpy.nan)
    gold = numpy.full(len(data_set), numpy.nan)
    for sample in tqdm(batches, args.valid_subset, unit="batch", disable=None):
        inputs = sample["net_input"]
        if device.type == "cuda":
            inputs = utils.move_to_cuda(inputs, device)
        with torch.no_grad():
            logits, _ = model(**inputs, features_only=True, classification_head_name=head)
        scores = logits.float().cpu()  # [B, classes]
        predicted[sample["id"]] = scores.squeeze(-1) if classes == 1 else scores.argmax(-1)
        if "target" in sample:
            gold[sample["id"]] = sample["target"].view(-1)
    if wrong := int(numpy.isnan(predicted).sum()):
        fail(f"--path {args.path}: {wrong} predictions are no numbers")
    scale = HIGHEST if classes == 1 else 1  # in training similarities are from 0 to 1
    return scale * predicted, scale * gold


def write_predictions(
    path: Path, predicted: numpy.ndarray, index: Sequence[Any], task: Task
) -> None:
    """Write the file of the evaluation server: names of labels, or similarities from 0 to 5."""
    if task.labels:
        names = [task.labels[int(number)] for number in predicted]
    else:
        names = [f"{number:.3f}" for number in predicted.clip(0, HIGHEST)]
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [("index", "prediction"), *zip(index, names)]
    path.write_text("".join(f"{i}\t{name}\n" for i, name in rows))
    print(f"predictions: {path}")


def main() -> None:
    bert.register()
    try:
        args = options.parse_args_and_arch(options.get_validation_parser())
    except OptionError as error:
        fail(str(error))
    data = Path(args.data)
    subset = args.valid_subset
    name, task = task_of(data, subset)
    if not Path(args.path).is_file():
        fail(f"--path {args.path}: no such file")
    predicted, gold = predict(args, task.classes)
    folder = Path(args.results_path or f"{args.path.removesuffix('.pt')}.predictions")
    print(f"{name}, {subset}: {len(predicted):,} examples")
    if subset in task.predictions:
        index = (data / f"{subset}.index").read_text().split()
        write_predictions(folder / task.predictions[subset], predicted, index, task)
        return
    write_predictions(folder / f"{name}.{subset}.tsv", predicted, range(len(predicted)), task)
    for metric, value in measure(task, gold, predicted).items():
        if not math.isfinite(value):
            fail(
                f"there is no {metric}: labels are missing, or all labels or all predictions are "
                "equal"
            )
        print(f"{metric} = {value:.2f}")


if __name__ == "__main__":
    main()
