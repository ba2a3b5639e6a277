"""Where the attentions of a model of fairseq are, and how large they are there."""

from typing import NamedTuple

from mixhead_plugin.heads.sites import where


class SiteSizes(NamedTuple):
    """The sizes of the attentions at one site, and the flags that set them."""

    embed_flag: str
    embed_dim: int
    heads_flag: str
    num_heads: int
    layers: int | None = None  # None for a model that does not take --heads-per-layer
    # Of one head, where --head-dim is left out; None for embed_dim / num_heads.
    head_dim: int | None = None
    relative: bool = False  # whether the attention itself adds scores of distances


def side_of(site: str) -> str:
    """Return whose layers have the attentions of a site: "encoder" or "decoder"."""
    # Attention to the encoder, `cross`, lies in the layers of the decoder.
    return "encoder" if site == "encoder-self" else "decoder"


def side_of_attention(name: str) -> str:
    """Return "encoder" or "decoder" for the name of an attention, as `decoder.layers.0.self_attn`.

    A wrapper of the model, such as torch's DistributedDataParallel, may have put its name before.
    """
    return side_of(where(name).site)
