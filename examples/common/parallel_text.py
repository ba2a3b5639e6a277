"""Parallel text: a file for each language; lines of the same number are translations."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from common.archives import check_counts
from common.messages import fail, note
from common.prepare import require_files

SPLITS = ("train", "valid", "test")
SOURCE = "de"
TARGET = "en"
LANGUAGES = (SOURCE, TARGET)


def read_lines(path: Path, fail: Callable[[str], NoReturn] = fail) -> list[str]:
    """Return the lines without their ends.

    Only a line feed ends a line: sentences of TED contain other separators, such as a lone CR.

    Args:
        path: the path of the text
        fail: ends the program if the text is not UTF-8; that of prepare.sh by default
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        fail(f"{path}: is not UTF-8 at byte {error.start:,}; must be UTF-8")
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def write_lines(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)


def pairs_of(source: Sequence[str], target: Sequence[str], name: str) -> list[tuple[str, str]]:
    """Pair the sentences of both languages; end the program if their numbers differ."""
    refuse_other_numbers(source, target, name)
    return list(zip(source, target))


def refuse_other_numbers(source: Sequence[str], target: Sequence[str], name: str) -> None:
    """End the program, and name `name`, if the languages have different numbers of sentences."""
    if len(source) != len(target):
        fail(
            f"{name}: {len(source):,} German and {len(target):,} English lines; must have the same "
            "number"
        )


def read_text(folder: Path, form: str = "{split}.{language}") -> dict[str, list[str]]:
    """Return the lines of each split and language, by "train.de" and so on.

    `form` is the pattern of file names.
    """
    files = {}
    for split in SPLITS:
        for language in LANGUAGES:
            files[f"{split}.{language}"] = form.format(split=split, language=language)
    require_files(folder, files.values())
    return {name: read_lines(folder / file) for name, file in files.items()}


def compare_counts(
    name: str, found: Mapping[str, int], expected: Mapping[str, int], any_counts: bool
) -> None:
    """End the program unless `found` is as expected; with --any-counts, only print it."""
    if any_counts:
        numbers = [f"{number:,} {what}" for what, number in found.items()]
        note(f"{name}: {', '.join(numbers)} (not checked)")
    else:
        check_counts(name, found, expected)


def groups(lengths: Sequence[int], about: int) -> list[range]:
    """Group consecutive sentences, so that each group has about as many tokens as asked for.

    Args:
        lengths: tokens of every sentence
        about: tokens of a group; a sentence joins the group if that brings it nearer to this number

    Returns:
        the line numbers of every group; the last group may be shorter
    """
    parts = []
    start = 0
    total = 0  # tokens of the sentences from `start` on
    for i, length in enumerate(lengths):
        if i > start and total + length / 2 >= about:
            parts.append(range(start, i))
            start = i
            total = 0
        total += length
    if start < len(lengths):
        parts.append(range(start, len(lengths)))
    return parts


def joined(lines: Sequence[str], parts: Iterable[range]) -> list[str]:
    """Join the lines of each part, as `groups` returns them, to one line."""
    return [" ".join(lines[part.start : part.stop]) for part in parts]
