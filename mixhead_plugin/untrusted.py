"""Files that others may have written: checkpoints, dictionaries and binarised data, checked while fairseq reads them.

What cannot be right is refused in one line that names the file, before it is computed with. A check costs a fraction of
the reading.
"""

import ast
import errno
import logging
import os
import pickle
import re
import struct
from argparse import Namespace
from typing import Any, Dict, Iterator, Optional, Tuple, Union

import numpy as np
import torch
from fairseq.data import indexed_dataset
from omegaconf import DictConfig, ListConfig, OmegaConf

from mixhead_plugin.errors import OptionError

logger = logging.getLogger(__name__)

# ---- checkpoints -----------------------------------------------------------------------------------------------------

# Strings of a config that fairseq passes to Python's eval() when it builds the model or the criterion.
EVALUATED = frozenset(
    """
    adaptive_input_cutoff adaptive_softmax_cutoff character_filters pretrained project_input gated_attention downsample
    encoder_layers encoder_attention decoder_layers decoder_attention self_attention conv_feature_layers
    conv_aggregator_layers wer_args feature_encoder_spec left_pad_source left_pad_target decoder_zero_init
    encoder_xformers_att_config decoder_xformers_att_config adam_betas adamax_betas adafactor_eps lamb_betas
    pipeline_balance pipeline_devices pipeline_encoder_balance pipeline_encoder_devices pipeline_decoder_balance
    pipeline_decoder_devices
    """.split()
)
# A reference of a config that computes something: ${name:...}, unlike ${name}.
_COMPUTED = re.compile(r"\$\{\s*[\w.]+\s*:")
# What the system says of a file that may well be whole.
UNREADABLE = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
# fairseq keeps a tensor for its type alone, with whatever was in the memory.
WITHOUT_VALUE = "_float_tensor"
_NUMBERS = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Load)


# The checkpoint that this process has read last: its tensors do not know the file that they come from.
last_checkpoint: Optional[str] = None


