"""Where an attention is in its model: in the encoder or the decoder, and in which layer."""

import re
from collections.abc import Iterable
from typing import NamedTuple

SITES = ("encoder-self", "decoder-self", "cross")

# The words for attention to an encoder in the names of fairseq, torch and `transformers`.
CROSS = re.compile("cross|encoder_attn|EncDec|multihead_attn")


class Where(NamedTuple):
    """The position of an attention in its model."""

    site: str  # one of SITES
    layer: int  # from 0, as in the names of the parameters

    def __str__(self) -> str:
        return f"{self.site} {self.layer}"


def where(name: str, causal: bool = False) -> Where:
    """Return the position of the attention `name`, such as 'decoder.layers.3.encoder_attn'.

    The layer is the first number in the name, 0 if there is none. A `causal` self-attention is one
    of a decoder, whatever its name is.
    """
    parts = name.split(".")
    numbers = [int(part) for part in parts if part.isdecimal()]
    if CROSS.search(name):
        site = "cross"
    elif causal or "decoder" in parts:
        site = "decoder-self"
    else:
        site = "encoder-self"
    return Where(site, numbers[0] if numbers else 0)


def counted(sites: Iterable[str]) -> list[Where]:
    """Return the positions of attentions whose sites are given in the order of the model.

    Their layers are counted within each site. The numbers in the names are not enough: two towers,
    as of vision and of text, may both have a layer 0 of an encoder.
    """
    positions = []
    layers: dict[str, int] = {}
    for site in sites:
        layer = layers.setdefault(site, 0)
        layers[site] += 1
        positions.append(Where(site, layer))
    return positions


def by_site(names: Iterable[str]) -> dict[str, list[str]]:
    """Return names of attentions by site.

    The sites are in the order of SITES, the names in that of the layers.
    """

    def order(name: str) -> tuple[int, int]:
        site, layer = where(name)
        return SITES.index(site), layer

    sites: dict[str, list[str]] = {}
    for name in sorted(names, key=order):
        sites.setdefault(where(name).site, []).append(name)
    return sites
