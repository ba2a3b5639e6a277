"""Draw calls of attention of some kind, on which an implementation is tried."""

from typing import NamedTuple

import torch
from torch import Tensor

from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.low_rank import LowRank
from mixhead_plugin.ops.rounding import round_up

SampleCall = tuple[AttentionInputs, Tensor]  # a call and the gradient of its output
# How a tensor lies in memory: its dimensions from the innermost on, and whether the stride of each
# is a multiple of 16, which triton compiles in another way.
MemoryLayout = tuple[tuple[int, bool], ...]


class CallKind(NamedTuple):
    """A kind of calls of `attention`: what they share, whatever their sizes and numbers.

    `triton/call_kinds.py` groups calls by it, so it has what chooses a compiled kernel.

    The fields are numbers, names and dtypes, so a kind can be the key of a dictionary.
    """

    normalizer: str
    heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    mixing_dtype: torch.dtype | None = None
    mixing_dim: int = 0  # 2: one matrix for all queries; 4: one for each
    mixed_heads: int = 0  # 0: as many as there are heads
    rank: int = 0  # of the factors of an M by query; 0 where there are none
    score_mixing_dim: int = 0  # as mixing_dim
    sink: bool = False
    causal: bool = False
    mask_dtype: torch.dtype | None = None
    mask_by: str = ""  # what the mask differs by: "head", "sentence", or "" for one [Nq, Nk]
    padding: bool = False
    dropout: bool = False
    tf32: bool = False
    # Of query, key, value and mixing, the first fields of AttentionInputs; the last one is missing
    # without mixing. Empty for contiguous tensors.
    layouts: tuple[MemoryLayout, ...] = ()


def layout_of(tensor: Tensor) -> MemoryLayout:
    """Return how a tensor lies in memory; triton compiles a kernel for each layout."""
    strides = tensor.stride()
    order = sorted(range(len(strides)), key=lambda dim: strides[dim])
    return tuple((dim, strides[dim] % 16 == 0) for dim in order)


def copy_in_layout(tensor: Tensor, layout: MemoryLayout) -> Tensor:
    """Return a copy of a tensor in a layout.

    There are gaps in memory where the sizes do not give such strides by themselves. Three rows of
    20 numbers, whose stride is to be a multiple of 16:

        0 ... 19  (12 unused)  32 ... 51  (12 unused)  64 ... 83
    """
    strides = [0] * tensor.dim()
    extent = 1  # numbers in memory that the dimensions so far take
    for dim, is_multiple_of_16 in layout:
        if is_multiple_of_16:
            strides[dim] = round_up(extent, 16)
        elif extent % 16 == 0:
            strides[dim] = extent + 1
        else:
            strides[dim] = extent
        extent = strides[dim] * tensor.shape[dim]
    return tensor.new_empty(extent).as_strided(tensor.shape, strides).copy_(tensor)


def sample_call(
    kind: CallKind, n_queries: int, n_keys: int, p: float = 0.1, batch: int = 2, nth: int = 0
) -> SampleCall:
    """Return a call of a kind and a gradient of its output.

    Args:
        kind: the kind of the call
        n_queries: Nq
        n_keys: Nk
        p: probability of dropping a weight, if calls of the kind drop any
        batch: number of sentences
        nth: which draw; each has its own numbers, always the same. A mask of every third one is
            causal, from nth = 2 on
    """
    generator = torch.Generator("cpu").manual_seed(1 + nth)
    heads = kind.heads
    mixed_heads = kind.mixed_heads or heads

    def draw(*shape: int, dtype: torch.dtype | None = kind.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(kind.device, dtype)

    def draw_mixing(dims: int, to: int, dtype: torch.dtype | None) -> Tensor | None:
        if dims == 0:
            return None
        shape = (batch, n_queries, heads, to)[-dims:]
        noise = draw(*shape, dtype=dtype) / heads
        return (noise + torch.eye(heads, to, device=kind.device)).to(dtype)

    def draw_factors() -> LowRank:
        left = draw(batch, n_queries, heads, kind.rank, dtype=kind.mixing_dtype)
        right = draw(batch, n_queries, heads, kind.rank, dtype=kind.mixing_dtype) / heads
        diagonal = draw(batch, n_queries, heads, dtype=kind.mixing_dtype) / heads
        return LowRank(left, right, diagonal)

    # Do not reorder the draws: each number of a draw would become another one.
    mixing: Tensor | LowRank | None = draw_mixing(kind.mixing_dim, mixed_heads, kind.mixing_dtype)
    if kind.rank:
        mixing = draw_factors()
    mask = None
    padding = None
    sink = None
    seed = None
    if kind.mask_dtype is not None:
        different = {"head": (1, heads), "sentence": (batch, 1), "": (1, 1)}[kind.mask_by]
        mask = draw(*different, n_queries, n_keys, dtype=kind.mask_dtype)
        if nth % 3 == 2:
            # Causality as a mask, which fairseq passes. Of a tile of the kernels it hides all, some
            # or nothing, and each takes another way; of a mask of random numbers it is always some.
            mask[:] = torch.full_like(mask, -torch.inf).triu(1 + n_keys - n_queries)
        else:
            mask[..., 2, :] = -torch.inf  # a query that sees nothing
            mask[..., 3] = -torch.inf  # a key that is not seen
    if kind.padding:
        padding = torch.zeros(batch, n_keys, dtype=torch.bool, device=kind.device)
        padding[0, n_keys // 2 :] = True
    query = draw(batch, heads, n_queries, kind.head_dim)
    key = draw(batch, heads, n_keys, kind.head_dim)
    value = draw(batch, mixed_heads, n_keys, kind.value_dim)
    score_mixing = draw_mixing(kind.score_mixing_dim, heads, kind.dtype)
    if kind.sink:
        sink = draw(heads)
    if kind.dropout:
        seed = torch.tensor(3, device=kind.device)
    d_out = draw(batch, mixed_heads, n_queries, kind.value_dim)

    inputs = AttentionInputs(
        query=query,
        key=key,
        value=value,
        attn_mask=mask,
        key_padding_mask=padding,
        sink=sink,
        score_mixing=score_mixing,
        seed=seed,
        normalizer=kind.normalizer,
        causal=kind.causal,
        dropout_p=p if kind.dropout else 0.0,
        scale=max(kind.head_dim, 1) ** -0.5,  # heads of size 0 have scores of 0
    ).with_mixing(mixing)
    if not kind.layouts:
        return inputs, d_out
    laid = {}
    for name, layout in zip(inputs._fields, kind.layouts):
        laid[name] = copy_in_layout(getattr(inputs, name), layout)
    return inputs.with_tensors(laid), copy_in_layout(d_out, kind.layouts[0])
