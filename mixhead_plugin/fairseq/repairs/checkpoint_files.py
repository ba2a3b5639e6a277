"""Refuse a checkpoint that is hostile, damaged or does not fit, in one line that names the file.

fairseq passes strings of a checkpoint's config to eval(), and loads NaN weights. Its errors rarely
name a damaged file, and never the flag that does not fit.
"""

import ast
import errno
import pickle
import re
import textwrap
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.trainer import Trainer
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mixhead_plugin.errors import CheckpointError, OptionError
from mixhead_plugin.fairseq.replace import replaces

# The flags that fairseq passes to Python's eval() when it builds a task, model, criterion or
# optimizer.
EVALUATED = frozenset(
    """
        adaptive_input_cutoff adaptive_softmax_cutoff character_filters pretrained project_input
        gated_attention downsample encoder_layers encoder_attention decoder_layers decoder_attention
        self_attention conv_feature_layers conv_aggregator_layers wer_args feature_encoder_spec
        left_pad_source left_pad_target decoder_zero_init encoder_xformers_att_config
        decoder_xformers_att_config xformers_att_config adam_betas adamax_betas adafactor_eps
        lamb_betas pipeline_balance pipeline_devices pipeline_encoder_balance
        pipeline_encoder_devices pipeline_decoder_balance pipeline_decoder_devices
        override_encoder_layers
    """.split()
)
# A reference such as ${model.dropout} only names another value. For ${name:...}, even
# ${${other}:...}, omegaconf calls a function: what is left after all references are taken away.
_REFERENCE = re.compile(r"\$\{\s*[\w.\[\]]+\s*\}")
# What a list of numbers consists of, in Python's syntax: no names, no calls.
_ARITHMETIC = (
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.Dict,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.Load,
)


@replaces(checkpoint_utils, "load_checkpoint_to_cpu")
def _load(
    original, path: str, arg_overrides: dict | None = None, load_on_all_ranks: bool = False
) -> dict:
    try:
        state = original(path, arg_overrides, load_on_all_ranks)
    except (OptionError, MemoryError):
        raise
    except pickle.UnpicklingError as error:
        message = (
            f"{path}: holds other than tensors and plain values, or is not a checkpoint that "
            "fairseq-train wrote; not loaded, as weights_only forbids it"
        )
        match = re.search(r"GLOBAL (\S+)", str(error))
        if match:  # torch's refusal of a class
            message += f" ({match[1]})"
        raise OptionError(message) from error
    except Exception as error:  # damaged files fail in many ways
        # The system's own errors, such as a missing file, speak for themselves. EINVAL is none:
        # torch seeks beyond the end of a file that was cut.
        by_system = getattr(error, "errno", None) not in (None, errno.EINVAL)
        by_overrides = arg_overrides and isinstance(error, (OmegaConfBaseException, TypeError))
        if by_system or by_overrides:
            raise
        raise OptionError(
            f"{path}: is damaged, or not a checkpoint that fairseq-train wrote"
        ) from error
    check_state(str(path), state)
    return state


@replaces(Trainer, "load_checkpoint")
def _load_into_trainer(original, trainer, filename: str, *args, **kwargs):
    try:
        return original(trainer, filename, *args, **kwargs)
    except Exception as error:
        # fairseq replaces each error of a model's `load_state_dict` by its own
        refused = error.__context__
        if isinstance(refused, CheckpointError):
            raise OptionError(f"{filename}: {refused}") from error
        problem = mismatch(str(refused))
        if problem:
            raise OptionError(f"{filename}: {problem}") from error
        if re.search(r"please reset the optimizer|parameter group", str(error)):
            # fairseq asks to reset the optimizer where the loss is another one, too.
            part = "criterion" if str(error).startswith("Criterion") else "optimizer"
            raise OptionError(f"{filename}: its {part} is another one: {error}") from error
        raise


@replaces(checkpoint_utils, "load_model_ensemble_and_task")
def _load_models(original, filenames: list[str], *args, **kwargs):
    files = ":".join(filenames)  # as in --path
    try:
        return original(filenames, *args, **kwargs)
    except CheckpointError as error:
        raise OptionError(f"{files}: {error}") from error
    except RuntimeError as error:
        problem = mismatch(str(error))
        if problem:
            raise OptionError(f"{files}: {problem}") from error
        if str(error).startswith("Neither args nor cfg"):
            raise OptionError(
                f"{files}: has no config; must be a checkpoint that fairseq-train wrote, not its "
                "tensors alone"
            ) from error
        raise
    except OSError as error:
        # fairseq raises it without the name of a file, so `errors.py` would not know it
        match = re.fullmatch(r"Model file not found: (.*)", str(error))
        if match is None:
            raise
        raise FileNotFoundError(f"{match[1]}: no such file; must be a checkpoint") from error


