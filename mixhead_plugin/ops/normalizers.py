"""Normalizers: how one row of scores becomes attention weights, and how a gradient goes back.

Each normalizer is two functions, and a row of NORMALIZERS at the end of this file.

    weights(scores, seen=False, out=None) -> weights
        scores   [..., K] in float32 or float64, -inf where a key is hidden
        seen     whether the caller knows that every row has a visible key, which saves time
        out      memory for the weights, for callers without autograd, which allows operations in
                 place; None for new memory, and with autograd. Without `grad_reads_scores` it may
                 be the memory of the scores: write it after they were read for the last time
        weights  [..., K]; exactly 0 for a hidden key, and in a row without any visible key

    grad(scores, weights, d_weights, out) -> d_scores
        scores, weights  as above, [..., K]
        d_weights        the gradient of the weights, [..., K]
        out              memory for d_scores, which shares none with the other arguments
        d_scores         [..., K]; exactly 0 where the weights are 0 as above; that of 0/0 is 0

TorchScript compiles the functions for weights, so they keep to its rules (torchscript.md).

A sink is one more key in each row, as `reference.append_sink` adds it; the functions need not know
of it.

`unnormalized` and `relu2` have no sum of weights below, with which a shift of the scores would
cancel. So exp(s) is infinite from s = 89 on in float32, s^2 from 2e19 on, and gradients are NaN or
infinite. fairseq takes no step by such gradients.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mixhead_plugin.ops.transforms import exporting


class Normalizer(NamedTuple):
    """One value of the flag ``--attention-normalizer``."""

    weights: Callable[..., Tensor]
    grad: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    # Whether `grad` reads the scores. If not, an implementation may write the weights over them.
    grad_reads_scores: bool
    formula: str
    source: str
    # Whether one more key changes the weights of the others. Without that a sink has no effect.
    takes_sink: bool = False
    # Whether the weights of visible keys are above 0 and sum to 1. Then a loss may take their
    # logarithm, as fairseq does where it trains alignments.
    is_distribution: bool = False
    # Whether the gradient has two values where a score is 0, one on each side.
    jumps: bool = False


# ---- what several of them need ------------------------------------------------------------------


def _largest(scores: Tensor) -> Tensor:
    """Return the largest score of each row, [..., 1], without gradient; 0 if there are no keys."""
    scores = scores.detach()
    if scores.size(-1) == 0:  # amax of no numbers is an error, their sum is 0
        return scores.sum(-1, keepdim=True)
    return scores.amax(-1, keepdim=True)


def _shifted(scores: Tensor) -> Tensor:
    """Return s - max s; the shift cancels where it is used, so it needs no gradient."""
    return scores - _finite(_largest(scores))


def _lowest(dtype: torch.dtype) -> float:
    """Return the lowest finite number of a dtype, as `torch.finfo`, which TorchScript lacks."""
    if dtype == torch.float64:
        return -1.7976931348623157e308
    if dtype == torch.float16:
        return -65504.0
    if dtype == torch.bfloat16:
        return -3.3895313892515355e38
    return -3.4028234663852886e38


def _finite(largest: Tensor) -> Tensor:
    """Return the largest score of each row; the lowest float where no key is visible."""
    return largest.clamp(min=_lowest(largest.dtype))


def _divide(weights: Tensor, total: Tensor, out: Tensor | None = None) -> Tensor:
    """Return weights / total, with 0/0 = 0 and no gradient there.

    Args:
        weights: [..., K]
        total: what to divide each row by, [..., 1]
        out: memory for the result; None for new memory, with autograd
    """
    total = total.masked_fill(total == 0, float("inf"))  # 0 / inf is 0, and so is its derivative
    if out is None:
        return weights / total
    return torch.div(weights, total, out=out)


def _length(weights: Tensor, with_autograd: bool) -> Tensor:
    """Return the 2-norm of each row, [..., 1].

    With autograd a norm of 0 becomes infinity, because a root of 0 has no derivative.
    """
    if not with_autograd:
        return torch.linalg.vector_norm(weights, dim=-1, keepdim=True)
    total = weights.square().sum(-1, keepdim=True)
    return total.masked_fill(total == 0, float("inf")).sqrt()


def _short(scores: Tensor) -> bool:
    """Return whether rows are too short to fill a register of a CPU.

    For them torch's softmax takes about six times as long as single operations. A program that is
    exported must not depend on the length, so it has the way for all lengths.
    """
    if not torch.jit.is_scripting() and exporting():
        return False
    return scores.is_cpu and scores.size(-1) < 16


def _dot(weights: Tensor, d_weights: Tensor) -> Tensor:
    """Return w.g, the products of each row, [..., 1]."""
    return torch.linalg.vecdot(weights, d_weights)[..., None]


def _tangent(weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    """Return g - w (w.g), the part of the gradient that keeps the length of a row."""
    return torch.addcmul(d_weights, weights, _dot(weights, d_weights), value=-1, out=out)


# ---- softmax ------------------------------------------------------------------------------------


def softmax(scores: Tensor, seen: bool = False, out: Tensor | None = None) -> Tensor:
    if _short(scores):
        weights = torch.exp(_shifted(scores))
        return _divide(weights, weights.sum(-1, keepdim=True), out)

    # torch's softmax of a row that sees nothing is 0/0. So such a row gets zeros as scores, and its
    # weights become 0 afterwards.
    visible: Tensor | None = None
    if not seen:
        visible = _largest(scores) != float("-inf")  # [..., 1]
        scores = torch.where(visible, scores, 0.0)
    if out is None:
        weights = torch.softmax(scores, -1)
        return weights if visible is None else weights * visible
    torch.softmax(scores, -1, out=out)
    return out if visible is None else out.mul_(visible)


def softmax_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    # w (g - w.g), with w the weights and g their gradient
    if _short(weights):
        return torch.sub(d_weights, _dot(weights, d_weights), out=out).mul_(weights)
    # torch's own, because no public function writes to memory that is given.
    return torch._softmax_backward_data(d_weights, weights, -1, weights.dtype, grad_input=out)


# ---- sigsoftmax ---------------------------------------------------------------------------------


def sigsoftmax(scores: Tensor, seen: bool = False, out: Tensor | None = None) -> Tensor:
    # softmax(s + log sigmoid(s)). F.logsigmoid, because log(sigmoid(s)) would be -inf from s = -104
    # on in float32.
    #
    # Far below 0 the sum is 2 s. For scores as low as the lowest float, which masks may have, it
    # would be -inf, and a row of such scores would become a row of hidden keys. Each of the three
    # ways below keeps it finite.
    if _short(scores):
        # Both terms less those of the largest score, which has the largest sum.
        largest = _finite(_largest(scores))
        shifted = F.logsigmoid(scores).sub_(F.logsigmoid(largest)).add_(scores - largest)
        weights = torch.exp(shifted)
        return _divide(weights, weights.sum(-1, keepdim=True), out)
    exponents = F.logsigmoid(scores)
    if out is None:
        # Less the largest score, if that is negative. The softmax ignores what a row shares.
        exponents.sub_(_finite(_largest(scores)).clamp(max=0))
    else:
        # Without autograd this is faster. Scores below -1e30 are equal or at least 1e22 apart, so
        # the largest has all the weight, whether the sum is 2 s or only s.
        exponents.clamp_(min=-1e30)
    return softmax(exponents.add_(scores), seen, out)


def sigsoftmax_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    # w (g - w.g) (2 - sigmoid(s)), since d (s + logsigmoid(s)) / ds = 2 - sigmoid(s)
    slope = torch.sigmoid(scores).neg_().add_(2)
    return softmax_grad(scores, weights, d_weights, out).mul_(slope)


# ---- l2 -----------------------------------------------------------------------------------------


def l2(scores: Tensor, seen: bool = False, out: Tensor | None = None) -> Tensor:
    # the softmax divided by its own length: the factor 1 / sum exp(s) cancels
    weights = softmax(scores, seen, out)
    return _divide(weights, _length(weights, with_autograd=out is None), out)


def l2_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    # w (g - w (w.g))
    return _tangent(weights, d_weights, out).mul_(weights)


# ---- unnormalized -------------------------------------------------------------------------------


def unnormalized(scores: Tensor, seen: bool = False, out: Tensor | None = None) -> Tensor:
    return torch.exp(scores) if out is None else torch.exp(scores, out=out)


def unnormalized_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    return torch.mul(weights, d_weights, out=out)


# ---- relu2 --------------------------------------------------------------------------------------


def relu2(scores: Tensor, seen: bool = False, out: Tensor | None = None) -> Tensor:
    return _divide(F.relu(scores).square(), _count(scores), out)


def relu2_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    # 2 relu(s) g / n, with n visible keys
    slope = _divide(torch.full_like(scores[..., :1], 2.0), _count(scores))  # [..., 1]
    return torch.mul(F.relu(scores), d_weights, out=out).mul_(slope)


def _count(scores: Tensor) -> Tensor:
    """Return the number of visible keys, [..., 1]."""
    return (scores != float("-inf")).sum(-1, keepdim=True).to(scores.dtype)


# ---- sigmoid ------------------------------------------------------------------------------------


def sigmoid(scores: Tensor, seen: bool = False, out: Tensor | None = None) -> Tensor:
    shifted = scores - _count(scores).clamp_(min=1).log_()
    if out is None:
        # torch differentiates its sigmoid by the rounded value, which is 1 from s = 17 on in
        # float32. There the gradient would be 0.
        return torch.exp(F.logsigmoid(shifted))
    return torch.sigmoid(shifted, out=out)


def sigmoid_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    # w sigmoid(log n - s) g
    torch.sub(_count(scores).clamp_(min=1).log_(), scores, out=out)
    return out.sigmoid_().mul_(weights).mul_(d_weights)


# ---- swish-l2 -----------------------------------------------------------------------------------


def swish_l2(scores: Tensor, seen: bool = False, out: Tensor | None = None) -> Tensor:
    visible, sigmoid = _visible_and_sigmoid(scores)
    swish = visible * sigmoid
    # A row is divided by its largest size, so that no square overflows or vanishes. It cancels, as
    # in `_over_largest`.
    size = _largest_size(swish)
    if out is not None:
        weights = swish.div_(size)
        return _divide(weights, _length(weights, with_autograd=False), out)

    # With autograd. The product of a low score and of a gradient may be too large for a float. So a
    # key that weighs nothing has no derivative.
    visible = visible.masked_fill(sigmoid == 0, 0.0)
    # swish / size, with the size as a product: one above 1 divides the score, one below 1 the
    # sigmoid. So neither factor overflows, nor its derivative.
    small = size.clamp(max=1)
    large = size.clamp(min=1)
    weights = (visible / large) * (sigmoid / _at_least_normal(small))
    # The derivative cannot be divided by a size below the least normal number, which may have no
    # finite reciprocal. There only the value gets the rest of the division.
    if weights.requires_grad:
        weights = _scaled_value_only(weights, _at_least_normal(small) / small)
    return _divide(weights, _length(weights, with_autograd=True), out)


def swish_l2_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    # swish'(s) / |swish(s)| (g - w (w.g))
    visible, sigmoid = _visible_and_sigmoid(scores)
    swish = visible * sigmoid
    largest = _largest_size(swish)
    norm = torch.linalg.vector_norm(swish.div_(largest), dim=-1, keepdim=True)  # [..., 1]
    # swish', with the factor of `sigmoid`
    slope = torch.neg(visible).sigmoid_().mul_(visible).add_(1).mul_(sigmoid)
    slope.div_(_at_least_normal(largest))
    return _tangent(weights, d_weights, out).mul_(_divide(slope, norm, slope))


def _visible_and_sigmoid(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores and a multiple of their sigmoid, each with 0 for a hidden key.

    The factor cancels in a quotient of swishes. Without it a row of s < -104 would vanish in
    float32.
    """
    visible = torch.nan_to_num(scores, float("nan"), float("inf"), 0.0)
    return visible, torch.exp(_shifted(F.logsigmoid(scores)))


