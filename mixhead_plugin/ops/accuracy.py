"""Say how far an implementation may be from the exact result: twice as far as the formula in the same dtype."""

import math
from typing import Callable, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.masks import additive_mask
from mixhead_plugin.ops.normalizers import NORMALIZERS
from mixhead_plugin.ops.reference import append_sink, apply_gain, mix_heads
from mixhead_plugin.ops.relative import relative_scores

Results = Dict[str, Tensor]  # the output and the gradients, by name
Layout = Tuple[Tuple[int, bool], ...]  # the dimensions from the innermost on; is the stride a multiple of 16?
BATCH = 2
# Numbers of queries and keys, and p of dropout. A tile has fewer. triton compiles multiples of 16 in another way.
SIZES = (150, 141, 0.1), (160, 144, 0.4)


class Variant(NamedTuple):
    """Name what the kernels are compiled for, and where."""

    normalizer: str
    heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    mixing: Optional[torch.dtype] = None
    mixing_dim: int = 0  # 2: one matrix for all queries; 4: one for each
    mixed_heads: int = 0  # 0: as many as there are heads
    score_mixing_dim: int = 0  # as mixing_dim
    sink: bool = False
    causal: bool = False
    mask: Optional[torch.dtype] = None
    mask_by: str = ""  # what the mask differs by: "head", "sentence", or "" for one [Nq, Nk]
    padding: bool = False
    dropout: bool = False
    tf32: bool = False
    layouts: Tuple[Layout, ...] = ()  # of query, key, value and mixing in memory; contiguous where nothing is said


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


def problem_of(variant: Variant, n_queries: int, n_keys: int, dropout_p: float = 0.1) -> Tuple[AttentionInputs, Tensor]:
    """Return a call of the variant and a gradient of its output; the numbers are the same each time."""
    generator = torch.Generator("cpu").manual_seed(1)

    def draw(*shape: int, dtype: Optional[torch.dtype] = variant.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(variant.device, dtype)

    def draw_mixing(dims: int, to: int, dtype: Optional[torch.dtype]) -> Optional[Tensor]:
        if dims == 0:
            return None
        noise = draw(*(BATCH, n_queries, heads, to)[-dims:], dtype=dtype) / heads
        return (noise + torch.eye(heads, to, device=variant.device)).to(dtype)

    heads, mask, padding = variant.heads, None, None
    mixed = variant.mixed_heads or heads
    mixing = draw_mixing(variant.mixing_dim, mixed, variant.mixing)
    if variant.mask is not None:
        different = {"head": (1, heads), "sentence": (BATCH, 1), "": (1, 1)}[variant.mask_by]
        mask = draw(*different, n_queries, n_keys, dtype=variant.mask)
        mask[..., 2, :] = mask[..., 3] = -torch.inf  # a query that sees nothing, and a key that is not seen
    if variant.padding:
        padding = torch.zeros(BATCH, n_keys, dtype=torch.bool, device=variant.device)
        padding[0, n_keys // 2 :] = True
    query = draw(BATCH, heads, n_queries, variant.head_dim)
    key = draw(BATCH, heads, n_keys, variant.head_dim)
    value = draw(BATCH, mixed, n_keys, variant.value_dim)
    score_mixing = draw_mixing(variant.score_mixing_dim, heads, variant.dtype)
    sink = draw(heads) if variant.sink else None
    seed = torch.tensor(3, device=variant.device) if variant.dropout else None
    inputs = AttentionInputs(
        query=query, key=key, value=value, mixing=mixing, attn_mask=mask, key_padding_mask=padding, sink=sink,
        score_mixing=score_mixing, seed=seed, normalizer=variant.normalizer, causal=variant.causal,
        dropout_p=dropout_p if variant.dropout else 0.0, scale=variant.head_dim**-0.5,
    )  # fmt: skip
    d_out = draw(BATCH, mixed, n_queries, variant.value_dim)
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


class Bounds:
    """Bound the errors of an implementation: twice those of the formula in the same dtype.

    Args:
        inputs: the problem
        d_out: the gradient of its output
        kept: the factors of dropout on the weights, [B, H', Nq, Nk], or 1
    """

    def __init__(self, inputs: AttentionInputs, d_out: Tensor, kept: Tensor):
        def formula(call: AttentionInputs) -> Tensor:
            return (formula_weights(call) * kept.to(call.value.dtype)) @ call.value

        self.exact = results(formula, in_float64(inputs), d_out.double())
        by_formula = results(formula, inputs, d_out)
        numbers = torch.finfo(torch.float32)  # sums in float32 round even where the formula happens to be exact
        self.allowed = {
            name: float(2 * (by_formula[name] - right).abs().max() + 4 * numbers.eps * right.abs().max() + numbers.tiny)
            for name, right in self.exact.items()
        }

    def errors(self, found: Results) -> Dict[str, float]:
        """Return the largest error of each result, as a multiple of what is allowed; NaN if a result is NaN."""
        return {
            name: float((found[name] - right).abs().max()) / self.allowed[name] for name, right in self.exact.items()
        }

    def fault(self, found: Results, most: float = 1.0) -> str:
        """Return which result is wrong and by how much, or an empty string; `most` is a factor on the bounds."""
        for name, error in self.errors(found).items():
            if not (error <= most and math.isfinite(self.allowed[name])):  # NaN too
                what = "the output" if name == "output" else f"the gradient of {name}"
                return f"{what} is wrong by {error * self.allowed[name]:.2g}, {self.allowed[name]:.2g} is allowed"
        return ""
