"""The tasks of GLUE and a pre-trained model for fairseq: the files of $DATA/<model>; `examples/glue/prepare.sh`."""

import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from shutil import copyfile
from typing import Any, Optional

from common.archives import complete, fail, note, obtain, read_lines, unpack
from common.prepare import data_folder, mark_unchecked, parser, refuse_unchecked, require_files, start
from common.pretrained import check_case, prepare_model
from glue.pieces import LAYOUTS, Encoder, encoder, shorten
from glue.rows import Example, Table, everything, read_table
from glue.tasks import HIGHEST, TASKS, Task
from tqdm import tqdm

LENGTHS = {"bert": 128, "roberta": 512}  # as BERT and RoBERTa were fine-tuned
LEAST = 8  # tokens of a pair, with what marks its ends
FEW = 1_000  # examples, for which no processes are started
SETTINGS = "statistics.json"
LEFT_OUT = "left_out.tsv"


# ---- the text --------------------------------------------------------------------------------------------------------


def unpack_task(name: str, task: Task, data: Path) -> Path:
    """The folder with the task's files, as its archives have them."""
    folder = data / "text" / name
    files = set(task.files.values())
    if folder.exists():
        require_files(folder, files)
        return folder
    paths = [obtain(archive, data) for archive in task.archives]
    with complete(folder) as unfinished:
        unfinished.mkdir(parents=True)
        for path in paths:
            if path.suffix == ".zip":
                unpack(path, unfinished, files.__contains__)
            else:
                copyfile(path, unfinished / path.name)
        if missing := sorted(file for file in files if not (unfinished / file).is_file()):
            fail(f"{paths[0]}: {', '.join(missing)} is missing")
    return folder


def read_set(name: str, task: Task, subset: str, text: Path) -> Table:
    """The examples of one of fairseq's sets."""
    wanted = everything
    if name == "MRPC" and subset != "test":
        valid = {tuple(line.split()[:2]) for line in read_lines(text / "mrpc_dev_ids.tsv")}
        wanted = partial(_is_in_set, valid, subset == "valid")
    return read_table(text / task.files[subset], task, subset not in task.predictions, wanted)


def _is_in_set(pairs: set[tuple[str, ...]], inside: bool, row: Mapping[str, str]) -> bool:
    return ((row["#1 ID"], row["#2 ID"]) in pairs) == inside


def check_counts(name: str, task: Task, found: Mapping[str, int]) -> None:
    """End the program unless every set has as many examples as published."""
    wrong = []
    for subset, number in found.items():
        allowed = task.counts[subset]
        if number not in allowed:
            expected = f"{allowed[0]:,}" + (f" to {allowed[-1]:,}" if len(allowed) > 1 else "")
            wrong.append(f"{subset} has {number:,} examples, must have {expected}")
    if wrong:
        fail(f"{name}: {'; '.join(wrong)}")


# ---- fairseq's files -------------------------------------------------------------------------------------------------

_encode: Encoder  # of a worker


def _start_worker(make: Callable[[], Encoder]) -> None:
    global _encode
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started it
    _encode = make()


def _encode_in_worker(texts: tuple[str, ...]) -> list[list[int]]:
    return [_encode(text) for text in texts]


def encoded(examples: Sequence[Example], make: Callable[[], Encoder], workers: int) -> Iterator[list[list[int]]]:
    """The numbers of every example's texts, in order."""
    texts = (example.texts for example in examples)
    if workers == 1 or len(examples) < FEW:
        encode = make()
        yield from ([encode(text) for text in each] for each in texts)
        return
    with get_context("spawn").Pool(workers, _start_worker, (make,)) as pool:
        yield from pool.imap(_encode_in_worker, texts, chunksize=500)


class Column:
    """One of the data sets that fairseq's task puts together, such as input0/train."""

    def __init__(self, folder: Path, dictionary: Path):
        from fairseq.data import Dictionary  # seconds, for nothing where only flags are read

        folder.mkdir()
        copyfile(dictionary, folder / "dict.txt")
        self.folder = folder
        self.dictionary = Dictionary.load(str(dictionary))

    def write(self, subset: str, items: Iterable[Sequence[int]]) -> None:
        """The items, with </s> behind each."""
        import torch
        from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder, best_fitting_int_dtype

        builder = MMapIndexedDatasetBuilder(
            str(self.folder / f"{subset}.bin"), best_fitting_int_dtype(len(self.dictionary))
        )
        for item in items:
            builder.add_item(torch.tensor([*item, self.dictionary.eos()]))
        builder.finalize(str(self.folder / f"{subset}.idx"))


def label_column(task: Task, folder: Path) -> Optional[Column]:
    """Its classes in the order of the table, whatever the training set has more of; none where labels are numbers."""
    if not task.labels:
        (folder / "label").mkdir()
        return None
    path = folder / "labels.txt"
    path.write_text("".join(f"{label} 1\n" for label in task.labels))
    column = Column(folder / "label", path)
    path.unlink()
    return column


def write_inputs(
    subset: str, inputs: Sequence[Column], examples: Iterable[list[list[int]]], total: int, room: int
) -> dict[str, int]:
    """The texts, shortened to `room` pieces; how many were, and other numbers."""
    found = dict.fromkeys(("shortened", "empty texts", "pieces", "unknown pieces"), 0)
    unknown = inputs[0].dictionary.unk()
    columns: list[list[list[int]]] = [[] for _ in inputs]
    for texts in tqdm(examples, f"cutting {subset}", total, leave=False, unit="example", dynamic_ncols=True):
        shortened = shorten(texts, room)
        found["shortened"] += shortened != texts
        for column, text in zip(columns, shortened):
            column.append(text)
            found["empty texts"] += not text
            found["pieces"] += len(text)
            found["unknown pieces"] += text.count(unknown)
    for column, texts in zip(inputs, columns):
        column.write(subset, texts)
    return found


