"""Prepare WikiText-2 or WikiText-103 (Merity et al., 2016); they differ only in size."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from common.archives import Archive, check_counts, count, obtain, stream_lines, unpack
from common.files import written_whole
from common.messages import fail, note
from common.prepare import (
    UNCHECKED,
    data_folder,
    mark_unchecked,
    parser,
    preprocess,
    refuse_unchecked,
    require_files,
)

SPLITS = ("train", "valid", "test")
# " = Title = " begins an article; sections have more signs: " = = Section = = "
TITLE = re.compile(r" = [^=].* = \n")


class WikiText(NamedTuple):
    """One of the two corpora."""

    name: str  # the folder in the archive
    archive: Archive
    counts: Mapping[str, Mapping[str, int]]  # published, by split; as `found_counts` counts


def found_counts(path: Path) -> dict[str, int]:
    """Count a text as WikiText's authors do.

    Each line ends in an <eos>, which is a token and a type.
    """
    counts = count(stream_lines(path, f"counting {path.name}"))
    return {
        "lines": counts["lines"],
        "tokens": counts["tokens"] + counts["lines"],
        "types": counts["types"] + 1,
    }


def unpack_text(corpus: WikiText, data: Path, check: bool) -> Path:
    """Return the folder with wiki.{train,valid,test}.tokens.

    If it does not exist, they are unpacked and counted.
    """
    folder = data / "text"
    if folder.exists():
        refuse_unchecked([folder], any_counts=not check)
        require_files(folder, [f"wiki.{split}.tokens" for split in SPLITS])
        return folder
    names = {f"{corpus.name}/wiki.{split}.tokens" for split in SPLITS}
    archive = obtain(corpus.archive, data)
    with written_whole(folder) as unfinished:
        unpack(archive, unfinished, lambda name: name in names)
        for split in SPLITS:
            path = unfinished / corpus.name / f"wiki.{split}.tokens"
            if not path.exists():
                fail(f"{archive}: {corpus.name}/{path.name} is missing")
            found = found_counts(path)
            numbers = [f"{number:,} {what}" for what, number in found.items()]
            note(f"{path.name}: {', '.join(numbers)}")
            if check:
                check_counts(f"{archive}: {corpus.name}/{path.name}", found, corpus.counts[split])
            path.rename(unfinished / path.name)
        (unfinished / corpus.name).rmdir()
        if not check:
            mark_unchecked(unfinished)
            note("--any-counts: the counts above were not checked")
    return folder


def with_titles(lines: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield each line, and whether it is the title of an article. An empty line comes before all.

    A title has blank lines around it; other lines that look like one do not.
    """
    before = ""
    line = ""
    for after in chain(lines, [""]):
        is_apart = not before.strip() and not after.strip()
        yield line, is_apart and TITLE.fullmatch(line) is not None
        before = line
        line = after


def articles(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield the words of every article."""
    words: list[str] = []
    for line, is_title in with_titles(lines):
        if is_title and words:
            yield words
            words = []
        words += line.split()
    if words:
        yield words


def join_articles(source: Path, target: Path) -> None:
    """Write each article as one line."""
    number = 0
    with target.open("w", encoding="utf-8") as file:
        for words in articles(stream_lines(source, f"articles of {source.name}")):
            print(*words, file=file)
            number += 1
    note(f"{source.name}: {number:,} articles")


def spell_bytes(source: Path, target: Path) -> None:
    """Write each byte of the text as a word of two hexadecimal digits.

    The </s> is the byte that ends a line.
    """
    with source.open("rb") as lines, target.open("w", encoding="ascii") as file:
        for line in lines:
            file.write(line.removesuffix(b"\n").hex(" ") + "\n")


REWRITE = {"articles": join_articles, "bytes": spell_bytes}  # by --breaks


def binarise(text: Path, destination: Path, breaks: str, workers: int) -> None:
    """Run fairseq-preprocess on `text`.

    An </s> stands after every line or after every article; or the words are bytes.
    """
    unchecked = (text / UNCHECKED).exists()
    with written_whole(destination) as unfinished:
        if breaks in REWRITE:
            unfinished.mkdir()
            rewritten = unfinished / "text"
            rewritten.mkdir()
            for split in SPLITS:
                file = f"wiki.{split}.tokens"
                REWRITE[breaks](text / file, rewritten / file)
            text = rewritten
        files = [f"--{split}pref={text / f'wiki.{split}.tokens'}" for split in SPLITS]
        preprocess(unfinished, workers, ["--only-source", *files])
        if unchecked:
            mark_unchecked(unfinished)
    note(f"{destination} is ready")


def main(corpus: WikiText) -> None:
    arguments = parser(f"{corpus.name} for fairseq, in $DATA/lines, $DATA/articles or $DATA/bytes")
    arguments.add_argument(
        "--breaks",
        choices=("lines", *REWRITE),
        default="lines",
        help=(
            "put an </s> after every line, as for published numbers, or after every article; or "
            "cut the lines into bytes (default: %(default)s)"
        ),
    )
    args = arguments.parse_args()
    with data_folder() as data:
        destination = data / args.breaks
        if destination.exists():
            refuse_unchecked([destination], args.any_counts)
            note(f"{destination} is there already")
        else:
            text = unpack_text(corpus, data, check=not args.any_counts)
            binarise(text, destination, args.breaks, args.workers)
