"""Check that .idx, .bin and dictionary fit each other before the first batch.

fairseq trains on damaged data until a batch needs bytes or symbols that are missing.
"""

import os
import struct

import numpy as np
from fairseq.data import indexed_dataset

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.replace import replaces

# of mmap, the format that fairseq-preprocess writes by default
MAGIC, HEAD = b"MMIDIDX\x00\x00", "<QBQ"
OTHER_MAGIC = (b"TNTIDX\x00\x00", b"HUFFIDX")  # of formats that are not checked
AGAIN = "run fairseq-preprocess again"
COMPARED = 1 << 27  # number of tokens, from the beginning, that are compared with the dictionary


@replaces(indexed_dataset, "make_dataset")
def _make_dataset(original, path: str, impl: str, *args, **kwargs):
    dictionary = kwargs.get("dictionary", args[1] if len(args) > 1 else None)
    if impl != "raw":
        check(path, None if dictionary is None else len(dictionary))
    return original(path, impl, *args, **kwargs)


def check(path: str, symbols: int | None = None) -> None:
    """Refuse damaged `path`.idx and `path`.bin, and tokens that a dictionary of `symbols` symbols
    lacks.
    """
    index, data = f"{path}.idx", f"{path}.bin"
    missing = [file for file in (index, data) if not os.path.isfile(file)]
    if len(missing) == 2:  # fairseq reports this
        return
    if missing:
        raise OptionError(f"{missing[0]}: is missing; {AGAIN}")
    with open(index, "rb") as file:
        magic, head = file.read(len(MAGIC)), file.read(struct.calcsize(HEAD))
    if magic.startswith(OTHER_MAGIC):
        return
    if magic != MAGIC or len(head) < struct.calcsize(HEAD):
        raise OptionError(
            f"{index}: is empty, truncated or no index that fairseq-preprocess wrote; {AGAIN}"
        )
    version, code, lines = struct.unpack(HEAD, head)
    dtype = indexed_dataset._code_to_dtype.get(code)
    if version != 1 or dtype is None:
        raise OptionError(
            f"{index}: is of format {version} with tokens of type {code}, which fairseq does not "
            "know"
        )
    _check_size(data, _size_of_data(index, lines, np.dtype(dtype).itemsize), f"by {index}")
    if symbols is None:
        return
    tokens = np.memmap(data, dtype, "r")[:COMPARED]
    # Without its sign, a negative number is larger than any symbol.
    token = tokens[
        tokens.view(f"u{tokens.itemsize}").argmax() if tokens.dtype.kind == "i" else tokens.argmax()
    ]
    if not 0 <= token < symbols:
        raise OptionError(
            f"{data}: has the token {token}, its dictionary has {symbols} symbols; must be the "
            "dictionary that the "
            "data were prepared with"
        )


def _size_of_data(index: str, lines: int, width: int) -> int:
    """Return the size of the .bin that an index of `lines` sentences needs, with tokens of `width`
    bytes.
    """
    if lines == 0:
        raise OptionError(f"{index}: has no sentences; a set must have at least one")
    start = len(MAGIC) + struct.calcsize(HEAD)
    _check_size(index, start + 12 * lines, f"for {lines:,} sentences")
    lengths = np.memmap(index, np.int32, "r", offset=start, shape=(lines,))
    begins = np.memmap(index, np.int64, "r", offset=start + lengths.nbytes, shape=(lines,))
    sizes = lengths.astype(np.int64) * width
    ends = np.cumsum(sizes)
    if sizes.min() < 0 or (begins != ends - sizes).any():
        raise OptionError(
            f"{index}: is damaged, a sentence does not begin where the one before ends; {AGAIN}"
        )
    if ends[-1] == 0:
        raise OptionError(f"{index}: has no tokens; {AGAIN}")
    return int(ends[-1])


def _check_size(path: str, needed: int, what: str) -> None:
    if os.path.getsize(path) != needed:
        raise OptionError(
            f"{path}: has {os.path.getsize(path):,} bytes, {needed:,} are needed {what}; {AGAIN}"
        )
