"""Find the attentions of a model with their sites and layers, and look at their heads."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.attention import Heads, MixheadAttention
from mixhead_plugin.options import SCOPES

SITES = SCOPES["all"]


class Where(NamedTuple):
    """The position of an attention in its model."""

    site: str  # one of SITES
    layer: int  # from 0, as in the names of the parameters

    def __str__(self) -> str:
        return f"{self.site} {self.layer}"


def attentions(model: nn.Module) -> dict[str, MixheadAttention]:
    """Return the plugin's attentions in `model` by name; refuse a model without one."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, MixheadAttention)}
    if not found:
        raise OptionError(f"model {type(model).__name__}: has no attention of mixhead_plugin")
    return found


def where(name: str) -> Where:
    """Return the position of the attention `name`, such as 'decoder.layers.3.encoder_attn'."""
    layer = re.search(r"\blayers\.(\d+)\b", name)
    parts = name.split(".")
    side = "decoder-self" if "decoder" in parts else "encoder-self"
    return Where("cross" if parts[-1] == "encoder_attn" else side, int(layer[1]))


def by_site(names: Iterable[str]) -> dict[str, list[str]]:
    """Return names of attentions by site; the sites are in the order of SITES, the names in that of the layers."""
    sites: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: (SITES.index(where(name).site), where(name).layer)):
        sites.setdefault(where(name).site, []).append(name)
    return sites


@contextmanager
def hooked(model: nn.Module, see: Callable[[str, MixheadAttention, Heads], None]) -> Iterator[None]:
    """Call `see(name, attention, heads)` in each forward pass of each attention, within the context."""

    def hook(name: str, attention: MixheadAttention, out: Tensor, heads: Heads) -> Tensor:
        see(name, attention, heads)
        return out

    found = attentions(model)
    for name, attention in found.items():
        attention.hook = partial(hook, name)
    try:
        yield
    finally:
        for attention in found.values():
            attention.hook = None
