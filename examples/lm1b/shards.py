"""Count the shards of a text, and convert them to fairseq's binary files.

A shard is done when its folder exists. In memory there is one block of a shard at a time.
"""

import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import struct
import sys
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from common.archives import bar
from common.files import written_whole
from common.messages import fail
from tqdm import tqdm

BLOCK = 1 << 20  # bytes of text in memory at a time


class Damaged(Exception):
    """A shard is not text; the message is for the user."""


def blocks(path: Path) -> Iterator[bytes]:
    """Yield a file in blocks of whole lines."""
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block + file.readline()


def lines_of(block: bytes) -> list[bytes]:
    """Split at line feeds alone, as the published counts do; str.splitlines has other line ends."""
    lines = block.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


# ---- counting ----------------------------------------------------------------------------------


def count_shard(shard: Path, folder: Path) -> None:
    """Write counts.json, with lines and tokens, and words.txt, with the number of each type.

    ASCII white space separates tokens, because the corpus has other spaces inside words.

    Args:
        shard: the text
        folder: the folder to write to, which is made
    """
    lines = 0
    words: Counter[bytes] = Counter()
    for block in blocks(shard):
        lines += len(lines_of(block))
        words.update(block.split())
    folder.mkdir()
    with (folder / "words.txt").open("wb") as file:
        file.writelines(b"%s %d\n" % item for item in words.items())
    _write_json(folder / "counts.json", {"lines": lines, "tokens": words.total()})


def add_counts(folders: Sequence[Path]) -> tuple[dict[str, int], Counter[bytes]]:
    """Return the lines, tokens and types of all shards together, and the count of each type.

    The 2.4 million types of LM1B take about half a gigabyte of memory.
    """
    totals = {"lines": 0, "tokens": 0}
    words: Counter[bytes] = Counter()
    with bar(None, "adding up the counts", leave=False) as progress:
        for folder in folders:
            counts = json.loads((folder / "counts.json").read_text())
            for what in totals:
                totals[what] += counts[what]
            with (folder / "words.txt").open("rb") as file:
                for line in file:
                    word, _, number = line.rpartition(b" ")
                    words[word] += int(number)
                progress.update(file.tell())
    return {**totals, "types": len(words)}, words


# ---- symbols -----------------------------------------------------------------------------------


class Symbols(NamedTuple):
    """The numbers of fairseq's special symbols."""

    first: int  # the first word of dict.txt; the others follow in order
    unknown: int
    end: int  # of a line


# lines -> the numbers of each, without the end of line
Encoder = Callable[[list[bytes]], Iterator[list[int]]]


class Coding(NamedTuple):
    """How a text becomes numbers.

    Each process makes its own encoder, by `make(source, symbols)`.

    Args:
        make: `word_encoder` or `piece_encoder`
        source: the file that it reads
        symbols: the numbers of fairseq's special symbols
        dtype: the type of the numbers in the binary files
    """

    make: Callable[[Path, Symbols], Encoder]
    source: Path
    symbols: Symbols
    dtype: type


def word_encoder(dictionary: Path, symbols: Symbols) -> Encoder:
    """Return an encoder to whole words; a word that dict.txt lacks is unknown."""
    with dictionary.open("rb") as file:
        numbers = {line.rpartition(b" ")[0]: symbols.first + i for i, line in enumerate(file)}

    def encode(lines: list[bytes]) -> Iterator[list[int]]:
        for line in lines:
            yield [numbers.get(word, symbols.unknown) for word in line.split()]

    return encode


def piece_encoder(model: Path, symbols: Symbols) -> Encoder:
    """Return an encoder to sentencepiece's pieces.

    dict.txt has them in the model's order, without control symbols.
    """
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    numbers = numpy.full(len(pieces), symbols.unknown)
    ordinary = [i for i in range(len(pieces)) if not (pieces.is_control(i) or pieces.is_unknown(i))]
    numbers[ordinary] = symbols.first + numpy.arange(len(ordinary))

    def encode(lines: list[bytes]) -> Iterator[list[int]]:
        for line in pieces.encode([line.decode("utf-8") for line in lines], out_type=int):
            yield numbers[line].tolist()

    return encode


# ---- binary files ------------------------------------------------------------------------------


def binarise_shard(
    shard: Path, folder: Path, encode: Encoder, symbols: Symbols, dtype: type
) -> None:
    """Write tokens.bin, sizes.bin and counts.json into `folder`.

    sizes.bin has the tokens of each line; counts.json has lines, tokens and unknown ones.
    """
    counts = {"lines": 0, "tokens": 0, "unknown": 0}
    folder.mkdir()
    with (folder / "tokens.bin").open("wb") as tokens, (folder / "sizes.bin").open("wb") as sizes:
        for block in blocks(shard):
            numbers: list[int] = []
            lengths = array("i")
            try:
                for line in encode(lines_of(block)):
                    numbers += line
                    numbers.append(symbols.end)
                    lengths.append(len(line) + 1)
            except UnicodeDecodeError as error:
                raise Damaged(
                    f"{shard}: is not UTF-8 after {counts['lines']:,} lines ({error.reason})"
                ) from error
            tokens.write(numpy.array(numbers, dtype=dtype).tobytes())
            sizes.write(lengths.tobytes())
            counts["lines"] += len(lengths)
            counts["tokens"] += len(numbers)
            counts["unknown"] += numbers.count(symbols.unknown)
    _write_json(folder / "counts.json", counts)