def write_labels(subset: str, examples: Sequence[Example], task: Task, folder: Path, labels: Optional[Column]) -> None:
    """The labels, or for a set that has none what the evaluation server knows its examples by."""
    if subset in task.predictions:
        (folder / f"{subset}.index").write_text("".join(f"{example.index}\n" for example in examples))
    elif labels is not None:
        labels.write(subset, ([labels.dictionary.index(example.label)] for example in examples))
    else:  # from 0 to 1, as in fairseq's recipe
        scores = "".join(f"{float(example.label) / HIGHEST!r}\n" for example in examples)
        (folder / "label" / f"{subset}.label").write_text(scores)


def report(subset: str, found: Mapping[str, int]) -> None:
    odd = {
        "joined": "that a line break had cut, joined",
        "patched": "with a wrong number of columns, kept because the server asks for them",
        "left out": f"left out, listed in {LEFT_OUT}",
        "shortened": "shortened",
    }
    parts = [f"{found[key]:,} {words}" for key, words in odd.items() if found[key]]
    note("; ".join([f"  {subset}: {found['examples']:,} examples", *parts]))


def prepare_task(
    name: str, data: Path, model: str, make: Callable[[], Encoder], settings: Mapping[str, Any], args: Any
) -> None:
    """$DATA/<model>/<name>, unless it is there."""
    task = TASKS[name]
    folder = data / model / name
    if folder.exists():
        refuse_unchecked([folder], args.any_counts)
        require_files(folder, [SETTINGS])
        try:
            made = dict(json.loads((folder / SETTINGS).read_text(encoding="utf-8"))["settings"])
        except (ValueError, LookupError, TypeError, RecursionError):
            fail(f"{folder / SETTINGS}: is not of prepare.sh; remove {folder} to have it made again")
        for key, value in settings.items():
            if made.get(key) != value:
                fail(f"{folder}: made with {key} {made.get(key)}, not {value}; remove it to have it made again")
        note(f"{folder} is there already")
        return
    text = unpack_task(name, task, data)
    note(f"{name}:")
    tables = {subset: read_set(name, task, subset, text) for subset in task.files}
    if not args.any_counts:
        check_counts(name, task, {subset: len(table.examples) for subset, table in tables.items()})
    room = LAYOUTS[model].room(len(task.texts), settings["max_length"])
    statistics = {}
    with complete(folder) as unfinished:
        unfinished.mkdir()
        dictionary = data / model / "model" / "dict.txt"
        inputs = [Column(unfinished / f"input{i}", dictionary) for i in range(len(task.texts))]
        labels = label_column(task, unfinished)
        for subset, table in tables.items():
            numbers = encoded(table.examples, make, args.workers)
            found = write_inputs(subset, inputs, numbers, len(table.examples), room)
            write_labels(subset, table.examples, task, unfinished, labels)
            statistics[subset] = {
                "examples": len(table.examples),
                "joined": table.joined,
                "patched": table.patched,
                "left out": len(table.left_out),
                **found,
            }
            report(subset, statistics[subset])
        rows = [
            f"{task.files[subset]}\t{left.line}\t{left.reason}\t{left.row}\n"
            for subset, table in tables.items()
            for left in table.left_out
        ]
        (unfinished / LEFT_OUT).write_text("".join(rows), encoding="utf-8")
        content = {"task": name, "settings": dict(settings), "sets": statistics}
        (unfinished / SETTINGS).write_text(json.dumps(content, indent=2) + "\n")
        if args.any_counts:
            mark_unchecked(unfinished)


# ---- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Optional[Sequence[str]] = None) -> None:
    flags = parser("GLUE and a pre-trained model for fairseq, in $DATA/<model>")
    flags.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help="of: %(default)s (default: all)"
    )
    default = os.environ.get("MODEL") or "bert"
    flags.add_argument(
        "--model",
        choices=LAYOUTS,
        default=default,
        help="whose pieces and separators (default: MODEL of the environment, or bert)",
    )
    flags.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FOLDER",
        help="the pre-trained model: a Hugging Face BERT (config.json, weights, vocab.txt), or a checkpoint of fairseq "
        "(model.pt, dict.txt, and vocab.txt or encoder.json and vocab.bpe); default: the published base model, fetched",
    )
    flags.add_argument("--cased", action="store_true", help="of BERT: keep upper case and accents")
    flags.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="tokens of an example, the rest cut off (default: bert 128, roberta 512)",
    )
    args = flags.parse_args(arguments)
    if args.model not in LAYOUTS:
        fail(f"MODEL={args.model}: must be one of {', '.join(LAYOUTS)}")
    if args.cased and args.model != "bert":
        fail(f"--cased: has no meaning with --model {args.model}, whose pieces keep it anyway")
    length = args.max_length if args.max_length is not None else LENGTHS[args.model]
    if not LEAST <= length <= 512:
        fail(f"--max-length {length}: must be {LEAST} to 512, which the models have positions for")
    source = args.source.resolve() if args.source else None
    if args.model == "bert":
        check_case(source, args.cased)
    with data_folder() as data:
        folder = prepare_model(args.model, source, data)
        if args.model == "bert":
            check_case(folder, args.cased)  # the model may be of an earlier preparation
        make = partial(encoder, args.model, folder, not args.cased)
        for name in dict.fromkeys(args.tasks):
            settings = {"max_length": length, "cased": args.cased}
            prepare_task(name, data, args.model, make, settings, args)
        note(f"{folder.parent} is ready")


if __name__ == "__main__":
    start(main)
