"""Check that .idx, .bin and dictionary fit each other before the first batch.

fairseq trains on damaged data until a batch needs bytes or symbols that are missing.
"""

import os
import struct
from typing import Any

import numpy as np
from fairseq.data import indexed_dataset

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.replace import replaces

# An index of `mmap`, the format that fairseq-preprocess writes by default:
#
#     MAGIC | version, code of the dtype, number of sentences | lengths, int32 | begins, int64
#           |                      HEAD                       |
MAGIC = b"MMIDIDX\x00\x00"
HEAD = "<QBQ"
OTHER_MAGIC = (b"TNTIDX\x00\x00", b"HUFFIDX")  # of formats that are not checked
AGAIN = "run fairseq-preprocess again"
COMPARED = 1 << 27  # number of tokens, from the beginning, that are compared with the dictionary


@replaces(indexed_dataset, "make_dataset")
def _make_dataset(original, path: str, impl: str, *args: Any, **kwargs: Any) -> Any:
    if impl != "raw":
        # fairseq calls it with fix_lua_indexing and dictionary, with or without their names
        dictionary = kwargs.get("dictionary", args[1] if len(args) > 1 else None)
        check(path, None if dictionary is None else len(dictionary))
    return original(path, impl, *args, **kwargs)


def check(path: str, symbols: int | None = None) -> None:
    """Refuse data that are damaged, or have tokens that the dictionary lacks.

    Args:
        path: the path of the data, without .idx and .bin
        symbols: how many symbols the dictionary has; None to leave the tokens unread

    Raises:
        OptionError: with the file and what is wrong with it
    """
    index = f"{path}.idx"
    data = f"{path}.bin"
    missing = [file for file in (index, data) if not os.path.isfile(file)]
    if len(missing) == 2:  # fairseq reports this
        return
    if missing:
        raise OptionError(f"{missing[0]}: is missing; {AGAIN}")

    with open(index, "rb") as file:
        magic = file.read(len(MAGIC))
        head = file.read(struct.calcsize(HEAD))
    if magic.startswith(OTHER_MAGIC):
        return
    if magic != MAGIC or len(head) < struct.calcsize(HEAD):
        raise OptionError(
            f"{index}: is empty, truncated or no index that fairseq-preprocess wrote; {AGAIN}"
        )
    version, code, sentences = struct.unpack(HEAD, head)
    dtype = indexed_dataset._code_to_dtype.get(code)
    if version != 1 or dtype is None:
        raise OptionError(
            f"{index}: is of format {version} with tokens of type {code}, which fairseq does not "
            "know"
        )
    token_type = np.dtype(dtype)
    _check_size(data, _size_of_data(index, sentences, token_type.itemsize), f"by {index}")
    if symbols is not None:
        _check_tokens(data, token_type, symbols)


def _check_tokens(data: str, dtype: np.dtype, symbols: int) -> None:
    """Refuse a .bin with a token that is below 0 or has no symbol."""
    tokens = np.memmap(data, dtype, "r")[:COMPARED]
    numbers: np.ndarray = tokens
    if dtype.kind == "i":
        # One pass finds both faults: without its sign, a negative number is larger than any symbol.
        numbers = tokens.view(f"u{dtype.itemsize}")
    token = tokens[numbers.argmax()]
    if not 0 <= token < symbols:
        raise OptionError(
            f"{data}: has the token {token}, its dictionary has {symbols} symbols; must be the "
            "dictionary that the data were prepared with"
        )


def _size_of_data(index: str, sentences: int, width: int) -> int:
    """Return how many bytes the .bin of an index must have; refuse a damaged index.

    Args:
        index: the file, whose head has been read
        sentences: how many sentences the index has, by its head
        width: the bytes of a token
    """
    if sentences == 0:
        raise OptionError(f"{index}: has no sentences; a set must have at least one")
    start = len(MAGIC) + struct.calcsize(HEAD)
    of_a_sentence = np.dtype(np.int32).itemsize + np.dtype(np.int64).itemsize
    _check_size(index, start + of_a_sentence * sentences, f"for {sentences:,} sentences")

    lengths = np.memmap(index, np.int32, "r", offset=start, shape=(sentences,))  # in tokens
    begins = np.memmap(index, np.int64, "r", offset=start + lengths.nbytes, shape=(sentences,))
    sizes = lengths.astype(np.int64) * width
    ends = np.cumsum(sizes)
    if sizes.min() < 0 or (begins != ends - sizes).any():
        raise OptionError(
            f"{index}: is damaged, a sentence does not begin where the one before ends; {AGAIN}"
        )
    if ends[-1] == 0:
        raise OptionError(f"{index}: has no tokens; {AGAIN}")
    return int(ends[-1])


def _check_size(path: str, needed: int, why: str) -> None:
    size = os.path.getsize(path)
    if size != needed:
        raise OptionError(f"{path}: has {size:,} bytes, {needed:,} are needed {why}; {AGAIN}")
