"""The adapters of the mixed attentions of a torch model for the studies of heads."""

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from mixhead_plugin.heads.assembly_attention import AssemblyAttention
from mixhead_plugin.heads.attention import Attention, HeadsError
from mixhead_plugin.heads.hooked_attention import HookedAttention
from mixhead_plugin.nn import sdpa
from mixhead_plugin.nn.attention import MixedAttention
from mixhead_plugin.nn.refusals import check_module, of_transformers

NOT_CUT = "its module keeps its projections to itself, so no head can be cut; ablate them instead"


class SdpaAttention(HookedAttention):
    """The adapter of a module that calls F.scaled_dot_product_attention.

    Args:
        name: the name of the module in the model
        host: the module, which `mix` has mixed
    """

    def __init__(self, name: str, host: nn.Module):
        self.hosted: sdpa.MixedSdpa = vars(host)[sdpa.ATTRIBUTE]
        super().__init__(name, self.hosted)
        self.host = host

    @property
    def heads(self) -> dict[str, int]:
        sizes = self.hosted.sizes
        if self.host.head_mixing is None:
            return {"mixed": sizes.mixed_heads}
        return {"source": sizes.num_heads, "mixed": sizes.mixed_heads}

    def cut_problem(self, heads: Sequence[int]) -> str:
        return NOT_CUT

    def cut(self, heads: Mapping[str, Sequence[int]]) -> None:
        raise HeadsError(f"{self.name}: {NOT_CUT}")


def of_mixed_attention(name: str, module: nn.Module) -> Attention | None:
    return AssemblyAttention(name, module) if isinstance(module, MixedAttention) else None


def of_mixed_sdpa(name: str, module: nn.Module) -> Attention | None:
    return SdpaAttention(name, module) if sdpa.is_mixed(module) else None


# What finds the attentions of a model. Each entry takes the name of a module and the module, and
# returns its adapter, or None if the module is not of its kind. A new kind of mixed attention adds
# an entry.
ADAPTERS: list[Callable[[str, nn.Module], Attention | None]] = [
    of_mixed_attention,
    of_mixed_sdpa,
]


def attentions_of(model: nn.Module) -> list[Attention]:
    """Return the mixed attentions of a model in its order; raise ValueError if there are none."""
    check_module(model)
    adapters = []
    for name, module in model.named_modules():
        for adapter in ADAPTERS:
            attention = adapter(name or type(module).__name__, module)
            if attention is not None:
                adapters.append(attention)
                break
    if not adapters and any(of_transformers(module) for module in model.modules()):
        raise HeadsError(
            f"{type(model).__name__}: is a model of transformers, must be given to the functions "
            "of mixhead_plugin.hf"
        )
    if not adapters:
        raise HeadsError(
            f"{type(model).__name__}: has no attention of mixhead_plugin.nn; mix(model, 'none') "
            "makes them without mixing"
        )
    return adapters
