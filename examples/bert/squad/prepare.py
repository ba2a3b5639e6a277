"""SQuAD 1.1 and a pre-trained BERT for fairseq: the files of $DATA/text and $DATA/bert; `examples/squad/prepare.sh`."""

from collections.abc import Sequence
from pathlib import Path
from shutil import copyfile
from typing import Optional

from common.archives import Archive, check_counts, complete, fail, note, obtain
from common.prepare import data_folder, mark_unchecked, parser, refuse_unchecked, require_files, start
from common.pretrained import check_case, prepare_model

URL = "https://rajpurkar.github.io/SQuAD-explorer/dataset"
# The sums are those that huggingface/datasets and ParlAI have.
ARCHIVES = {
    "train": Archive(
        "train-v1.1.json",
        (f"{URL}/train-v1.1.json",),
        "3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955",
    ),
    "valid": Archive(
        "dev-v1.1.json",
        (f"{URL}/dev-v1.1.json",),
        "95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9",
    ),
}
QUESTIONS = {"train": 87_599, "valid": 10_570}
CASED = "cased"  # an empty file where train.sh looks


def prepare_text(data: Path, dictionary: Path, cased: bool, any_counts: bool) -> None:
    """$DATA/text: the sets as published, with the model's dictionary; made unless it is there."""
    folder = data / "text"
    if folder.exists():
        require_files(folder, ["dict.txt", *(f"{subset}.json" for subset in ARCHIVES)])
        if (folder / CASED).exists() != cased:
            was = "with" if (folder / CASED).exists() else "without"
            fail(f"{folder}: made {was} --cased; remove it, and {data / 'bert'}, to have it made again")
        if (folder / "dict.txt").read_bytes() != dictionary.read_bytes():
            fail(f"{folder}: its dict.txt is of another model than {dictionary}; remove it to have it made again")
        note(f"{folder} is there already")
        return
    with complete(folder) as unfinished:
        unfinished.mkdir()
        for subset, archive in ARCHIVES.items():
            copyfile(obtain(archive, data), unfinished / f"{subset}.json")
            check_set(unfinished / f"{subset}.json", archive.file, None if any_counts else QUESTIONS[subset])
        copyfile(dictionary, unfinished / "dict.txt")
        if cased:
            (unfinished / CASED).touch()
        if any_counts:
            mark_unchecked(unfinished)


def check_set(path: Path, name: str, questions: Optional[int]) -> None:
    """End the program unless the file is of SQuAD's layout and, where a number is given, size."""
    # here, because it takes seconds, and the command line is read before
    from mixhead_plugin.data.squad import SquadError, locate, read_squad

    try:
        squad = read_squad(path)
    except SquadError as error:
        fail(str(error).replace(str(path), name, 1))
    found = {"questions": len(squad.questions), "contexts": len(squad.contexts)}
    lost = sum(bool(q.answers) and locate(squad.contexts[q.context], q.answers) is None for q in squad.questions)
    note(f"{name}: {found['questions']:,} questions about {found['contexts']:,} contexts")
    if lost:
        note(f"{name}: the answers of {lost:,} are not where they should be; training leaves these questions out")
    if questions is not None:
        check_counts(name, found, {"questions": questions})


def main(arguments: Optional[Sequence[str]] = None) -> None:
    flags = parser("SQuAD 1.1 and a pre-trained BERT for fairseq, in $DATA/text and $DATA/bert")
    flags.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FOLDER",
        help="the model: a folder in Hugging Face's format, or one with model.pt, dict.txt and vocab.txt "
        "(default: bert-base-uncased, fetched or from ARCHIVES)",
    )
    flags.add_argument("--cased", action="store_true", help="of a cased model: keep upper case and accents")
    args = flags.parse_args(arguments)
    source = args.source.resolve() if args.source else None
    check_case(source, args.cased)
    with data_folder() as data:
        refuse_unchecked([data / "text"], args.any_counts)
        model = prepare_model("bert", source, data)
        check_case(model, args.cased)  # the model may be of an earlier preparation
        prepare_text(data, model / "dict.txt", args.cased, args.any_counts)


if __name__ == "__main__":
    start(main)
