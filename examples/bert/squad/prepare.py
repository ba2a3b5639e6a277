"""Prepare SQuAD 1.1 and a pre-trained BERT in $DATA/text and $DATA/bert.

`examples/bert/squad/prepare.sh` runs this.
"""

from collections.abc import Sequence
from pathlib import Path
from shutil import copyfile
from typing import Optional

from bert.pretrained import check_case, prepare_model
from bert.squad_data import SquadError, locate, read_squad
from common.archives import Archive, check_counts, obtain, sha256
from common.files import written_whole
from common.messages import fail, note
from common.prepare import data_folder, is_ready, parser, start, write_settings

URL = "https://rajpurkar.github.io/SQuAD-explorer/dataset"
# The sums are those of huggingface/datasets and ParlAI.
ARCHIVES = {
    "train": (
        "train-v1.1.json",
        "3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955",
    ),
    "valid": ("dev-v1.1.json", "95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9"),
}
QUESTIONS = {"train": 87_599, "valid": 10_570}
CASED = "cased"  # an empty file that train.sh looks for


def prepare_text(data: Path, dictionary: Path, cased: bool, any_counts: bool) -> None:
    """Make $DATA/text: the sets as published, and the model's dictionary."""
    folder = data / "text"
    settings = {"cased": cased, "dict.txt": sha256(dictionary)}
    if is_ready(folder, settings, ["dict.txt", "train.json", "valid.json"], any_counts):
        return
    with written_whole(folder) as unfinished:
        unfinished.mkdir()
        for subset, (name, sum_) in ARCHIVES.items():
            copyfile(
                obtain(Archive(name, (f"{URL}/{name}",), sum_), data), unfinished / f"{subset}.json"
            )
            check_set(
                unfinished / f"{subset}.json", name, None if any_counts else QUESTIONS[subset]
            )
        copyfile(dictionary, unfinished / "dict.txt")
        if cased:
            (unfinished / CASED).touch()
        write_settings(unfinished, settings, any_counts)


def check_set(path: Path, name: str, questions: Optional[int]) -> None:
    """End the program unless the file has SQuAD's layout.

    If `questions` is a number, it must have so many questions.
    """
    try:
        squad = read_squad(path)
    except SquadError as error:
        fail(str(error).replace(str(path), name, 1))
    lost = 0
    for question in squad.questions:
        context = squad.contexts[question.context]
        if question.answers and locate(context, question.answers) is None:
            lost += 1
    note(f"{name}: {len(squad.questions):,} questions about {len(squad.contexts):,} contexts")
    if lost:
        note(
            f"{name}: {lost:,} questions whose answers are not where the file says; training "
            "leaves them out"
        )
    if questions is not None:
        check_counts(name, {"questions": len(squad.questions)}, {"questions": questions})


def main(arguments: Optional[Sequence[str]] = None) -> None:
    flags = parser("Prepare SQuAD 1.1 and a pre-trained BERT in $DATA/text and $DATA/bert.")
    flags.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FOLDER",
        help="the model: a folder in Hugging Face's format, "
        "or one with model.pt, dict.txt and vocab.txt "
        "(default: bert-base-uncased, fetched or from ARCHIVES)",
    )
    flags.add_argument(
        "--cased", action="store_true", help="the model is cased: keep upper case and accents"
    )
    args = flags.parse_args(arguments)
    source = args.source.resolve() if args.source else None
    check_case(source, args.cased)
    with data_folder() as data:
        model = prepare_model("bert", source, data)
        check_case(model, args.cased)  # an earlier preparation may have made it
        prepare_text(data, model / "dict.txt", args.cased, args.any_counts)


if __name__ == "__main__":
    start(main)