# ---- softpick -----------------------------------------------------------------------------------


def softpick(scores: Tensor, seen: bool = False, out: Tensor | None = None) -> Tensor:
    signed = _over_largest(_scaled_expm1(scores), out is not None)
    return _divide(F.relu(signed), signed.abs().sum(-1, keepdim=True), out)


def softpick_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    # exp(s) / sum |exp(s) - 1| times (g where s > 0, less sign(s) w.g)
    signed = _scaled_expm1(scores)
    largest = _largest_size(signed)
    total = signed.div_(largest).abs().sum(-1, keepdim=True)
    slope = torch.sub(scores, _largest(scores).clamp(min=0)).exp_().div_(_at_least_normal(largest))
    slope = _divide(slope, total, slope)

    torch.mul(d_weights, signed > 0, out=out)
    out.sub_(signed.sign_() * _dot(weights, d_weights))
    return out.mul_(slope)


def _over_largest(signed: Tensor, in_place: bool) -> Tensor:
    """Return the numbers of each row over the largest size among them.

    That size cancels in a quotient of two such numbers. Without it very small numbers would lose
    digits. The derivative is that of a number which is large enough to have one: for scores near
    1e-40 it would be infinite in float32, and then NaN in a sum.

    Args:
        signed: [..., K]
        in_place: whether to overwrite them, without autograd
    """
    largest = _largest_size(signed)
    if in_place:
        return signed.div_(largest)
    if not signed.requires_grad:
        return signed / largest
    return _scaled_value_only(
        signed / _at_least_normal(largest), _at_least_normal(largest) / largest
    )


