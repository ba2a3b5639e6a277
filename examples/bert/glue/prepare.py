"""Prepare GLUE and a pre-trained model in $DATA/<model>; prepare.sh here runs this."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import copyfile
from typing import TYPE_CHECKING, Any, Optional

from bert.binary import BinarySet
from bert.glue.rows import Example, Table, read_table
from bert.glue.tasks import HIGHEST, TASKS, Task
from bert.pretrained import FILES, check_case, prepare_model
from common.archives import obtain, sha256, stream_lines, unpack
from common.files import written_whole
from common.messages import fail, note
from common.prepare import data_folder, is_ready, parser, require_files, start, write_settings

if TYPE_CHECKING:  # fairseq takes seconds to import, and the command line is read before
    from bert.glue.pieces import Encoder

LENGTHS = {"bert": 128, "roberta": 512}  # as BERT and RoBERTa were fine-tuned
LEAST = 8  # tokens of a pair, with its special tokens
BLOCK = 10_000  # examples that are encoded together


# ---- the text ----------------------------------------------------------------------------------


def unpack_task(name: str, task: Task, data: Path) -> Path:
    """Return the folder with the files of the task's archives."""
    folder = data / "text" / name
    files = set(task.files.values())
    if folder.exists():
        require_files(folder, files)
        return folder
    paths = [obtain(archive, data) for archive in task.archives]
    with written_whole(folder) as unfinished:
        unfinished.mkdir(parents=True)
        for path in paths:
            if path.suffix == ".zip":
                unpack(path, unfinished, lambda file: file in files)
            else:
                copyfile(path, unfinished / path.name)
        missing = sorted(file for file in files if not (unfinished / file).is_file())
        if missing:
            fail(f"{paths[0]}: {', '.join(missing)} is missing")
    return folder


def read_set(name: str, task: Task, subset: str, text: Path) -> Table:
    """Read the examples of one of fairseq's sets."""
    path = text / task.files[subset]
    labelled = subset not in task.predictions
    if name != "MRPC" or not labelled:
        return read_table(path, task, labelled)
    # MRPC's training file has the validation set, too; another file names its pairs.
    valid = {tuple(line.split()[:2]) for line in stream_lines(text / "mrpc_dev_ids.tsv")}

    def is_in_set(row: Mapping[str, str]) -> bool:
        return ((row["#1 ID"], row["#2 ID"]) in valid) == (subset == "valid")

    return read_table(path, task, labelled, is_in_set)


def check_counts(name: str, task: Task, tables: Mapping[str, Table]) -> None:
    """End the program unless every set has as many examples as published."""
    wrong = []
    for subset, table in tables.items():
        allowed = task.examples[subset]
        number = len(table.examples)
        if number not in allowed:
            expected = f"{allowed[0]:,}"
            if len(allowed) > 1:
                expected += f" to {allowed[-1]:,}"
            wrong.append(f"{subset} has {number:,} examples, must have {expected}")
    if wrong:
        fail(f"{name}: {'; '.join(wrong)}")


# ---- fairseq's files ---------------------------------------------------------------------------


def write_inputs(
    subset: str, folders: Sequence[Path], examples: Sequence[Example], encode: "Encoder", room: int
) -> dict[str, int]:
    """Write the texts of a set, each example cut to `room` pieces. Return counts by name."""
    from bert.glue.pieces import shorten

    dictionary = encode.dictionary
    sets = [BinarySet(folder / subset, len(dictionary)) for folder in folders]
    counts = dict.fromkeys(("shortened", "empty texts", "pieces", "unknown pieces"), 0)
    for begin in range(0, len(examples), BLOCK):
        # The first text of each example, and then the second one, if there are two.
        columns = zip(*(example.texts for example in examples[begin : begin + BLOCK]))
        for texts in zip(*map(encode, columns)):
            shortened = shorten(texts, room)
            if shortened != list(texts):
                counts["shortened"] += 1
            for output, text in zip(sets, shortened):
                output.add([*text, dictionary.eos()])
                if not text:
                    counts["empty texts"] += 1
                counts["pieces"] += len(text)
                counts["unknown pieces"] += text.count(dictionary.unk())
    for output in sets:
        output.close()
    return counts


def write_labels(folder: Path, subset: str, examples: Sequence[Example], task: Task) -> None:
    """Write the labels, or for a set without labels the indices of the evaluation server."""
    if subset in task.predictions:
        (folder / f"{subset}.index").write_text(
            "".join(f"{example.index}\n" for example in examples)
        )
    elif task.labels:
        from fairseq.data import Dictionary

        # classes keep the order of the table; fairseq would sort them by frequency
        (folder / "label" / "dict.txt").write_text("".join(f"{label} 1\n" for label in task.labels))
        dictionary = Dictionary.load(str(folder / "label" / "dict.txt"))
        labels = BinarySet(folder / "label" / subset, len(dictionary))
        for example in examples:
            labels.add([dictionary.index(example.label), dictionary.eos()])
        labels.close()
    else:  # from 0 to 1, as in fairseq's recipe
        scores = "".join(f"{float(example.label) / HIGHEST!r}\n" for example in examples)
        (folder / "label" / f"{subset}.label").write_text(scores)


