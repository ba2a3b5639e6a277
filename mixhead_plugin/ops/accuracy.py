"""Say how far an implementation may be from the exact result: twice as far as the formula in the same dtype."""

from typing import Callable, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from mixhead_plugin.ops.blockwise import blockwise_attention
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.masks import additive_mask
from mixhead_plugin.ops.normalizers import NORMALIZERS
from mixhead_plugin.ops.reference import apply_gain, mix_heads
from mixhead_plugin.ops.relative import relative_scores

Results = Dict[str, Tensor]  # the output and the gradients, by name
BATCH = 2
SIZES = (150, 141), (160, 144)  # queries and keys: more than a tile has; multiples of 16 are compiled apart
DROPOUT = 0.25


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
    causal: bool = False
    mask: Optional[torch.dtype] = None
    mask_by: str = ""  # what the mask differs by: "head", "sentence", or "" for one [Nq, Nk]
    padding: bool = False
    dropout: bool = False
    tf32: bool = False


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
        causal=inputs.causal,
        mask=None if mask is None else mask.dtype,
        mask_by=mask_by,
        padding=inputs.key_padding_mask is not None,
        dropout=inputs.dropout_p > 0,
    )


def problem_of(variant: Variant, n_queries: int, n_keys: int) -> Tuple[AttentionInputs, Tensor]:
    """Return a call of the variant and a gradient of its output; the numbers are the same each time."""
    generator = torch.Generator("cpu").manual_seed(1)

    def draw(*shape: int, dtype: torch.dtype = variant.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(variant.device, dtype)

    heads, mixing, mask, padding = variant.heads, None, None, None
    if variant.mixing is not None:
        shape = (BATCH, n_queries, heads, heads)[-variant.mixing_dim :]
        mixing = draw(*shape, dtype=variant.mixing) / heads + torch.eye(heads, device=variant.device)
        mixing = mixing.to(variant.mixing)
    if variant.mask is not None:
        different = {"head": (1, heads), "sentence": (BATCH, 1), "": (1, 1)}[variant.mask_by]
        mask = draw(*different, n_queries, n_keys, dtype=variant.mask)
        mask[..., 2, :] = mask[..., 3] = -torch.inf  # a query that sees nothing, and a key that is not seen
    if variant.padding:
        padding = torch.zeros(BATCH, n_keys, dtype=torch.bool, device=variant.device)
        padding[0, n_keys // 2 :] = True
    query = draw(BATCH, heads, n_queries, variant.head_dim)
    key = draw(BATCH, heads, n_keys, variant.head_dim)
    value = draw(BATCH, heads, n_keys, variant.value_dim)
    seed = torch.tensor(3, device=variant.device) if variant.dropout else None
    options = (variant.normalizer, variant.causal, DROPOUT if variant.dropout else 0.0, variant.head_dim**-0.5)
    inputs = AttentionInputs(query, key, value, mixing, mask, padding, None, None, None, seed, *options)
    return inputs, draw(BATCH, heads, n_queries, variant.value_dim)


def formula_weights(inputs: AttentionInputs) -> Tensor:
    """Return the mixed weights [B, H', Nq, Nk] of mixhead eqs 9-12, every step in the dtype of the inputs."""
    scores = inputs.query @ inputs.key.transpose(2, 3) * inputs.scale
    if inputs.relative_query is not None:
        scores = scores + relative_scores(inputs.relative_query, inputs.relative_key, inputs.key.shape[2])
    mask = additive_mask(inputs, scores.dtype)
    weights = NORMALIZERS[inputs.normalizer].weights(scores if mask is None else scores + mask)
    return mix_heads(apply_gain(weights, inputs.gain), inputs.mixing)


def blockwise_weights(inputs: AttentionInputs) -> Tensor:
    """Return the same weights by `blockwise`."""
    n_keys, heads = inputs.value.shape[2], inputs.value.shape[1]
    identity = torch.eye(n_keys, dtype=inputs.value.dtype, device=inputs.value.device)
    return blockwise_attention(inputs._replace(value=identity.expand(len(inputs.query), heads, -1, -1), dropout_p=0.0))


def results(attend: Callable[[AttentionInputs], Tensor], inputs: AttentionInputs, d_out: Tensor) -> Results:
    """Return the output of `attend` and the gradients of its tensors for the gradient `d_out` of the output."""
    given = {name: tensor.detach().requires_grad_() for name, tensor in inputs.given().items()}
    out = attend(inputs._replace(**given))
    return {"output": out.detach(), **dict(zip(given, torch.autograd.grad(out, list(given.values()), d_out)))}


def in_float64(inputs: AttentionInputs) -> AttentionInputs:
    return inputs._replace(**{name: tensor.double() for name, tensor in inputs.given().items()})


class Bounds:
    """Bound the errors of an implementation: twice those of the formula in the same dtype.

    Args:
        inputs: the problem
        d_out: the gradient of its output
        kept: the factors of dropout on the weights, [B, H', Nq, Nk], or 1
    """

    def __init__(self, inputs: AttentionInputs, d_out: Tensor, kept: Tensor):
        def exact(call: AttentionInputs) -> Tensor:
            return (blockwise_weights(call) * kept.double()) @ call.value

        def formula(call: AttentionInputs) -> Tensor:
            return (formula_weights(call) * kept.to(call.value.dtype)) @ call.value

        self.exact = results(exact, in_float64(inputs), d_out.double())
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
            if not error <= most:  # NaN too
                what = "the output" if name == "output" else f"the gradient of {name}"
                return f"{what} is wrong by {error * self.allowed[name]:.2g}, {self.allowed[name]:.2g} is allowed"
        return ""
