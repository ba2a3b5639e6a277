"""Say how far an implementation may be from the exact result: twice as far as the formula in the same dtype."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.masks import additive_mask
from mixhead_plugin.ops.normalizers import NORMALIZERS
from mixhead_plugin.ops.reference import append_sink, apply_gain, mix_heads
from mixhead_plugin.ops.relative import relative_scores

Results = dict[str, Tensor]  # the output and the gradients, by name
Problem = tuple[AttentionInputs, Tensor]  # a call and the gradient of its output
Layout = tuple[tuple[int, bool], ...]  # the dimensions from the innermost on; is the stride a multiple of 16?
# Numbers of queries and keys, and p of dropout. A tile has fewer. triton compiles multiples of 16 in another way.
SIZES = (150, 141, 0.1), (160, 144, 0.4)
DRAWS, NUMBERS = 9, 100  # the fewest draws of a trial, and the fewest numbers of a result in them all
FEW, PART = 5, 16  # the fewest draws that judge a part; its positions, as in the smallest tile


class Variant(NamedTuple):
    """Name what the kernels are compiled for, and where."""

    normalizer: str
    heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    mixing: torch.dtype | None = None
    mixing_dim: int = 0  # 2: one matrix for all queries; 4: one for each
    mixed_heads: int = 0  # 0: as many as there are heads
    score_mixing_dim: int = 0  # as mixing_dim
    sink: bool = False
    causal: bool = False
    mask: torch.dtype | None = None
    mask_by: str = ""  # what the mask differs by: "head", "sentence", or "" for one [Nq, Nk]
    padding: bool = False
    dropout: bool = False
    tf32: bool = False
    layouts: tuple[Layout, ...] = ()  # of query, key, value and mixing in memory; contiguous where nothing is said


def enough_draws(variant: Variant) -> int:
    """Return how often a trial draws: a sink has few numbers, and so has one M of few heads."""
    in_mixing = variant.heads * (variant.mixed_heads or variant.heads) if variant.mixing_dim == 2 else NUMBERS
    return max(DRAWS, -(-NUMBERS // (variant.heads if variant.sink else in_mixing)))


def variant_of(inputs: AttentionInputs) -> Variant:
    """Return the variant that serves a call which has no `problem`."""
    query, mixing, mask, mask_by = inputs.query, inputs.mixing, inputs.attn_mask, ""
    if mask is not None:
        sizes = [1 if stride == 0 else size for size, stride in zip(mask.shape, mask.stride())]  # 1 where expanded
        sentences, heads, n_queries, n_keys = [1] * (4 - len(sizes)) + sizes
        mask_by = "head" if heads > 1 else "sentence" if sentences > 1 or 1 in (n_queries, n_keys) else ""
    return Variant(
        normalizer=inputs.normalizer,
        heads=int(query.shape[1]),
        head_dim=int(query.shape[3]),
        value_dim=int(inputs.value.shape[3]),
        dtype=query.dtype,
        device=query.device,
        mixing=None if mixing is None else mixing.dtype,
        mixing_dim=0 if mixing is None else mixing.dim(),
        mixed_heads=0 if inputs.value.shape[1] == query.shape[1] else int(inputs.value.shape[1]),
        score_mixing_dim=0 if inputs.score_mixing is None else inputs.score_mixing.dim(),
        sink=inputs.sink is not None,
        causal=inputs.causal,
        mask=None if mask is None else mask.dtype,
        mask_by=mask_by,
        padding=inputs.key_padding_mask is not None,
        dropout=inputs.dropout_p > 0,
        layouts=tuple(layout_of(tensor) for tensor in inputs[:4] if tensor is not None),
    )


def layout_of(tensor: Tensor) -> Layout:
    """Return what a kernel is compiled for beside dtype and head size."""
    strides = tensor.stride()
    order = sorted(range(len(strides)), key=lambda dim: strides[dim])
    return tuple((dim, strides[dim] % 16 == 0) for dim in order)


def laid_out(tensor: Tensor, layout: Layout) -> Tensor:
    """Return a copy of a tensor in a layout, with gaps where its sizes ask for them."""
    strides, extent = [0] * tensor.dim(), 1
    for dim, multiple in layout:
        strides[dim] = -(-extent // 16) * 16 if multiple else extent + (extent % 16 == 0)
        extent = strides[dim] * tensor.shape[dim]
    return tensor.new_empty(extent).as_strided(tensor.shape, strides).copy_(tensor)


def sample_call(variant: Variant, n_queries: int, n_keys: int, p: float = 0.1, batch: int = 2, nth: int = 0) -> Problem:
    """Return a call of the variant and a gradient of its output; `nth` repeats the same numbers each time."""
    generator = torch.Generator("cpu").manual_seed(1 + nth)

    def draw(*shape: int, dtype: torch.dtype | None = variant.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(variant.device, dtype)

    def draw_mixing(dims: int, to: int, dtype: torch.dtype | None) -> Tensor | None:
        if dims == 0:
            return None
        noise = draw(*(batch, n_queries, heads, to)[-dims:], dtype=dtype) / heads
        return (noise + torch.eye(heads, to, device=variant.device)).to(dtype)

    heads, mask, padding = variant.heads, None, None
    mixed = variant.mixed_heads or heads
    mixing = draw_mixing(variant.mixing_dim, mixed, variant.mixing)
    if variant.mask is not None:
        different = {"head": (1, heads), "sentence": (batch, 1), "": (1, 1)}[variant.mask_by]
        mask = draw(*different, n_queries, n_keys, dtype=variant.mask)
        mask[..., 2, :] = mask[..., 3] = -torch.inf  # a query that sees nothing, and a key that is not seen
    if variant.padding:
        padding = torch.zeros(batch, n_keys, dtype=torch.bool, device=variant.device)
        padding[0, n_keys // 2 :] = True
    query = draw(batch, heads, n_queries, variant.head_dim)
    key = draw(batch, heads, n_keys, variant.head_dim)
    value = draw(batch, mixed, n_keys, variant.value_dim)
    score_mixing = draw_mixing(variant.score_mixing_dim, heads, variant.dtype)
    sink = draw(heads) if variant.sink else None
    seed = torch.tensor(3, device=variant.device) if variant.dropout else None
    inputs = AttentionInputs(
        query=query, key=key, value=value, mixing=mixing, attn_mask=mask, key_padding_mask=padding, sink=sink,
        score_mixing=score_mixing, seed=seed, normalizer=variant.normalizer, causal=variant.causal,
        dropout_p=p if variant.dropout else 0.0, scale=variant.head_dim**-0.5,
    )  # fmt: skip
    d_out = draw(batch, mixed, n_queries, variant.value_dim)
    if variant.layouts:
        laid = {name: laid_out(getattr(inputs, name), layout) for name, layout in zip(inputs._fields, variant.layouts)}
        inputs, d_out = inputs.with_tensors(laid), laid_out(d_out, variant.layouts[0])
    return inputs, d_out


def formula_weights(inputs: AttentionInputs) -> Tensor:
    """Return the mixed weights [B, H', Nq, Nk] of mixhead eqs 9-12, every step in the dtype of the inputs."""
    scores = mix_heads(inputs.query @ inputs.key.transpose(2, 3) * inputs.scale, inputs.score_mixing)
    if inputs.relative_query is not None and inputs.relative_key is not None:
        scores = scores + relative_scores(inputs.relative_query, inputs.relative_key, inputs.key.shape[2])
    mask = additive_mask(inputs, scores.dtype)
    with_sink = append_sink(scores if mask is None else scores + mask, inputs.sink)
    weights = NORMALIZERS[inputs.normalizer].weights(with_sink)[..., : scores.shape[3]]
    return mix_heads(apply_gain(weights, inputs.gain), inputs.mixing)


def results(attend: Callable[[AttentionInputs], Tensor], inputs: AttentionInputs, d_out: Tensor) -> Results:
    """Return the output of `attend` and the gradients of its tensors for the gradient `d_out` of the output."""
    given = {name: tensor.detach().requires_grad_() for name, tensor in inputs.given().items()}
    out = attend(inputs.with_tensors(given))
    return {"output": out.detach(), **dict(zip(given, torch.autograd.grad(out, list(given.values()), d_out)))}


def in_float64(inputs: AttentionInputs) -> AttentionInputs:
    return inputs.with_tensors({name: tensor.double() for name, tensor in inputs.given().items()})


def compare(inputs: AttentionInputs, d_out: Tensor, kept: Tensor, found: Results) -> Results:
    """Return sums for each part of each result: the squares of its errors and of the formula's, and how many numbers.

    `kept` holds the factors of dropout on the weights, [B, H', Nq, Nk], or 1.
    """

    def formula(call: AttentionInputs) -> Tensor:
        return (formula_weights(call) * kept.to(call.value.dtype)) @ call.value

    sums, by_formula = {}, results(formula, inputs, d_out)
    for name, right in results(formula, in_float64(inputs), d_out.double()).items():
        terms = torch.stack([found[name] - right, by_formula[name] - right, torch.ones_like(right)]).square()
        if right.dim() == 4:  # a part: PART positions of a head and batch element, or the rest of them
            terms = terms.flatten(3)[:, :, None] if name.endswith("mixing") else terms  # M: [B, Nq, H, H']
            parts = terms.tensor_split(tuple(range(PART, terms.shape[3], PART)), 3)
            terms = torch.stack([part.sum((3, 4)) for part in parts], 3)
        sums[name] = terms.flatten(1) if right.dim() == 4 else terms.flatten(1).sum(1, keepdim=True)  # [3, parts]
    return sums


def shares(draws: Sequence[Results]) -> dict[str, float]:
    """Return the error of each result as a share of what is allowed: at most 1 is right, NaN is wrong.

    An error is a root mean square. Over all draws that of a result may be twice the formula's in the same dtype; so may
    that of each part in their median, and 16 times that in fewer than FEW draws: a part's errors are not independent.
    The ratio of two errors of n numbers varies by exp(1 / sqrt(n)); if few, they may differ by 7 such factors.
    """
    found = {}
    for name in draws[0]:
        sums = torch.stack([draw[name] for draw in draws])  # [draws, 3, parts]
        whole = sums.sum((0, 2), keepdim=True).expand(len(draws), 3, 1)
        errors, by_formula, numbers = torch.cat([whole, sums], 2).unbind(1)
        allowed = torch.exp(7 * numbers.rsqrt()).clamp(min=2) * (by_formula / numbers).sqrt() + 1e-38  # not 0
        allowed[:, 1:] *= 1 if len(draws) >= FEW else 16
        by_draw = torch.where(allowed.isfinite(), (errors / numbers).sqrt() / allowed, torch.nan)
        found[name] = float(by_draw.median(0).values.max())
    return found


def fault_in(draws: Sequence[Results], most: float = 1.0) -> str:
    """Return which result is wrong and by how much, or an empty string; `most` is a factor on what is allowed."""
    for name, share in shares(draws).items():
        if not share <= most:  # NaN too
            what = "the output" if name == "output" else f"the gradient of {name}"
            return f"{what} is wrong by {share / most:.3g} times what is allowed"
    return ""
