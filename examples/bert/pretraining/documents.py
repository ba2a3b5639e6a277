"""Read texts in BERT's format: one sentence a line, an empty line between documents."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Optional

from common.archives import stream_lines
from common.messages import fail
from common.wikitext import SPLITS, with_titles

HEADING = re.compile(r" = .* = \n")
ENDS = frozenset(".?!")
BEGINNING = 1 << 20  # bytes of a file that are checked for line ends
AT = re.compile(r" @([-,.])@ ")  # WikiText's mark for a sign within a word


class Text(NamedTuple):
    """A text to pre-train on."""

    splits: tuple[str, ...]
    # the split of each line, and the line; empty ones between documents
    lines: Callable[[], Iterator[tuple[str, str]]]
    unknown: Optional[str] = None  # the text's own mark for unknown words


def sentences(paragraph: str) -> Iterator[str]:
    """Cut a paragraph of WikiText's tokens into sentences.

    A closing quotation mark stays with its sentence.
    """
    sentence: list[str] = []
    ended = False
    for token in paragraph.split():
        closes = token == ")" or (token == '"' and sentence.count('"') % 2 == 1)
        if ended and not closes:
            yield " ".join(sentence)
            sentence = []
        ended = token in ENDS or (ended and closes)
        sentence.append(token)
    if sentence:
        yield " ".join(sentence)


def from_wikitext(lines: Iterable[str]) -> Iterator[str]:
    """Yield the sentences of WikiText without headings, and an empty line between articles."""
    begun = False  # whether the article has a sentence so far
    for line, is_title in with_titles(lines):
        if is_title:
            if begun:
                yield ""
            begun = False
        elif line.strip() and not HEADING.fullmatch(line):
            yield from (AT.sub(r"\1", sentence) for sentence in sentences(line))
            begun = True


def wikitext(folder: Path) -> Text:
    """Read the folder with wiki.{train,valid,test}.tokens."""

    def lines() -> Iterator[tuple[str, str]]:
        for split in SPLITS:
            text = stream_lines(folder / f"wiki.{split}.tokens", f"sentences of {split}")
            for line in from_wikitext(text):
                yield split, line

    return Text(SPLITS, lines, "<unk>")


def own_text(paths: Sequence[Path], hold_out: int) -> Text:
    """Read files in BERT's format in turn.

    One of `hold_out` documents goes to the validation set.
    """
    for path in paths:
        if path.is_dir():
            fail(f"--text {path}: must be a file, is a folder")
        if not path.is_file():
            fail(f"--text {path}: no such file")
        with path.open("rb") as file:
            beginning = file.read(BEGINNING)
        if b"\r" in beginning and b"\n" not in beginning:
            fail(f"--text {path}: its lines end in carriage returns alone, must end in line feeds")
    return Text(("train", "valid"), partial(_own_lines, paths, hold_out))


def _own_lines(paths: Sequence[Path], hold_out: int) -> Iterator[tuple[str, str]]:
    """Yield the split and the text of each line of `own_text`."""
    document = 0
    begun = False  # whether the document has a line so far
    drawn = _held_out(document, hold_out)
    for path in paths:
        # a file ends a document
        for line in chain(map(str.strip, stream_lines(path)), [""]):
            if line or begun:
                split = "valid" if document == drawn else "train"
                yield split, line
            if begun and not line:
                document += 1
                if document % hold_out == 0:
                    drawn = _held_out(document, hold_out)
            begun = bool(line)


def _held_out(first: int, number: int) -> int:
    """Draw one of `number` documents from `first` on.

    The draw depends on `first` alone, not on the text.
    """
    digest = hashlib.sha256(str(first).encode()).digest()
    return first + int.from_bytes(digest, "big") % number