def load_checkpoint(stock: Any, path: str, *args: Any, **settings: Any) -> Dict[str, Any]:
    """A checkpoint's state, from fairseq's own function `stock`.

    Raises:
        OptionError: it cannot be read, has other than a checkpoint has, code, or weights that are no numbers
    """
    global last_checkpoint
    last_checkpoint = str(path)
    try:
        state = stock(path, *args, **settings)
    except OptionError:
        raise
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise OptionError(
            f"{path}: holds other than tensors and plain values, or is not a checkpoint that fairseq-train wrote; "
            f"not loaded, as weights_only forbids it{f' ({found[1]})' if found else ''}"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # a damaged or foreign file fails in any way, and most of them say nothing of the file
        if isinstance(error, OSError) and error.errno in UNREADABLE:
            raise OptionError(f"{path}: cannot be read: {error.strerror}") from error
        given = settings.get("arg_overrides", args[0] if args else None)
        if given and _loads(stock, path):
            raise OptionError(f"{path}: its config does not take {given}: {first_line(error)}") from error
        reason = f" ({first_line(error)})" if isinstance(error, (OSError, EOFError)) and str(error) else ""
        raise OptionError(f"{path}: is damaged, or not a checkpoint that fairseq-train wrote{reason}") from error
    check_state(str(path), state)
    return state


def _loads(stock: Any, path: str) -> bool:
    try:
        stock(path)
    except Exception:
        return False
    return True


def check_state(path: str, state: Any) -> None:
    """Refuse what no training writes.

    Raises:
        OptionError: see `load_checkpoint`
    """
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(model, dict) or not any(isinstance(value, torch.Tensor) for value in model.values()):
        raise OptionError(f"{path}: not a checkpoint that fairseq-train wrote: no tensors of a model")
    cfg = state.get("cfg")
    foreign = OptionError(f"{path}: not a checkpoint that fairseq-train wrote: no config of a model")
    if cfg is not None and not isinstance(cfg, (dict, DictConfig)):
        raise foreign
    for where in ("cfg", "args"):
        for name, value in _values(state.get(where)):
            if name in EVALUATED and isinstance(value, (str, bytes)) and not is_arithmetic(value):
                raise OptionError(f"{path}: its {name} is no list of numbers; not loaded")
            if isinstance(value, str) and _COMPUTED.search(value):
                raise OptionError(f"{path}: its {name} refers to what is to be computed; not loaded")
    if cfg is not None and not isinstance(cfg.get("model"), (dict, DictConfig, Namespace)):
        raise foreign
    check_finite(path, model)


def check_finite(path: str, model: Dict[str, Any]) -> None:
    """Refuse weights that are NaN or infinite: a model of them writes nonsense with a straight face.

    Raises:
        OptionError: how many tensors have such values, and the first of them
    """
    bad = [name for name, value in model.items() if is_bad(name, value)]
    if bad:
        raise OptionError(
            f"{path}: has NaN or infinite values in {len(bad)} of {len(model)} tensors, the first is {bad[0]}; "
            "must be finite, take an earlier checkpoint"
        )


def is_bad(name: str, value: Any) -> bool:
    """Whether an entry of a model's state, parameter or buffer, is a tensor that has NaN or infinite numbers."""
    if not isinstance(value, torch.Tensor) or name.endswith(WITHOUT_VALUE):
        return False
    return (value.is_floating_point() or value.is_complex()) and not bool(value.isfinite().all())


def _values(config: Any) -> Iterator[Tuple[str, Any]]:
    """Names and values of a config, at any depth; those of a list by the list's name."""
    if OmegaConf.is_config(config):
        config = OmegaConf.to_container(config, resolve=False)
    if isinstance(config, str):  # a reference in the place of the whole
        yield "config", config
        return
    for name, value in (vars(config) if isinstance(config, Namespace) else config or {}).items():
        if isinstance(value, (dict, Namespace, DictConfig)):
            yield from _values(value)
        elif isinstance(value, (list, tuple, ListConfig)):
            for part in value:
                yield from _values(part if isinstance(part, (dict, Namespace, DictConfig)) else {name: part})
        else:
            yield name, value


def is_arithmetic(text: Union[str, bytes]) -> bool:
    """Whether `text` is a Python expression of numbers and strings alone, such as '[(1, 64)] * 2'."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    # no powers: 9 ** 9 ** 9 never ends
    return all(isinstance(node, _NUMBERS) and not isinstance(node, ast.Pow) for node in ast.walk(tree))


# ---- dictionaries ----------------------------------------------------------------------------------------------------


def load_dictionary(stock: Any, dictionary: Any, file: Any) -> None:
    """Add the symbols of a file by fairseq's own function `stock`.

    Raises:
        OptionError: the file has no symbols, or a line that is not a symbol and how often it occurs
    """
    if not isinstance(file, str) or not os.path.isfile(file):  # an open one, which `stock` calls itself with
        stock(dictionary, file)
        return
    before = len(dictionary)
    try:
        stock(dictionary, file)
    except Exception as error:
        raise OptionError(_dictionary_problem(file) or f"{file}: {first_line(error)}") from error
    if len(dictionary) == before:
        raise OptionError(f"{file}: has no symbols; must have a line '<symbol> <count>' for each")
    if min(dictionary.count[before:]) < 0:
        raise OptionError(_dictionary_problem(file) or f"{file}: has a negative count")


def _dictionary_problem(path: str) -> Optional[str]:
    """What is wrong with which line."""
    lines: Dict[str, int] = {}
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                words = line.rstrip().rsplit(" ", 1)
                overwrite = words[-1] == "#fairseq:overwrite"
                if overwrite:
                    words = words[0].rsplit(" ", 1)
                try:
                    negative = int(words[1]) < 0
                except (ValueError, IndexError):
                    return f"{path}: line {number} is {line.rstrip()[:40]!r}, must be '<symbol> <count>'"
                if negative:
                    return f"{path}: line {number} has the count {words[1]}, must be at least 0"
                if words[0] in lines and not overwrite:
                    return f"{path}: line {number} has {words[0][:40]!r} again, it was in line {lines[words[0]]}"
                lines[words[0]] = number
    except UnicodeDecodeError:
        return f"{path}: is not UTF-8; must be a dictionary that fairseq-preprocess wrote"
    return None


# ---- binarised data --------------------------------------------------------------------------------------------------

MMAP, CACHED = b"MMIDIDX\x00\x00", b"TNTIDX\x00\x00"
PREPROCESS = "run fairseq-preprocess again"
CHUNK = 1 << 20  # sentences
LOOKED_AT = 1 << 27  # tokens, from the beginning, whose numbers are compared with the dictionary's


def check_binarised(path: str, symbols: Optional[int] = None) -> None:
    """Refuse a data set whose files do not belong together; `path` is without .bin and .idx.

    fairseq would read what lies behind the end of a short index, and fail at the first batch that needs what a short
    .bin lacks.

    Args:
        symbols: of its dictionary

    Raises:
        OptionError: one of the files is missing, empty, truncated or of another format, or a token is in no dictionary
    """
    index, data = f"{path}.idx", f"{path}.bin"
    there = [os.path.isfile(file) for file in (index, data)]
    if not any(there):
        return
    if not all(there):
        missing, other = (data, index) if there[0] else (index, data)
        raise OptionError(f"{missing}: is missing beside {os.path.basename(other)}; {PREPROCESS}")
    with open(index, "rb") as file:
        magic = file.read(len(MMAP))
        if magic == MMAP:
            _check_mmap(index, data, file, symbols)
        elif magic[: len(CACHED)] == CACHED:
            _check_cached(index, data, file)
        elif not magic.startswith(b"HUFFIDX"):
            raise OptionError(f"{index}: is empty or no index that fairseq-preprocess wrote; {PREPROCESS}")


def _check_mmap(index: str, data: str, file: Any, symbols: Optional[int]) -> None:
    head = file.read(17)
    if len(head) < 17:
        raise OptionError(f"{index}: is truncated after {len(MMAP) + len(head)} bytes; {PREPROCESS}")
    version, code, lines = struct.unpack("<QBQ", head)
    dtype = indexed_dataset._code_to_dtype.get(code)
    if version != 1 or dtype is None:
        raise OptionError(f"{index}: is of format {version} with tokens of type {code}, which fairseq does not know")
    if lines == 0:
        raise OptionError(f"{index}: has no sentences; a set must have at least one")
    size, expected = os.path.getsize(index), len(MMAP) + len(head) + 12 * lines
    if size != expected:
        raise OptionError(f"{index}: has {size:,} bytes, {lines:,} sentences need {expected:,}; {PREPROCESS}")
    lengths = np.memmap(index, np.int32, "r", offset=file.tell(), shape=(lines,))
    begins = np.memmap(index, np.int64, "r", offset=file.tell() + lengths.nbytes, shape=(lines,))
    if lengths.min() < 0 or begins.min() < 0:
        raise OptionError(f"{index}: is damaged, it has lengths or places below 0; {PREPROCESS}")
    width, needed = np.dtype(dtype).itemsize, 0
    for first in range(0, lines, CHUNK):  # not all at once: LM1B has 30 million sentences
        part = slice(first, first + CHUNK)
        needed = max(needed, int((begins[part] + lengths[part].astype(np.int64) * width).max()))
    size = os.path.getsize(data)
    if size != needed:
        raise OptionError(f"{data}: has {size:,} bytes, {index} is of {needed:,}; {PREPROCESS}")
    if size == 0:
        raise OptionError(f"{data}: has no tokens; {PREPROCESS}")
    if symbols is not None:
        largest = int(np.memmap(data, dtype, "r")[:LOOKED_AT].max())
        if largest >= symbols:
            raise OptionError(
                f"{data}: has the token {largest}, its dictionary has {symbols} symbols; must be the dictionary that "
                "the data were prepared with"
            )


def _check_cached(index: str, data: str, file: Any) -> None:
    file.seek(len(CACHED))
    head = file.read(40)
    if len(head) < 40:
        raise OptionError(f"{index}: is truncated after {len(CACHED) + len(head)} bytes; {PREPROCESS}")
    version, code, width, lines, dimensions = struct.unpack("<QQQQQ", head)
    if version != 1 or code not in indexed_dataset._code_to_dtype:
        raise OptionError(f"{index}: is of format {version} with tokens of type {code}, which fairseq does not know")
    if lines == 0:
        raise OptionError(f"{index}: has no sentences; a set must have at least one")
    size, expected = os.path.getsize(index), len(CACHED) + len(head) + 8 * (2 * (lines + 1) + dimensions)
    if size != expected:
        raise OptionError(f"{index}: has {size:,} bytes, {lines:,} sentences need {expected:,}; {PREPROCESS}")
    file.seek(8 * (lines + 1), os.SEEK_CUR)
    needed = int(np.fromfile(file, np.int64, lines + 1).max()) * width
    size = os.path.getsize(data)
    if size != needed:
        raise OptionError(f"{data}: has {size:,} bytes, {index} is of {needed:,}; {PREPROCESS}")


# ---- text ------------------------------------------------------------------------------------------------------------


def first_line(error: BaseException) -> str:
    """The first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
