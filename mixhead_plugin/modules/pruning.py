"""Cut heads off attentions for good: their parameters, and the flags of the smaller model.

Where heads mix, source heads and mixed heads are cut apart. A source head j has rows of q_proj and k_proj and a row of
M. A mixed head i has rows of v_proj, columns of out_proj and a column of M.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.modules.heads import HeadGates
from mixhead_plugin.parts import Axis, cut


class KeptHeads(NamedTuple):
    """The heads of one attention that stay, ascending; without mixing both are the same."""

    source: tuple[int, ...]
    mixed: tuple[int, ...]


# The parameters of every MixheadAttention and their dimensions that shrink with the heads.
PARAMETERS: dict[str, tuple[Axis, ...]] = {
    **{
        f"{projection}.{name}": (Axis(0, kind, whole_heads=True),)
        for projection, kind in {"q_proj": "source", "k_proj": "source", "v_proj": "mixed"}.items()
        for name in ("weight", "bias")
    },
    "out_proj.weight": (Axis(1, "mixed", whole_heads=True),),
    "out_proj.bias": (),
    "relative_gain.weight": (Axis(0, "source"),),
}


def parameters_of(attention: MixheadAttention) -> dict[str, tuple[Axis, ...]]:
    """Return PARAMETERS and those of the attention's parts."""
    parts = attention.parts().items()
    return {**PARAMETERS, **{f"{part}.{name}": axes for part, kind in parts for name, axes in kind.parameters.items()}}


def number_of_heads(attention: MixheadAttention, kind: str) -> int:
    """Return the number of source or mixed heads; `kind` is a field of KeptHeads."""
    return attention.num_heads if kind == "source" else attention.num_mixed_heads


def mask(attention: MixheadAttention, kept: KeptHeads) -> HeadGates:
    """Return gates that silence all heads but `kept`: the outputs are those after pruning."""
    source = None if attention.head_mixing is None else _gates(attention, kept.source, attention.num_heads)
    return HeadGates(source, _gates(attention, kept.mixed, attention.num_mixed_heads))


def _gates(attention: MixheadAttention, kept: Sequence[int], number: int) -> Tensor | None:
    """Return a 1 for each kept head and a 0 for the others, [number]; None if all are kept."""
    if len(kept) == number:
        return None
    gates = next(attention.parameters()).new_zeros(number)
    gates[list(kept)] = 1
    return gates


def refuse_uncut(name: str, attention: MixheadAttention) -> None:
    """Refuse an attention with a part for which every head needs all heads."""
    for option, kind in attention.parts().items():
        if kind.uncut:
            flag = f"{option_name(option)} {attention.kinds[option]}"
            raise OptionError(f"{name}: cannot be cut with {flag}, {kind.uncut}; its heads can only be masked")


def cut_parameters(name: str, attention: MixheadAttention, kept: KeptHeads) -> dict[str, Tensor]:
    """Return the parameters and buffers of an attention with only the heads of `kept`; refuse what cannot be cut."""
    refuse_uncut(name, attention)
    smaller, table = {}, parameters_of(attention)
    for entry, tensor in attention.state_dict().items():
        if entry not in table:
            kind = type(attention).__name__
            raise OptionError(f"{name}: cannot be cut, its {entry} belongs to {kind}; its heads can only be masked")
        smaller[entry] = cut(tensor, table[entry], kept._asdict(), attention.head_dim).clone()
    return smaller


def cut_state(
    state: Mapping[str, Tensor], attentions: Mapping[str, MixheadAttention], kept: Mapping[str, KeptHeads]
) -> dict[str, Tensor]:
    """Return the `state` of a whole model with only the heads of `kept`, which has an entry for every attention."""
    smaller = dict(state)
    for name, attention in attentions.items():
        for entry, tensor in cut_parameters(name, attention, kept[name]).items():
            smaller[f"{name}.{entry}"] = tensor
    return smaller


def heads_per_layer(kept: Mapping[str, Sequence[KeptHeads]]) -> str:
    """Return the value of --heads-per-layer, such as `encoder-self=8,6;decoder-self=8:6,7`, for the heads by site."""

    def number(layer: KeptHeads) -> str:
        source, mixed = len(layer.source), len(layer.mixed)
        return str(source) if source == mixed else f"{source}:{mixed}"

    return ";".join(f"{site}={','.join(map(number, layers))}" for site, layers in kept.items())


def pruned_flags(attentions: Mapping[str, MixheadAttention], kept: Mapping[str, Sequence[KeptHeads]]) -> dict[str, Any]:
    """Return the options that the pruned model needs beside those of the whole one; `kept` is by site."""
    sizes = sorted({attention.head_dim for attention in attentions.values()})
    if len(sizes) != 1:
        found = ", ".join(map(str, sizes))
        raise OptionError(f"heads of sizes {found}: cannot be cut, --head-dim names one size for all attentions")
    return {"heads_per_layer": heads_per_layer(kept), "head_dim": sizes[0]}
