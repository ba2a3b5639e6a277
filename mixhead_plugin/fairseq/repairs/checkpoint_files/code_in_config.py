"""Refuse a config with code in it.

fairseq passes strings of a checkpoint's config to Python's eval(), and omegaconf calls functions
that a value refers to.
"""

import ast
import re
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from mixhead_plugin.errors import OptionError

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
# A reference such as ${model.dropout} only names another value. For ${name:...} omegaconf calls a
# function, and even for ${${other}:...}. So a text calls one if it still has `${` after all
# references are taken away.
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


def refuse_code(path: str, config: Any) -> None:
    """Refuse a config with a value that fairseq's eval() or omegaconf would run.

    Args:
        path: the path of the checkpoint, for the message
        config: the config, or the flags of an old checkpoint; None if the checkpoint has none
    """
    for name, value in _values("config", config):
        if name in EVALUATED and isinstance(value, (str, bytes)) and not is_arithmetic(value):
            raise OptionError(f"{path}: its {name} is no list of numbers; not loaded")
        if isinstance(value, str) and "${" in _REFERENCE.sub("", value):
            raise OptionError(f"{path}: its {name} refers to a function; not loaded")


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
