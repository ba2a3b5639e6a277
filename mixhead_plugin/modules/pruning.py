"""Cuts heads off attentions for good: what stays of their parameters, and how a model's config says so.

Where heads mix, a head is two things that are cut apart: a source head j, whose weights P_j come from q_proj and
k_proj, and a mixed head i, whose output O_i comes from v_proj through out_proj. M loses the rows of the first and the
columns of the second.
"""

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.attention import HeadGates, MixheadAttention


class KeptHeads(NamedTuple):
    """The heads of one attention that stay, ascending; without mixing both are the same."""

    source: Tuple[int, ...]
    mixed: Tuple[int, ...]


class Axis(NamedTuple):
    """A dimension of a parameter that goes by heads."""

    dim: int
    kind: str  # a field of KeptHeads
    whole_heads: bool  # head_dim entries for each head, not one


# Every parameter of a MixheadAttention, and the dimensions of it that shrink with the heads.
PARAMETERS: Dict[str, Tuple[Axis, ...]] = {
    "q_proj.weight": (Axis(0, "source", True),),
    "q_proj.bias": (Axis(0, "source", True),),
    "k_proj.weight": (Axis(0, "source", True),),
    "k_proj.bias": (Axis(0, "source", True),),
    "bias_k": (Axis(2, "source", True),),
    "v_proj.weight": (Axis(0, "mixed", True),),
    "v_proj.bias": (Axis(0, "mixed", True),),
    "bias_v": (Axis(2, "mixed", True),),
    "out_proj.weight": (Axis(1, "mixed", True),),
    "out_proj.bias": (),
    "head_mixing.weight": (Axis(0, "source", False), Axis(1, "mixed", False)),
    "head_mixing.query_weight": (Axis(1, "mixed", False),),
    "head_mixing.bias": (Axis(0, "source", False), Axis(1, "mixed", False)),
    "relative_position.weight": (Axis(1, "source", False),),
    "relative_gain.weight": (Axis(0, "source", False),),
}


def number_of_heads(attention: MixheadAttention, kind: str) -> int:
    """How many source or mixed heads `attention` has; `kind` is a field of KeptHeads."""
    return attention.num_heads if kind == "source" else attention.num_mixed_heads


def check_kept(name: str, attention: MixheadAttention, kept: KeptHeads) -> None:
    """Refuse a choice of heads that the attention `name` cannot keep.

    Raises:
        ValueError: heads that are not there, none at all, not ascending, or unequal ones where heads do not mix
    """
    for kind in KeptHeads._fields:
        heads, number = getattr(kept, kind), number_of_heads(attention, kind)
        if not heads or list(heads) != sorted(set(heads)) or heads[0] < 0 or heads[-1] >= number:
            raise ValueError(f"{name}: {kind} heads {list(heads)}: must be some of 0 to {number - 1}, ascending")
    if attention.head_mixing is None and kept.source != kept.mixed:
        raise ValueError(
            f"{name}: source heads {list(kept.source)} and mixed heads {list(kept.mixed)}: "
            "must be equal where heads do not mix"
        )


def mask(attention: MixheadAttention, kept: KeptHeads) -> HeadGates:
    """Gates that let the heads of `kept` pass alone: what pruning does to the outputs, and nothing else."""
    parameter = next(attention.parameters())

    def passing(kind: str) -> Optional[Tensor]:
        number = number_of_heads(attention, kind)
        if len(getattr(kept, kind)) == number:
            return None
        gates = torch.zeros(number, dtype=parameter.dtype, device=parameter.device)  # [H]
        gates[list(getattr(kept, kind))] = 1
        return gates

    return HeadGates(None if attention.head_mixing is None else passing("source"), passing("mixed"))


def cut_parameters(name: str, attention: MixheadAttention, kept: KeptHeads) -> Dict[str, Tensor]:
    """Copies of the parameters and buffers of the attention `name` without the heads that are not in `kept`.

    Raises:
        OptionError: the attention has parameters of its own, which nobody said how to cut
        ValueError: see `check_kept`
    """
    check_kept(name, attention, kept)
    smaller = {}
    for entry, tensor in attention.state_dict().items():
        if entry not in PARAMETERS:
            raise OptionError(
                f"{name}: cannot be cut, its {entry} belongs to {type(attention).__name__}; "
                "its heads can only be masked"
            )
        for dim, kind, whole_heads in PARAMETERS[entry]:
            heads = torch.tensor(getattr(kept, kind), device=tensor.device)
            if whole_heads:
                within = torch.arange(attention.head_dim, device=tensor.device)
                heads = (heads[:, None] * attention.head_dim + within).flatten()
            tensor = tensor.index_select(dim, heads)
        smaller[entry] = tensor.clone() if not PARAMETERS[entry] else tensor
    return smaller


def cut_state(
    state: Mapping[str, Tensor], attentions: Mapping[str, MixheadAttention], kept: Mapping[str, KeptHeads]
) -> Dict[str, Tensor]:
    """The state of a model without the heads that `kept` leaves out.

    Args:
        state: of the whole model
        attentions: those of the model, by name
        kept: what stays of each of them
    """
    smaller = dict(state)
    for name, attention in attentions.items():
        for entry, tensor in cut_parameters(name, attention, kept[name]).items():
            smaller[f"{name}.{entry}"] = tensor
    return smaller


def heads_per_layer(kept: Mapping[str, Sequence[KeptHeads]]) -> str:
    """The value of --heads-per-layer, such as `encoder-self=8,6;decoder-self=8:6,7`.

    Args:
        kept: by place, one for each layer; `8:6` are 8 source and 6 mixed heads
    """
    sites = []
    for site, layers in kept.items():
        numbers = [(len(layer.source), len(layer.mixed)) for layer in layers]
        texts = [f"{source}" if source == mixed else f"{source}:{mixed}" for source, mixed in numbers]
        sites.append(f"{site}={','.join(texts)}")
    return ";".join(sites)


def pruned_flags(attentions: Mapping[str, MixheadAttention], kept: Mapping[str, Sequence[KeptHeads]]) -> Dict[str, Any]:
    """What the config of the pruned model says that the whole one's did not, by option.

    Args:
        attentions: of the whole model, by name
        kept: by place, as in `heads_per_layer`

    Raises:
        OptionError: heads of several sizes, which one --head-dim cannot say
    """
    sizes: List[int] = sorted({attention.head_dim for attention in attentions.values()})
    if len(sizes) != 1:
        raise OptionError(
            f"heads of sizes {', '.join(map(str, sizes))}: cannot be cut, --head-dim names one size for all attentions"
        )
    return {"heads_per_layer": heads_per_layer(kept), "head_dim": sizes[0]}
