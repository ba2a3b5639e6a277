"""Say how far an implementation may be from the exact result: twice as far as the formula in the same dtype."""

from collections.abc import Callable, Iterator, Sequence
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
DRAWS = 9  # the fewest draws of a trial
MOST_DRAWS = 4  # times as many are drawn where the formula is not finite in some
ROWS = 100  # the fewest rows of a result in all draws
FEW = 5  # the fewest draws that judge a part as sharply as a whole result
PART = 16  # positions of a part, as in the smallest tile


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
    """Return how often a trial draws: a sink has one row for each head, and so has an M or L for all queries."""
    shared = variant.sink or 2 in (variant.mixing_dim, variant.score_mixing_dim)
    return max(DRAWS, -(-ROWS // variant.heads)) if shared else DRAWS


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


class Errors(NamedTuple):
    """What one draw says about one result, summed over each row: [B, H, N] or, of a tensor for all positions, [N].

    A row holds the numbers of one position of one head; of M by query, those of one position.
    """

    found: Tensor  # sum of the squared errors
    formula: Tensor  # the same of the formula in the same dtype
    fourth: Tensor  # sum of the squares of both squared errors' sum: tells whether few numbers make all of it
    numbers: Tensor  # how many


Draw = dict[str, Errors]  # by result


def compare(inputs: AttentionInputs, d_out: Tensor, kept: Tensor, found: Results) -> Draw:
    """Return the errors of each result, and those of the formula.

    `kept` holds the factors of dropout on the weights, [B, H', Nq, Nk], or 1.
    """

    def formula(call: AttentionInputs) -> Tensor:
        return (formula_weights(call) * kept.to(call.value.dtype)) @ call.value

    draw = {}
    by_formula = results(formula, inputs, d_out)
    for name, right in results(formula, in_float64(inputs), d_out.double()).items():
        error = (found[name] - right).square()
        formulas = (by_formula[name] - right).square()
        terms = torch.stack([error, formulas, (error + formulas).square(), torch.ones_like(right)])
        if right.dim() == 4 and name.endswith("mixing"):  # M by query: [B, Nq, H, H']
            terms = terms.flatten(3)[:, :, None]
        if right.dim() > 1:  # a sink has one number for each head, so each is a row
            terms = terms.sum(-1)
        draw[name] = Errors(*terms)
    return draw


def finite_draws(draw: Callable[[int], Draw], enough: int) -> list[Draw]:
    """Return `enough` draws, from `draw(0)` on, in which the formula is finite.

    Rounded scores can make 0 / 0 or infinity of the formula. Such a draw tells nothing about an implementation.
    Fewer come back if the formula is seldom finite.
    """
    draws: list[Draw] = []
    for nth in range(MOST_DRAWS * enough):
        drawn = draw(nth)
        if all(bool(errors.formula.isfinite().all()) for errors in drawn.values()):
            draws.append(drawn)
        if len(draws) == enough:
            break
    return draws


def shares(draws: Sequence[Draw]) -> dict[str, float]:
    """Return the error of each result as a share of what is allowed: at most 1 is right, NaN is wrong.

    An error may be twice that of the formula in the same dtype. Each of two statistics must say so, for the whole
    result and for each part, PART positions of a head:

    - the root mean square over all draws, for a part its median over them. It sees a single wrong number. Where few
      numbers make nearly all of it, as those of exp(s) without a denominator, chance decides, so more is allowed.
    - the median over all rows and draws of a row's error beside the formula's. No large number moves it.
    """
    # A part's errors are not independent of one another: few draws say less than their numbers promise.
    careless = 1.0 if len(draws) >= FEW else 16.0
    found = {}
    for name in draws[0]:
        errors = Errors(*(torch.stack(terms) for terms in zip(*(draw[name] for draw in draws))))  # [draws, ...]
        whole = Errors(*(terms.sum() for terms in errors))
        every = [_mean_square_share(whole), _typical_share(errors.found.flatten(), errors.formula.flatten())]
        for part in _parts(errors):
            by_draw = Errors(*(terms.sum(2) for terms in part))  # [draws, B * H]
            every.append(_mean_square_share(by_draw).median(0).values.max() / careless)
            rows = (terms.transpose(0, 1).flatten(1) for terms in (part.found, part.formula))  # [B * H, draws * rows]
            every.append(_typical_share(*rows).max() / careless)
        found[name] = float(torch.stack(every).max())
    return found


def _parts(errors: Errors) -> Iterator[Errors]:
    """Yield the errors of one stretch of PART positions after the other, [draws, B * H, rows]."""
    if errors.found.dim() == 2:  # a tensor for all positions is one part
        yield Errors(*(terms[:, None] for terms in errors))
        return
    starts = tuple(range(PART, errors.found.shape[3], PART))
    stretches = zip(*(terms.flatten(1, 2).tensor_split(starts, 2) for terms in errors))
    for stretch in stretches:
        yield Errors(*stretch)


def _mean_square_share(errors: Errors) -> Tensor:
    """Return the root mean square of the errors as a share of what is allowed, for each of the sums."""
    # How many numbers make the sum of squares: 1 where one of them is nearly all of it, and n where they come from
    # one normal distribution, in which the mean of the fourth powers is 3 times the squared mean of the squares.
    both = errors.found + errors.formula
    makers = (3 * both.square() / errors.fourth - 2).nan_to_num(1.0).clamp(min=1)
    ratio = errors.found.sqrt() / (errors.formula.sqrt() + 1e-38)  # 0 / 0 is right
    return ratio / _allowed(torch.minimum(makers, errors.numbers))


def _typical_share(found: Tensor, formula: Tensor) -> Tensor:
    """Return the median quotient of two errors of a row as a share of what is allowed; sums of squares [..., rows].

    From fewer than 100 rows a lower quantile is returned, from fewer than 9 none: they tell nothing. For rows of one
    number the quotient is that of two numbers of a normal distribution, above 2 in 30 of 100 rows, and so the quantile
    is by chance above 2 once in 100,000 times.
    """
    ratio = (found / formula).sqrt()  # NaN in rows without any error, as hidden ones; they say nothing
    told = (~ratio.isnan()).sum(-1, keepdim=True)
    quantile = (0.7 - 2 * told.clamp(min=1).rsqrt()).clamp(0.0, 0.5)
    place = (quantile * (told - 1).clamp(min=0)).long()
    sorted_ratio = ratio.nan_to_num(torch.inf, posinf=torch.inf).sort(-1).values
    return sorted_ratio.gather(-1, place).where(quantile > 0, 0.0)[..., 0] / 2


def _allowed(numbers: Tensor) -> Tensor:
    """Return how many times the formula's error is allowed, from so many numbers.

    The ratio of two errors of n numbers varies by exp(1 / sqrt(n)). If few, they may differ by 7 such factors.
    """
    return torch.exp(7 * numbers.rsqrt()).clamp(min=2)


def fault_in(draws: Sequence[Draw], most: float = 1.0) -> str:
    """Return which result is wrong and by how much, or an empty string; `most` is a factor on what is allowed."""
    if not draws:
        return "cannot be judged: the formula in the same dtype was finite in no draw"
    for name, share in shares(draws).items():
        if not share <= most:  # NaN too
            what = "the output" if name == "output" else f"the gradient of {name}"
            return f"{what} is wrong by {share / most:.3g} times what is allowed"
    return ""