def join(folders: Sequence[Path], prefix: Path, dtype: type) -> dict[str, int]:
    """Join the shards to one MMapIndexedDataset of fairseq; return its counts.

    Its files are `prefix`.bin and `prefix`.idx.

    fairseq's own builder keeps the offset of every line as a Python object, which takes a gigabyte
    for LM1B.
    """
    from fairseq.data.indexed_dataset import MMapIndexedDataset

    total = {"lines": 0, "tokens": 0, "unknown": 0}
    for folder in folders:
        for what, number in json.loads((folder / "counts.json").read_text()).items():
            total[what] += number
    width = numpy.dtype(dtype).itemsize
    data = prefix.with_name(f"{prefix.name}.bin")
    index = prefix.with_name(f"{prefix.name}.idx")
    with (
        bar(total["tokens"] * width, f"joining {prefix.name}", leave=False) as progress,
        data.open("wb") as target,
    ):
        for folder in folders:
            with (folder / "tokens.bin").open("rb") as source:
                shutil.copyfileobj(source, target, BLOCK)
                progress.update(source.tell())
    with MMapIndexedDataset.Index.writer(str(index), dtype):  # the header
        pass
    with index.open("ab") as target:
        target.write(struct.pack("<Q", total["lines"]))
        for folder in folders:
            target.write((folder / "sizes.bin").read_bytes())
        offset = 0
        for folder in folders:
            sizes = numpy.fromfile(folder / "sizes.bin", dtype=numpy.int32)  # tokens of each line
            lengths = sizes.astype(numpy.int64) * width  # bytes
            ends = offset + numpy.cumsum(lengths)
            target.write((ends - lengths).tobytes())
            offset += int(lengths.sum())
    expected = total["tokens"] * width
    if offset != expected or data.stat().st_size != expected:
        fail(f"{folders[0].parent}: damaged, its numbers of tokens differ; remove it and run again")
    return total


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content) + "\n")


# ---- many shards, many processes ---------------------------------------------------------------

_encoders: dict[Coding, Encoder] = {}  # at most one, kept by each process from shard to shard


def _with_encoder(shard: Path, folder: Path, coding: Coding) -> None:
    if coding not in _encoders:
        _encoders.clear()
        _encoders[coding] = coding.make(coding.source, coding.symbols)
    binarise_shard(shard, folder, _encoders[coding], coding.symbols, coding.dtype)


def _finish(work: Callable[..., None], shard: Path, folder: Path, *rest: Any) -> None:
    with written_whole(folder) as unfinished:
        work(shard, unfinished, *rest)


def _start_worker() -> None:
    """Leave Ctrl-C to the parent process, and end when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process().sentinel

    def watch() -> None:
        multiprocessing.connection.wait([parent])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _each(
    title: str,
    shards: Sequence[Path],
    folder: Path,
    workers: int,
    work: Callable[..., None],
    *rest: Any,
) -> None:
    """Call `work(shard, folder/<name of shard>, *rest)` for the shards that have no folder yet."""
    missing = [shard for shard in shards if not (folder / shard.name).is_dir()]
    sizes = {shard: shard.stat().st_size for shard in shards}
    everything = sum(sizes.values())
    done = everything - sum(sizes[shard] for shard in missing)
    folder.mkdir(parents=True, exist_ok=True)
    tasks = {shard: (work, shard, folder / shard.name, *rest) for shard in missing}
    processes = min(workers, len(missing))
    try:
        with bar(everything, title, initial=done) as progress:
            if processes < 2:
                for shard, task in tasks.items():
                    _finish(*task)
                    progress.update(sizes[shard])
            else:
                for shard in _side_by_side(tasks, processes):
                    progress.update(sizes[shard])
    except BrokenProcessPool:
        fail(
            f"{title}: a process was killed, out of memory? Run again with a smaller --workers "
            f"than {workers}"
        )
    except Damaged as error:
        fail(str(error))


def _side_by_side(tasks: Mapping[Path, tuple], workers: int) -> Iterator[Path]:
    """Call `_finish(*task)` for each task in a process.

    Yield the key of each when it has ended.
    """
    # spawned, because forking a process that has threads may hang
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker) as pool:
        futures = {pool.submit(_finish, *task): key for key, task in tasks.items()}
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                tqdm.write(
                    "prepare: interrupted; waits until the current shards are finished",
                    file=sys.stderr,
                )
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def count_shards(shards: Sequence[Path], folder: Path, workers: int) -> list[Path]:
    """Call `count_shard` for every shard that was not counted.

    Return the folders in the order of the shards.
    """
    _each("counting words", shards, folder, workers, count_shard)
    return [folder / shard.name for shard in shards]


def binarise_shards(
    title: str, shards: Sequence[Path], folder: Path, workers: int, coding: Coding
) -> list[Path]:
    """Call `binarise_shard` for every shard that has no folder.

    Return the folders in the order of the shards.
    """
    try:
        _each(title, shards, folder, workers, _with_encoder, coding)
    finally:
        _encoders.clear()
    return [folder / shard.name for shard in shards]
