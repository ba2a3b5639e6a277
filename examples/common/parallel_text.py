"""Parallel text: files of one sentence a line, where equal line numbers are translations of each other."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from common.archives import check_counts, fail, note
from common.prepare import require_files

SPLITS = ("train", "valid", "test")
SOURCE, TARGET = LANGUAGES = ("de", "en")


def read_lines(path: Path) -> list[str]:
    """The lines without their ends. Only a line feed ends one: other separators stand inside sentences of TED."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        fail(f"{path}: not UTF-8 at byte {error.start:,}")
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def write_lines(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)


def pairs_of(source: Sequence[str], target: Sequence[str], name: str) -> list[tuple[str, str]]:
    """The sentences of both languages, of which there must be as many; `name` says what of."""
    if len(source) != len(target):
        fail(f"{name}: {len(source):,} German and {len(target):,} English lines, must be as many")
    return list(zip(source, target))


def read_text(folder: Path, form: str = "{split}.{language}") -> dict[str, list[str]]:
    """The lines of all splits in both languages by "train.de", ...; `form` is how their files are called."""
    names = [(split, language) for split in SPLITS for language in LANGUAGES]
    files = {".".join(name): form.format(split=name[0], language=name[1]) for name in names}
    require_files(folder, files.values())
    return {name: read_lines(folder / file) for name, file in files.items()}


def compare_counts(name: str, found: Mapping[str, int], expected: Mapping[str, int], any_counts: bool) -> None:
    """End the program unless `found` is as expected; with --any-counts, say what was found."""
    if any_counts:
        note(f"{name}: {', '.join(f'{number:,} {what}' for what, number in found.items())} (not checked)")
    else:
        check_counts(name, found, expected)


def groups(lengths: Sequence[int], about: int) -> list[range]:
    """Consecutive sentences in groups whose lengths come as near to `about` as whole sentences allow.

    Args:
        lengths: tokens of every sentence
        about: tokens of a group; a sentence joins one if that brings it nearer

    Returns:
        the line numbers of every group; the last one has what is left
    """
    found, start, total = [], 0, 0
    for i, length in enumerate(lengths):
        if i > start and total + length / 2 >= about:
            found.append(range(start, i))
            start, total = i, 0
        total += length
    if start < len(lengths):
        found.append(range(start, len(lengths)))
    return found


def joined(lines: Sequence[str], parts: Iterable[range]) -> list[str]:
    return [" ".join(lines[i] for i in part) for part in parts]