def _scaled_value_only(x: Tensor, factor: Tensor) -> Tensor:
    """Return x times a factor, with the derivative of x: as if x had been larger from the start.

    Args:
        x: [..., K]
        factor: a number for each row, [..., 1], without gradient
    """
    return x + x.detach() * (factor - 1)


def _largest_size(signed: Tensor) -> Tensor:
    """Return the largest size in each row, [..., 1], without gradient; 1 where all are 0."""
    largest = _largest(signed.abs())
    return largest.masked_fill(largest == 0, 1.0)


def _at_least_normal(largest: Tensor) -> Tensor:
    """Raise numbers to ten times the least normal one, so that gradients over them are finite."""
    if largest.dtype == torch.float64:
        return largest.clamp_min(2.3e-307)
    return largest.clamp_min(1.2e-37)


def _scaled_expm1(scores: Tensor) -> Tensor:
    """Return exp(s) - 1 over the row's exp(max(s, 0)), without loss of digits; 0 if hidden.

    With m that maximum: for s >= 0 it is exp(s - m) (1 - exp(-s)), which does not overflow, and for
    s < 0 it is exp(-m) (exp(s) - 1). One of the two terms below is 0 for each score.
    """
    largest = _largest(scores).clamp(min=0)  # m
    up = F.relu(scores)
    down = F.relu(-scores.masked_fill(scores == float("-inf"), 0.0))
    return torch.exp(-largest) * torch.expm1(-down) - torch.exp(up - largest) * torch.expm1(-up)