def prepare_task(
    name: str,
    folder: Path,
    text: Path,
    encode: "Encoder",
    room: int,
    settings: Mapping[str, Any],
    any_counts: bool,
) -> None:
    """Write the folder of a task; it appears when it is complete.

    Args:
        name: a key of TASKS
        folder: the new folder, $DATA/<model>/<task>
        text: the folder of `unpack_task`
        encode: turns texts into the numbers of the model's dictionary
        room: how many pieces an example may have, without its special tokens
        settings: flags of prepare.sh and their values, and checksums of the model's pieces, which
            the folder records
        any_counts: whether the numbers of examples may be others than the published ones
    """
    task = TASKS[name]
    note(f"{name}:")
    tables = {subset: read_set(name, task, subset, text) for subset in task.files}
    if not any_counts:
        check_counts(name, task, tables)
    counts = {}
    with written_whole(folder) as unfinished:
        inputs = [unfinished / f"input{i}" for i in range(len(task.texts))]
        for path in (*inputs, unfinished / "label"):
            path.mkdir(parents=True)
        for path in inputs:
            encode.dictionary.save(str(path / "dict.txt"))
        for subset, (examples, left_out) in tables.items():
            of_inputs = write_inputs(subset, inputs, examples, encode, room)
            write_labels(unfinished, subset, examples, task)
            counts[subset] = {"examples": len(examples), "left out": len(left_out), **of_inputs}
            numbers = [f"{number:,} {what}" for what, number in counts[subset].items()]
            note(f"  {subset}: {', '.join(numbers)}")
            for row in left_out:
                note(f"  left out of {subset}: {task.files[subset]}, {row}")
        write_settings(unfinished, settings, any_counts, task=name, sets=counts)


def require_dictionary(folder: Path, model: Path) -> None:
    """End the program if the folder of a task has another dictionary than the model.

    The folders of older versions record no checksum of it.
    """
    own = folder / "input0" / "dict.txt"
    words = [path.read_text(encoding="utf-8").split() for path in (own, model / "dict.txt")]
    if words[0] != words[1]:
        fail(f"{own}: is not the dict.txt of {model}; remove {folder}, or choose another DATA")


# ---- the command -------------------------------------------------------------------------------


def main(arguments: Optional[Sequence[str]] = None) -> None:
    flags = parser("Prepare GLUE and a pre-trained model in $DATA/<model>.")
    flags.add_argument(
        "--tasks",
        nargs="+",
        choices=TASKS,
        default=list(TASKS),
        metavar="TASK",
        help="of: %(default)s (default: all)",
    )
    flags.add_argument(
        "--model",
        choices=FILES,
        default=os.environ.get("MODEL") or "bert",
        help=(
            "the model whose pieces and separators to use (default: MODEL of the environment, or "
            "bert)"
        ),
    )
    flags.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FOLDER",
        help=(
            "the pre-trained model: a Hugging Face BERT (config.json, weights, vocab.txt), or a "
            "checkpoint of fairseq (model.pt, dict.txt, and vocab.txt or encoder.json and "
            "vocab.bpe); default: the published base model, fetched"
        ),
    )
    flags.add_argument(
        "--cased", action="store_true", help="for a cased BERT: keep upper case and accents"
    )
    flags.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="the most tokens of an example (default: bert 128, roberta 512)",
    )
    args = flags.parse_args(arguments)
    if args.model not in FILES:
        fail(f"MODEL={args.model}: must be one of {', '.join(FILES)}")
    if args.cased and args.model != "bert":
        fail(f"--cased: only --model bert has uncased pieces, not {args.model}")
    length = args.max_length if args.max_length is not None else LENGTHS[args.model]
    if not LEAST <= length <= 512:
        fail(f"--max-length {length}: must be {LEAST} to 512, the positions of the models")
    source = args.source.resolve() if args.source else None
    os.environ["RAYON_NUM_THREADS"] = str(args.workers)  # of tokenizers
    if args.model == "bert":
        check_case(source, args.cased)
    with data_folder() as data:
        folder = prepare_model(args.model, source, data)
        if args.model == "bert":
            check_case(folder, args.cased)  # the folder may be from an earlier run
        encode = None
        settings = {"max_length": length, "cased": args.cased}
        sources = {file: sha256(folder / file) for file in ("dict.txt", *FILES[args.model])}
        for name in dict.fromkeys(args.tasks):
            folder_of_task = data / args.model / name
            if is_ready(folder_of_task, settings, (), args.any_counts, sources):
                require_dictionary(folder_of_task, folder)
                continue
            from bert.glue.pieces import LAYOUTS, Encoder

            encode = encode or Encoder(args.model, folder, not args.cased)
            room = LAYOUTS[args.model].room(len(TASKS[name].texts), length)
            text = unpack_task(name, TASKS[name], data)
            made_with = settings | sources
            prepare_task(name, folder_of_task, text, encode, room, made_with, args.any_counts)
        note(f"{folder.parent} is ready")


if __name__ == "__main__":
    start(main)