# In torch's list of differences: the name of a tensor, its shape in the checkpoint, and in the
# model.
_SHAPE = r"torch\.Size\(\[([\d, ]*)\]\)"
_OTHER_SIZE = re.compile(
    rf"size mismatch for (\S+): copying a param with shape {_SHAPE} .*? is {_SHAPE}"
)
# Tensors with a row for each symbol of a dictionary.
_BY_SYMBOL = ("embed_tokens.weight", "output_projection.weight", "lm_head.weight", "lm_head.bias")


def mismatch(text: str) -> str:
    """Return in a few words which tensors of a checkpoint do not fit the model.

    Args:
        text: of an error; if it is not torch's list of differences, an empty string is returned
    """
    for name, shape, own_shape in _OTHER_SIZE.findall(text):
        symbols, *columns = shape.split(", ")
        own_symbols, *own_columns = own_shape.split(", ")
        if name.endswith(_BY_SYMBOL) and columns == own_columns:
            return (
                f"its dictionary is another one: the dictionary has {own_symbols} symbols, the "
                f"checkpoint's {symbols} ({name}); must be the data folder that it was trained with"
            )
    difference = re.search(r"(size mismatch for|Missing key|Unexpected key).*", text)
    if difference is None:
        return ""
    shortened = textwrap.shorten(difference[0], 200, placeholder=" ...")
    return f"is of another model; --arch and sizes must be the same: {shortened}"


def check_state(path: str, state: Any) -> None:
    """Refuse a checkpoint that fairseq would load, but cannot use or must not run.

    Args:
        path: of the file, for the message
        state: its content

    Raises:
        OptionError: no tensors, no config, code in its config, or weights that are not finite
    """
    foreign = f"{path}: not a checkpoint that fairseq-train wrote"
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(model, dict) or not _has_tensors(model):
        raise OptionError(f"{foreign}: no tensors of a model")
    cfg = state.get("cfg")
    if not isinstance(cfg, (dict, DictConfig, type(None))):
        raise OptionError(f"{foreign}: no config of a model")
    for part in ("cfg", "args"):  # the second is that of an old checkpoint
        for name, value in _values("config", state.get(part)):
            _refuse_code(path, name, value)
    if cfg is not None and not isinstance(cfg.get("model"), (dict, DictConfig, Namespace)):
        raise OptionError(f"{foreign}: no config of a model")
    check_finite(path, model)


def _has_tensors(model: dict[str, Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in model.values())


def _refuse_code(path: str, name: str, value: Any) -> None:
    """Refuse a value of a config that fairseq's eval() or omegaconf would run."""
    if name in EVALUATED and isinstance(value, (str, bytes)) and not is_arithmetic(value):
        raise OptionError(f"{path}: its {name} is no list of numbers; not loaded")
    if isinstance(value, str) and "${" in _REFERENCE.sub("", value):
        raise OptionError(f"{path}: its {name} refers to a function; not loaded")


def check_finite(path: str, model: dict[str, Any]) -> None:
    """Refuse weights that are NaN or infinite."""
    bad = [name for name, value in model.items() if is_bad(name, value)]
    if bad:
        raise OptionError(
            f"{path}: has NaN or infinite values in {len(bad)} of {len(model)} tensors, the first "
            f"is {bad[0]}; must be finite, take an earlier checkpoint"
        )


def is_bad(name: str, value: Any) -> bool:
    """Return True if an entry of a model's state is a tensor with NaN or infinite numbers."""
    if not isinstance(value, torch.Tensor):
        return False
    # Nobody reads their numbers: fairseq takes only the dtype of _float_tensor, and its DynamicConv
    # never sets the conv_bias of a layer without a bias.
    if name.endswith(("_float_tensor", "conv_bias")):
        return False
    if not value.is_floating_point() and not value.is_complex():
        return False
    # A finite sum has finite terms, and is read 20 times faster. A sum that is not finite may have
    # overflown, so only then look at each term.
    return not bool(value.sum().isfinite()) and not bool(value.isfinite().all())


def is_arithmetic(text: str | bytes) -> bool:
    """Return True if a Python expression has only numbers and strings: "[(1, 64)] * 2"."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    for node in ast.walk(tree):
        if not isinstance(node, _ARITHMETIC):
            return False
        if isinstance(node, ast.Pow):  # 9 ** 9 ** 9 never ends
            return False
    return True


def _values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a config at any depth; a list's items have the list's name."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=False)
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _values(key, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _values(name, item)
    else:
        yield name, value