# ---- entmax15 -----------------------------------------------------------------------------------


def entmax15(scores: Tensor, seen: bool = False, out: Tensor | None = None) -> Tensor:
    # relu(s / 2 - t)^2, with the t of which the weights sum to 1. For the n largest halves of
    # scores alone, t would be their mean less the root of (1 / n - variance). The support, the keys
    # that weigh something, is the largest n whose t lies below the n-th half.
    if scores.size(-1) == 0:
        return scores
    halves = _shifted(scores) / 2
    # The largest half is 0 and weighs at most 1, so t >= -1, and lower scores weigh nothing.
    ranked = halves.detach().clamp(min=-1).sort(-1, descending=True)[0]
    number = torch.arange(1, ranked.size(-1) + 1, dtype=ranked.dtype, device=ranked.device)
    mean = ranked.cumsum(-1) / number
    variance = ranked.square().cumsum(-1) / number - mean.square()
    thresholds = mean - (1 / number - variance).clamp(min=0).sqrt()
    support_size = (thresholds < ranked).sum(-1, keepdim=True).clamp(min=1)
    support = halves > thresholds.gather(-1, support_size - 1)
    inside = halves.masked_fill(~support, 0.0)

    # The threshold once more, from the support alone: this loses no digits and has a gradient.
    number = support.sum(-1, keepdim=True).clamp(min=1).to(scores.dtype)
    mean = inside.sum(-1, keepdim=True) / number
    spread = (inside - mean).masked_fill(~support, 0.0).square().sum(-1, keepdim=True)
    weights = F.relu(halves - mean + ((1 - spread) / number).sqrt()).square()
    return weights if out is None else out.copy_(weights)


