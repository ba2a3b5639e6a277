"""Judge an implementation: its error may be about twice that of the formula in the same dtype.

Where few numbers decide, chance is larger, so the error may be larger, too.

A trial has three steps:

    sample_call(kind, ...)       numbers for a call of some kind (sample_calls.py)
    compare(..., found)          squared errors of an implementation, and of the formula, which both
                                 are measured against the formula in float64
    fault_in(draws)              which result is too far away, over several such draws
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.masks import additive_mask
from mixhead_plugin.ops.normalizers import NORMALIZERS
from mixhead_plugin.ops.reference import append_sink, apply_gain, mix_heads, mix_weights
from mixhead_plugin.ops.relative import relative_scores
from mixhead_plugin.ops.sample_calls import CallKind

Results = dict[str, Tensor]  # the output and the gradients, by name
DRAWS = 9  # the fewest draws of a trial
TRIES = 4  # draws for each that is wanted, because the formula is not finite in some
ROWS = 100  # the fewest rows of a result in all draws of a trial, see `Errors`
FEW = 5  # with fewer draws a part of a result is judged less sharply than the whole
PART = 16  # positions of a part, as in the smallest tile
NEAR = 4e-6  # rounding to float32 may change the sign of a score this near to 0


def enough_draws(kind: CallKind, rows: int = ROWS) -> int:
    """Return how often a trial draws, so that each result has `rows` rows, or more.

    What all positions share has few rows in one draw: a sink one for each head, M and L one for
    each of their numbers.
    """
    draws = DRAWS
    if kind.sink:
        draws = max(draws, math.ceil(rows / kind.heads))
    if kind.mixing_dim == 2:
        draws = max(draws, math.ceil(rows / (kind.heads * (kind.mixed_heads or kind.heads))))
    if kind.score_mixing_dim == 2:
        draws = max(draws, math.ceil(rows / kind.heads**2))
    return draws


def formula_weights(inputs: AttentionInputs, flipped_below: float = 0.0) -> Tensor:
    """Return the mixed weights [B, H', Nq, Nk] of mixhead eqs 9-12.

    Unlike `reference_attention`, every step is in the dtype of the inputs.

    Args:
        inputs: the inputs of the call
        flipped_below: scores nearer to 0 than this change their sign, as rounding might do
    """
    products = inputs.query @ inputs.key.transpose(2, 3) * inputs.scale
    scores = mix_heads(products, inputs.score_mixing)
    if inputs.relative_query is not None and inputs.relative_key is not None:
        scores = scores + relative_scores(
            inputs.relative_query, inputs.relative_key, inputs.key.shape[2]
        )
    mask = additive_mask(inputs, scores.dtype)
    if mask is not None:
        scores = scores + mask
    if flipped_below:
        scores = torch.where(scores.abs() < flipped_below, -scores, scores)
    n_keys = scores.shape[3]
    weights = NORMALIZERS[inputs.normalizer].weights(append_sink(scores, inputs.sink))
    weights = weights[..., :n_keys]  # without that of the sink
    return mix_weights(apply_gain(weights, inputs.gain), inputs)


def results(
    attend: Callable[[AttentionInputs], Tensor], inputs: AttentionInputs, d_out: Tensor
) -> Results:
    """Return the output of `attend`, and the gradients of its tensors.

    Args:
        attend: the attention
        inputs: the inputs of its call
        d_out: the gradient of its output
    """
    leaves = {}
    for name, tensor in inputs.operands().items():
        leaves[name] = tensor.detach().requires_grad_()
    out = attend(inputs.with_tensors(leaves))
    gradients = torch.autograd.grad(out, list(leaves.values()), d_out)
    return {"output": out.detach(), **dict(zip(leaves, gradients))}


def in_float64(inputs: AttentionInputs) -> AttentionInputs:
    """Return the same call in float64."""
    exact = {name: tensor.double() for name, tensor in inputs.operands().items()}
    return inputs.with_tensors(exact)


class Errors(NamedTuple):
    """What one draw says about one result: sums of squares, by row.

    - A row holds the numbers of one position of one head, [B, H, N].
    - A row of M, its factors or L by query holds those of one position, [B, 1, Nq].
    - Of what all positions share, each number is a row, [rows]. That is a sink, and an M or L for
      all queries.
    """

    found: Tensor  # squared errors of the implementation
    formula: Tensor  # those of the formula in the same dtype, which are the measure


Draw = dict[str, Errors]  # by result


def compare(
    inputs: AttentionInputs, d_out: Tensor, dropout_factors: Tensor, found: Results
) -> Draw:
    """Return the errors of each result, and those of the formula.

    Args:
        inputs: the inputs of a call
        d_out: the gradient of its output
        dropout_factors: those of dropout on the weights, [B, H', Nq, Nk], or 1
        found: the results of an implementation
    """

    def formula(call: AttentionInputs, flipped_below: float = 0.0) -> Tensor:
        weights = formula_weights(call, flipped_below) * dropout_factors.to(call.value.dtype)
        return weights @ call.value

    exact_inputs = in_float64(inputs)
    exact_d_out = d_out.double()
    exact = results(formula, exact_inputs, exact_d_out)
    by_formula = results(formula, inputs, d_out)

    # Where a gradient jumps at a score of 0, rounding decides on which side a score lies. Both
    # sides are right.
    other_side = exact
    if NORMALIZERS[inputs.normalizer].jumps:
        other_side = results(lambda call: formula(call, NEAR), exact_inputs, exact_d_out)

    draw = {}
    for name, right in exact.items():
        error = (found[name] - right).square()
        jump = (other_side[name] - right).square()
        allowed = (by_formula[name] - right).square() + jump
        draw[name] = Errors(found=_by_row(name, error), formula=_by_row(name, allowed))
    return draw


def _by_row(name: str, numbers: Tensor) -> Tensor:
    """Return the sum of each row of a result."""
    if numbers.dim() < 3:  # a sink [H], an M or L for all queries [H, H']
        return numbers.flatten()
    # M, L or a factor of M by query, [B, Nq, H, H'] or [B, Nq, H] -> [B, 1, Nq]
    if "mixing" in name:
        return numbers.flatten(2).sum(2)[:, None]
    return numbers.sum(-1)  # [B, H, N, D] -> [B, H, N]


def finite_draws(draw: Callable[[int], Draw], enough: int) -> list[Draw]:
    """Return draws in which the formula is finite, from `draw(0)` on.

    Rounded scores can make 0 / 0 or infinity of the formula. Such a draw tells nothing about an
    implementation.

    Args:
        draw: returns the draw of a number
        enough: how many are wanted; fewer come back if the formula is seldom finite
    """
    draws: list[Draw] = []
    for nth in range(TRIES * enough):
        drawn = draw(nth)
        if _formula_is_finite(drawn):
            draws.append(drawn)
        if len(draws) == enough:
            break
    return draws


def _formula_is_finite(draw: Draw) -> bool:
    return all(bool(errors.formula.isfinite().all()) for errors in draw.values())


def shares(draws: Sequence[Draw]) -> dict[str, float]:
    """Return the error of each result as a share of what is allowed: at most 1 is right, NaN wrong.

    An error may be twice that of the formula in the same dtype. Each of two statistics must say so,
    for the whole result and for each part, PART positions of a head:

    - the root mean square over all draws, for a part its median over them. It sees a single wrong
      number. Where few numbers make nearly all of it, as those of exp(s) without a denominator,
      chance decides, so more is allowed.
    - the median over all rows and draws of a row's error beside the formula's. No large number
      moves it.
    """
    # A part's errors are not independent of one another: few draws say less than their numbers
    # promise.
    leniency = 1.0 if len(draws) >= FEW else 16.0
    found = {}
    for name in draws[0]:
        errors = _stacked([draw[name] for draw in draws])
        all_shares = _shares_of_whole(errors)
        for part in _parts(errors):
            all_shares += [share / leniency for share in _shares_of_part(part)]
        found[name] = float(torch.stack(all_shares).max())
    return found


def _stacked(draws: Sequence[Errors]) -> Errors:
    """Return the errors of one result in all draws, [draws, B, H, N] or [draws, rows]."""
    return Errors(
        found=torch.stack([draw.found for draw in draws]),
        formula=torch.stack([draw.formula for draw in draws]),
    )


def _shares_of_whole(errors: Errors) -> list[Tensor]:
    """Return the shares by both statistics, for a result as a whole."""
    # The mean square wants errors that are independent of one another. Heads mix, so one bad score
    # spoils all heads of its position: their errors are summed to one. M and sinks are shared by
    # all positions, so one bad score can spoil all their numbers: one error a draw.
    dim = 2 if errors.found.dim() == 4 else 1  # that of heads, or that of rows
    positions = Errors(
        found=errors.found.sum(dim).flatten(), formula=errors.formula.sum(dim).flatten()
    )
    return [
        _mean_square_share(positions),
        _typical_share(errors.found.flatten(), errors.formula.flatten()),
    ]


def _shares_of_part(part: Errors) -> list[Tensor]:
    """Return the largest share of any sentence and head, by both statistics.

    Args:
        part: errors [draws, B * H, rows]
    """
    mean_square = _mean_square_share(part).median(0).values
    # [draws, B * H, rows] -> [B * H, draws * rows]
    found = part.found.transpose(0, 1).flatten(1)
    formula = part.formula.transpose(0, 1).flatten(1)
    # The largest of many parts is high by chance, so more rows are asked for.
    return [mean_square.max(), _typical_share(found, formula, margin=3.5).max()]


def _parts(errors: Errors) -> Iterator[Errors]:
    """Yield the errors of one stretch of PART positions after the other, [draws, B * H, rows]."""
    found, formula = errors
    if found.dim() == 2:  # what all positions share is one part
        yield Errors(found[:, None], formula[:, None])
        return
    found = found.flatten(1, 2)  # [draws, B * H, N]
    formula = formula.flatten(1, 2)
    for start in range(0, found.shape[2], PART):
        stretch = slice(start, start + PART)
        yield Errors(found[:, :, stretch], formula[:, :, stretch])


def _mean_square_share(errors: Errors) -> Tensor:
    """Return the root mean square of errors [..., rows] as a share of what is allowed."""
    found = errors.found.sum(-1)
    formula = errors.formula.sum(-1)
    ratio = found.sqrt() / (formula.sqrt() + 1e-38)  # no error where none is allowed gives 0

    # How many rows make the sum of squares: 1 where one of them is nearly all of it, and about n
    # where each is one number x of the same normal distribution of variance v. There
    #     E (sum x^2)^2 = n (n + 2) v^2     and     E sum x^4 = 3 n v^2
    # so 3 (sum x^2)^2 / sum x^4 - 2 is about n. The numbers of a row do not count, because the
    # error of a single score may make all of them.
    fourth = (errors.found + errors.formula).square().sum(-1)
    effective_rows = (3 * (found + formula).square() / fourth - 2).nan_to_num(1.0).clamp(min=1)
    return ratio / _allowed(effective_rows)


def _typical_share(found: Tensor, formula: Tensor, margin: float = 2.0) -> Tensor:
    """Return the median quotient of two errors of a row as a share of what is allowed.

    A row's quotient, found / formula, is near 1 if both errors are rounding. By chance it exceeds 2
    in 30 of 100 rows of one number, because it is that of two numbers of a normal distribution. So
    the quantile of 50 % is compared with 2, and a lower one where few rows make the quantile itself
    uncertain: fewer than 25 * margin^2. Very few rows tell nothing. With a margin of 2 the quantile
    is by chance above 2 once in 100,000 times.

    Args:
        found: sums of squares, [..., rows]
        formula: the same of the formula
        margin: how far the quantile stays below the 70 %, in units of 1 / sqrt(rows)
    """
    ratio = (found / formula).sqrt()
    informative = (~ratio.isnan()).sum(-1, keepdim=True)  # rows; 0 / 0 says nothing, [..., 1]
    quantile = (0.7 - margin * informative.clamp(min=1).rsqrt()).clamp(0.0, 0.5)
    place = (quantile * (informative - 1).clamp(min=0)).long()

    # What says nothing comes last.
    sorted_ratio = ratio.nan_to_num(torch.inf, posinf=torch.inf).sort(-1).values
    at_quantile = sorted_ratio.gather(-1, place)
    at_quantile = at_quantile.where(quantile > 0, 0.0)
    return at_quantile[..., 0] / 2


def _allowed(rows: Tensor) -> Tensor:
    """Return how many times the formula's error is allowed, at least 2.

    Two errors of n numbers differ by a factor of about exp(1 / sqrt(n)) by chance alone. 7 such
    factors are allowed, so that chance alone is never refused. They are more than 2 for fewer than
    102 rows.

    Args:
        rows: how many rows make the sum of squares
    """
    return torch.exp(7 * rows.rsqrt()).clamp(min=2)


def fault_in(draws: Sequence[Draw], most: float = 1.0) -> str:
    """Return which result is wrong and by how much; empty if none is.

    Args:
        draws: what `finite_draws` has returned
        most: a factor on what is allowed
    """
    if not draws:
        return "cannot be judged: the formula in the same dtype was finite in no draw"
    for name, share in shares(draws).items():
        if not share <= most:  # which is true of NaN
            what = "the output" if name == "output" else f"the gradient of {name}"
            return f"{what} is wrong by {share / most:.3g} times what is allowed"
    return ""
