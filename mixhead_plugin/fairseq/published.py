"""Convert a checkpoint of the Mixhead authors' code into one of the plugin: `mixhead convert`.

Their attention, github.com/zhongzhang1/mixhead, keeps fairseq's projections and adds these tensors:

  A  stochastic_w [H, H]                     here head_mixing.weight
  B  stochastic_w [D, H], bias [H, H]        here head_mixing.query_weight, head_mixing.bias

Both compute M from them as the plugin does: M[j, i] is the weight of source head j, and queries are
not scaled yet.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any, NamedTuple

from fairseq import models as registries
from torch import Tensor

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq import rewriting
from mixhead_plugin.fairseq.config import model_name
from mixhead_plugin.fairseq.options import SCOPES
from mixhead_plugin.heads.sites import where

# The authors' code numbers its kinds of mixing. These compute the paper's A (7; 9 and 10 with a
# frozen M) and B (17; 14 with another start). The others normalise M, or have no static part.
PUBLISHED_TYPES = (7, 9, 10, 14, 17)

ENDING = ".stochastic_w"  # of the name of a mixing's tensor in their code


class Converted(NamedTuple):
    """Tensors with the plugin's names, and the flags that they need."""

    tensors: dict[str, Tensor]
    head_mixing: str
    attention_scope: str
    head_dim: int | None  # None for embedding / heads


def convert(file: str, out: str) -> str:
    """Write a model of the authors' code as a checkpoint of the plugin.

    Neither data nor dictionaries are read, and the state of the optimizer is left out.

    Args:
        file: a checkpoint of their code
        out: a new file

    Returns:
        the architecture, `mixhead_<theirs>`

    Raises:
        OptionError: no `file`, an `out` that exists, no mixing of the authors' code, one that the
            plugin does not have, or an architecture that it does not have
    """
    state = rewriting.read(file, out)
    ours = converted(file, state["model"])
    cfg = rewriting.plain(state["cfg"])
    flags = vars(cfg["model"]) if isinstance(cfg["model"], Namespace) else cfg["model"]
    theirs = model_name(Namespace(**flags))
    arch = f"mixhead_{theirs}"
    if arch not in registries.ARCH_MODEL_REGISTRY and arch not in registries.MODEL_REGISTRY:
        raise OptionError(
            f"{file}: --arch {theirs}: must be an architecture of fairseq that the plugin has, too"
        )
    _refuse_other_mixings(file, flags)

    for name in ("arch", "_name"):
        if flags.get(name) == theirs:
            flags[name] = arch
    flags["head_mixing"] = ours.head_mixing
    flags["attention_scope"] = ours.attention_scope
    flags["head_dim"] = ours.head_dim
    rewriting.write(state, cfg, ours.tensors, out)
    return arch


def _refuse_other_mixings(file: str, flags: Mapping[str, Any]) -> None:
    """Refuse a mixing that the plugin does not compute.

    Their arguments are in the config only if the training got them as flags.
    """
    mix_type = flags.get("mix_type", -1)
    if mix_type not in (-1, *PUBLISHED_TYPES):
        raise OptionError(
            f"{file}: mix_type {mix_type}: must be one of {', '.join(map(str, PUBLISHED_TYPES))}"
        )
    if flags.get("pre_mix", False):
        raise OptionError(
            f"{file}: pre_mix: must be false; --score-mixing mixes scores before masks are added"
        )


def converted(file: str, tensors: Mapping[str, Tensor]) -> Converted:
    """Return the tensors of the authors' code with the plugin's names, and the flags they need.

    Args:
        file: the checkpoint, for messages
        tensors: the tensors of the model, by name

    Raises:
        OptionError: no mixing, one that the plugin does not have, or several kinds of them
    """
    mixed = [name.removesuffix(ENDING) for name in tensors if name.endswith(ENDING)]
    if not mixed:
        raise OptionError(
            f"{file}: has no tensor *{ENDING}, so it is no model of the authors' Mixhead code"
        )

    renamed = dict(tensors)
    mixings: set[str] = set()
    head_dims: set[int | None] = set()
    for name in mixed:
        weight = renamed.pop(f"{name}{ENDING}")
        bias = renamed.pop(f"{name}.bias", None)
        query = tensors.get(f"{name}.q_proj.weight")  # [H * D, C]
        _check_matrices(file, name, weight, query)
        assert query is not None

        heads = weight.size(1)
        head_dim = query.size(0) // heads
        if bias is None and weight.shape == (heads, heads):
            mixings.add("position-independent")
            renamed[f"{name}.head_mixing.weight"] = weight
        elif bias is not None and weight.shape == (head_dim, heads):
            mixings.add("position-wise")
            renamed[f"{name}.head_mixing.query_weight"] = weight
            renamed[f"{name}.head_mixing.bias"] = bias
        else:
            with_bias = "without a bias" if bias is None else "with a bias"
            raise OptionError(
                f"{file}: {name}{ENDING} is {list(weight.shape)} {with_bias}; "
                f"must be [{heads}, {heads}] without one (A), or [{head_dim}, {heads}] with one (B)"
            )
        is_square = query.size(0) == query.size(1)
        head_dims.add(None if is_square else head_dim)

    if len(mixings) > 1:
        raise OptionError(
            f"{file}: mixes some attentions position-independent, some position-wise; must be one "
            "kind"
        )
    if len(head_dims) > 1:
        raise OptionError(f"{file}: its attentions have heads of several sizes; must be one size")
    return Converted(renamed, mixings.pop(), _scope(file, tensors, mixed), head_dims.pop())


def _check_matrices(file: str, name: str, weight: Tensor, query: Tensor | None) -> None:
    """Refuse tensors of a mixed attention whose sizes tell no number of heads.

    Args:
        file: the checkpoint, for messages
        name: the attention's name in the model, such as decoder.layers.0.self_attn
        weight: the attention's `stochastic_w`
        query: the weight of the projection to queries; None if the checkpoint lacks it
    """
    if query is None:
        raise OptionError(
            f"{file}: has {name}{ENDING}, but no {name}.q_proj.weight; must be a whole model"
        )
    if weight.dim() != 2 or weight.size(1) == 0 or query.dim() != 2:
        raise OptionError(
            f"{file}: {name}{ENDING} is {list(weight.shape)}, {name}.q_proj.weight is "
            f"{list(query.shape)}; both must be matrices with numbers"
        )


def _scope(file: str, tensors: Mapping[str, Tensor], mixed: list[str]) -> str:
    """Return the --attention-scope that covers the mixed attentions, and no other."""
    ending = ".q_proj.weight"
    every = [name.removesuffix(ending) for name in tensors if name.endswith(ending)]
    for scope, sites in SCOPES.items():
        covered = {name for name in every if where(name).site in sites}
        if covered == set(mixed):
            return scope
    raise OptionError(
        f"{file}: mixes {len(mixed)} of {len(every)} attentions, which no --attention-scope covers"
    )
