"""Prepare Multi30k German-English: image descriptions in joint sentencepiece pieces, cased."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.archives import Archive, count, obtain, unpack
from common.files import remove, written_whole
from common.messages import fail
from common.parallel_text import (
    LANGUAGES,
    TARGET,
    compare_counts,
    read_lines,
    read_text,
    refuse_other_numbers,
    write_lines,
)
from common.prepare import (
    UNCHECKED,
    data_folder,
    is_ready,
    mark_unchecked,
    parser,
    refuse_unchecked,
    start,
)
from common.subwords import in_subwords
from common.translation_data import TEXT, binarise, checksum, refuse_unknown_text

# github.com/multi30k/dataset as of November 2020, the last change of these files
URL = "https://raw.githubusercontent.com/multi30k/dataset/c40b37b23d6387214f8ab37335b5a8672b9745f2/data/task1/raw/"
NAMES = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
SHA256 = {
    "train.de": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "train.en": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "val.de": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "val.en": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "test_2016_flickr.de": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
    "test_2016_flickr.en": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
}
ARCHIVES = {
    name: Archive(f"{name}.gz", (f"{URL}{name}.gz",), sha256) for name, sha256 in SHA256.items()
}
COUNTS = {
    "train.de": {"lines": 29_000, "tokens": 322_383, "types": 24_889},
    "train.en": {"lines": 29_000, "tokens": 345_020, "types": 15_456},
    "val.de": {"lines": 1_014, "tokens": 11_568, "types": 2_740},
    "val.en": {"lines": 1_014, "tokens": 12_167, "types": 2_389},
    "test_2016_flickr.de": {"lines": 1_000, "tokens": 10_905, "types": 2_524},
    "test_2016_flickr.en": {"lines": 1_000, "tokens": 11_877, "types": 2_337},
}


def use_nested_archives() -> None:
    """Let ARCHIVES be a folder that has the files in its folder multi30k, too."""
    nested = Path(os.environ.get("ARCHIVES", "")) / "multi30k"
    if os.environ.get("ARCHIVES") and nested.is_dir():
        os.environ["ARCHIVES"] = str(nested)


def prepare_text(
    data: Path,
    folder: Path,
    counts: Mapping[str, Mapping[str, int]] = COUNTS,
    any_counts: bool = False,
) -> None:
    """Write the archives to `folder`/{train,valid,test}.{de,en}.

    The folder appears when it is complete.
    """
    remove(data / "subwords")  # perhaps from another text
    with written_whole(folder) as unfinished:
        raw = unfinished / "raw"
        for split, name in NAMES.items():
            texts = []
            for language in LANGUAGES:
                file = f"{name}.{language}"
                unpack(obtain(ARCHIVES[file], data), raw)
                texts.append(read_lines(raw / file))
                compare_counts(file, count(texts[-1]), counts[file], any_counts)
                (raw / file).unlink()
            refuse_other_numbers(*texts, name)
            for language, lines in zip(LANGUAGES, texts):
                write_lines(unfinished / f"{split}.{language}", (line.strip() for line in lines))
        raw.rmdir()
        if any_counts:
            mark_unchecked(unfinished)


def prepare_data(text: Path, folder: Path, vocabulary: int, workers: int) -> None:
    settings = {"--vocabulary": vocabulary}
    sources = {TEXT: checksum(text)}
    # main refuses unchecked folders
    if is_ready(folder, settings, (), any_counts=True, sources=sources):
        return
    lines = read_text(text)
    pieces = in_subwords(lines, "sentencepiece", folder.parent / "subwords", vocabulary)
    references = {f"{split}.raw": lines[f"{split}.{TARGET}"] for split in ("valid", "test")}
    checked = not (text / UNCHECKED).exists()
    flags = ["--joined-dictionary"]
    binarise(folder, pieces, references, settings | sources, workers, flags, checked)


def main(arguments: Any = None) -> None:
    flags = parser(__doc__)
    flags.add_argument(
        "--vocabulary",
        type=int,
        default=4000,
        metavar="N",
        help="pieces of both languages (default: %(default)s)",
    )
    args = flags.parse_args(arguments)
    if args.vocabulary < 1:
        fail(f"--vocabulary {args.vocabulary}: must be at least 1")
    use_nested_archives()
    with data_folder() as data:
        text = data / "text"
        folder = data / "binary"
        refuse_unchecked([text, folder], args.any_counts)
        if not text.is_dir():
            refuse_unknown_text(data)
            prepare_text(data, text, any_counts=args.any_counts)
        prepare_data(text, folder, args.vocabulary, args.workers)


if __name__ == "__main__":
    start(main)