def entmax15_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    # r (g - r.g / sum r), with r the root of the weights
    root = weights.sqrt()
    mean = _divide(_dot(root, d_weights), root.sum(-1, keepdim=True))
    return torch.sub(d_weights, mean, out=out).mul_(root)


# ---- the table ----------------------------------------------------------------------------------


NORMALIZERS = {
    "softmax": Normalizer(
        weights=softmax,
        grad=softmax_grad,
        grad_reads_scores=False,
        formula="exp(s) / sum exp(s)",
        source="Vaswani et al. 2017, eq. 1",
        takes_sink=True,
        is_distribution=True,
    ),
    "sigsoftmax": Normalizer(
        weights=sigsoftmax,
        grad=sigsoftmax_grad,
        grad_reads_scores=True,
        formula="exp(s) sigmoid(s) / sum exp(s) sigmoid(s)",
        source="mixhead eq. 21",
        takes_sink=True,
        is_distribution=True,
    ),
    "l2": Normalizer(
        weights=l2,
        grad=l2_grad,
        grad_reads_scores=False,
        formula="exp(s) / sqrt(sum exp(2 s))",
        source="l2 essay, 'New Normalization'",
        takes_sink=True,
    ),
    "unnormalized": Normalizer(
        weights=unnormalized,
        grad=unnormalized_grad,
        grad_reads_scores=False,
        formula="exp(s)",
        source="l2 essay, 'Removing the Denominator'",
    ),
    "relu2": Normalizer(
        weights=relu2,
        grad=relu2_grad,
        grad_reads_scores=True,
        formula="relu(s)^2 / (number of visible keys)",
        source="l2 essay and GAU, but they divide by all keys",
    ),
    "swish-l2": Normalizer(
        weights=swish_l2,
        grad=swish_l2_grad,
        grad_reads_scores=True,
        formula="swish(s) / sqrt(sum swish(s)^2)",
        source="l2 essay, 'A Turn of Events'",
    ),
    "sigmoid": Normalizer(
        weights=sigmoid,
        grad=sigmoid_grad,
        grad_reads_scores=True,
        formula="sigmoid(s - log n), n visible keys",
        source="Ramapuram et al. 2024; their n is all keys",
    ),
    "softpick": Normalizer(
        weights=softpick,
        grad=softpick_grad,
        grad_reads_scores=True,
        formula="relu(exp(s) - 1) / sum |exp(s) - 1|",
        source="Zuhri et al. 2025; they add a constant below",
        jumps=True,
    ),
    "entmax15": Normalizer(
        weights=entmax15,
        grad=entmax15_grad,
        grad_reads_scores=False,
        formula="relu(s / 2 - t)^2, with the t of which they sum to 1",
        source="Peters et al. 2019",
        takes_sink=True,
    ),
}


def sink_problem(normalizer: str) -> str:
    """Return why a normalizer takes no sink, or an empty string."""
    if NORMALIZERS[normalizer].takes_sink:
        return ""
    takers = ", ".join(name for name, entry in NORMALIZERS.items() if entry.takes_sink)
    return f"needs one of the normalizers {takers}, not {normalizer}"
