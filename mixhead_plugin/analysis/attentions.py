"""The attentions of a model, with the place and the number of the layer that each belongs to."""

import re
from contextlib import contextmanager
from typing import Callable, Dict, Iterator, NamedTuple

from torch import Tensor, nn

from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.attention import Heads, MixheadAttention
from mixhead_plugin.options import SCOPES

PLACES = SCOPES["all"]


class Where(NamedTuple):
    """Where an attention stands in its model."""

    site: str  # one of PLACES
    layer: int  # from 0, as in the names of the parameters

    def __str__(self) -> str:
        return f"{self.place} {self.layer}"


def attentions(model: nn.Module) -> Dict[str, MixheadAttention]:
    """Every attention of the plugin in `model` by its name, in the order of the model.

    Raises:
        OptionError: there is none
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, MixheadAttention)}
    if not found:
        raise OptionError(f"model {type(model).__name__}: has no attention of mixhead_plugin")
    return found


def where(name: str) -> Where:
    """The place and layer of the attention that is called `name`, 'decoder.layers.3.encoder_attn' for instance.

    Raises:
        ValueError: the name has no number of a layer
    """
    layer = re.search(r"\blayers\.(\d+)\b", name)
    if layer is None:
        raise ValueError(f"attention {name}: its name has no layers.<number>")
    parts = name.split(".")
    side = "decoder-self" if "decoder" in parts else "encoder-self"
    return Where("cross" if parts[-1] == "encoder_attn" else side, int(layer[1]))


def by_place(model: nn.Module) -> Dict[str, Dict[int, str]]:
    """The names of all attentions, by place (in the order of PLACES) and layer."""
    positions = {name: where(name) for name in attentions(model)}
    sites = {
        site: {position.layer: name for name, position in positions.items() if position.site == site} for site in PLACES
    }
    return {site: layers for site, layers in sites.items() if layers}


@contextmanager
def watching(model: nn.Module, see: Callable[[str, MixheadAttention, Heads], None]) -> Iterator[None]:
    """Within it, `see(name, attention, heads)` is called in each pass of each attention."""
    watched = attentions(model)

    def watcher(name: str) -> Callable[[MixheadAttention, Tensor, Heads], Tensor]:
        def hook(attention: MixheadAttention, out: Tensor, heads: Heads) -> Tensor:
            see(name, attention, heads)
            return out

        return hook

    for name, attention in watched.items():
        attention.hook = watcher(name)
    try:
        yield
    finally:
        for attention in watched.values():
            attention.hook = None
