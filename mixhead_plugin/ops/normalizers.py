"""Normalizers: how one row of scores becomes attention weights, and how a gradient goes back.

Scores are ``[..., K]`` in float32 or float64, ``-inf`` where a key is hidden. Weights are exactly 0
for a hidden key and in a row without any visible key; so are the gradients of such scores. The
gradient of 0/0 is 0.

`weights(scores, seen=False, out=None)`: `seen` promises that every row has a visible key, which
saves time. `out` is memory for the weights, for callers without autograd. TorchScript compiles
these functions. A sink is one more key in each row, as `reference.append_sink` adds it; the
functions need not know. `grad(scores, weights, d_weights, out)` writes d_scores to `out`, which
shares memory with no other argument.

The definitions of `unnormalized` and `relu2` leave nothing to shift. So exp(s) is infinite from s =
89 on in float32, s^2 from 2e19 on, and gradients are NaN or infinite. fairseq takes no step by such
gradients.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Normalizer(NamedTuple):
    """One value of the flag ``--attention-normalizer``."""

    weights: Callable[..., Tensor]
    grad: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    grad_reads_scores: bool  # otherwise the gradient reads the weights alone
    formula: str
    source: str
    takes_sink: bool = False  # whether one more key of score 0 changes the other weights
    jumps: bool = False  # whether the gradient has two values where a score is 0, one on each side


def _largest(scores: Tensor) -> Tensor:
    """Return the largest score of each row, [..., 1], without gradient; 0 if there are no keys."""
    scores = scores.detach()
    if scores.size(-1) == 0:  # amax of nothing is an error
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

    Dividing by infinity gives both.
    """
    total = total.masked_fill(total == 0, float("inf"))
    return weights / total if out is None else torch.div(weights, total, out=out)


def _length(weights: Tensor, out: Tensor | None) -> Tensor:
    """Return the 2-norm of each row, [..., 1].

    With gradients a norm of 0 is infinity, because 0 has no derivative.
    """
    if out is not None:
        return torch.linalg.vector_norm(weights, dim=-1, keepdim=True)
    total = weights.square().sum(-1, keepdim=True)
    return total.masked_fill(total == 0, float("inf")).sqrt()


@torch.jit.unused
def exporting() -> bool:
    """Return whether torch records a program.

    It must not depend on the sizes of the example or on our operators.

    `torch.export` does, and `torch.jit.trace`, by which the classic exporter to ONNX works.
    """
    is_exporting = getattr(torch.compiler, "is_exporting", None)  # torch 2.6 may lack it
    return torch.jit.is_tracing() or (is_exporting is not None and is_exporting())


def _short(scores: Tensor) -> bool:
    """Return whether rows fill no register of a CPU.

    For them torch's softmax takes about six times as long.
    """
    if not torch.jit.is_scripting() and exporting():
        return False
    return scores.is_cpu and scores.size(-1) < 16


def softmax(scores: Tensor, seen: bool = False, out: Tensor | None = None) -> Tensor:
    if _short(scores):
        weights = torch.exp(_shifted(scores))
        return _divide(weights, weights.sum(-1, keepdim=True), out)
    visible: Tensor | None = None
    if not seen:
        visible = _largest(scores) != float("-inf")  # [..., 1]
        scores = torch.where(visible, scores, 0.0)  # a row that sees nothing would be 0/0
    if out is None:
        weights = torch.softmax(scores, -1)
        return weights if visible is None else weights * visible
    torch.softmax(scores, -1, out=out)
    return out if visible is None else out.mul_(visible)


def softmax_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    # w (g - w.g), with w the weights and g their gradient
    if _short(weights):
        return torch.sub(
            d_weights, torch.linalg.vecdot(weights, d_weights)[..., None], out=out
        ).mul_(weights)
    return torch._softmax_backward_data(d_weights, weights, -1, weights.dtype, grad_input=out)


def sigsoftmax(scores: Tensor, seen: bool = False, out: Tensor | None = None) -> Tensor:
    # softmax(s + log sigmoid(s)); log(sigmoid(s)) would be -inf from s = -104 on in float32. That
    # sum is 2 s far below 0, and -inf for scores as low as the lowest float, which masks may have.
    # A row of such must not become one of hidden keys.
    if _short(scores):  # both terms less those of the largest score, which has the largest sum
        largest = _finite(_largest(scores))
        shifted = F.logsigmoid(scores).sub_(F.logsigmoid(largest)).add_(scores - largest)
        weights = torch.exp(shifted)
        return _divide(weights, weights.sum(-1, keepdim=True), out)
    exponents = F.logsigmoid(scores)
    if out is None:
        exponents.sub_(_finite(_largest(scores)).clamp(max=0))  # which the softmax ignores
    else:
        # Without autograd this is faster. Scores of this size lie too far apart for 1e30 to matter.
        exponents.clamp_(min=-1e30)
    return softmax(exponents.add_(scores), seen, out)


def sigsoftmax_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    # w (g - w.g) (2 - sigmoid(s)), since d (s + logsigmoid(s)) / ds = 2 - sigmoid(s)
    return softmax_grad(scores, weights, d_weights, out).mul_(torch.sigmoid(scores).neg_().add_(2))


def l2(scores: Tensor, seen: bool = False, out: Tensor | None = None) -> Tensor:
    # the softmax divided by its own length: the factor 1 / sum exp(s) cancels
    weights = softmax(scores, seen, out)
    return _divide(weights, _length(weights, out), out)


def l2_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    # w (g - w (w.g))
    return _tangent(weights, d_weights, out).mul_(weights)


def unnormalized(scores: Tensor, seen: bool = False, out: Tensor | None = None) -> Tensor:
    return torch.exp(scores) if out is None else torch.exp(scores, out=out)


def unnormalized_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    return torch.mul(weights, d_weights, out=out)


def relu2(scores: Tensor, seen: bool = False, out: Tensor | None = None) -> Tensor:
    return _divide(F.relu(scores).square(), _count(scores), out)


def relu2_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    # 2 relu(s) g / n, with n visible keys
    slope = _divide(torch.full_like(scores[..., :1], 2.0), _count(scores))  # [..., 1]
    return torch.mul(F.relu(scores), d_weights, out=out).mul_(slope)


def sigmoid(scores: Tensor, seen: bool = False, out: Tensor | None = None) -> Tensor:
    shifted = scores - _count(scores).clamp_(min=1).log_()
    # torch differentiates sigmoid by its rounded value, which is 1 from s = 17 on in float32
    return torch.exp(F.logsigmoid(shifted)) if out is None else torch.sigmoid(shifted, out=out)


def sigmoid_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    # w sigmoid(log n - s) g
    torch.sub(_count(scores).clamp_(min=1).log_(), scores, out=out)
    return out.sigmoid_().mul_(weights).mul_(d_weights)


def _count(scores: Tensor) -> Tensor:
    """Return the number of visible keys, [..., 1]."""
    return (scores != float("-inf")).sum(-1, keepdim=True).to(scores.dtype)


def swish_l2(scores: Tensor, seen: bool = False, out: Tensor | None = None) -> Tensor:
    visible, sigmoid = _visible_and_sigmoid(scores)
    swish = visible * sigmoid
    size = _largest_size(swish)  # cancels, as in `_over_largest`
    if out is not None:
        weights = swish.div_(size)
        return _divide(weights, _length(weights, out), out)
    # The product of a low score and of a gradient may be too large for a float. So a key that
    # weighs nothing has no derivative, and each factor is divided on its own.
    visible = visible.masked_fill(sigmoid == 0, 0.0)
    small, large = size.clamp(max=1), size.clamp(min=1)
    weights = (visible / large) * (sigmoid / _normal(small))
    # a largest weight below 1 becomes 1, but keeps its derivative, which might overflow
    if weights.requires_grad:
        weights = weights + weights.detach() * (_normal(small) / small - 1)
    return _divide(weights, _length(weights, out), out)


def swish_l2_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    # swish'(s) / |swish(s)| (g - w (w.g))
    visible, sigmoid = _visible_and_sigmoid(scores)
    swish = visible * sigmoid
    largest = _largest_size(swish)
    norm = torch.linalg.vector_norm(swish.div_(largest), dim=-1, keepdim=True)  # [..., 1]
    # swish', with the factor of `sigmoid`
    slope = torch.neg(visible).sigmoid_().mul_(visible).add_(1).mul_(sigmoid)
    slope.div_(_normal(largest))
    return _tangent(weights, d_weights, out).mul_(_divide(slope, norm, slope))


def _visible_and_sigmoid(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores and a multiple of their sigmoid, each with 0 for a hidden key.

    The factor cancels in a quotient of swishes. Without it a row of s < -104 would vanish in
    float32.
    """
    visible = torch.nan_to_num(scores, float("nan"), float("inf"), 0.0)
    return visible, torch.exp(_shifted(F.logsigmoid(scores)))


def softpick(scores: Tensor, seen: bool = False, out: Tensor | None = None) -> Tensor:
    signed = _over_largest(_scaled_expm1(scores), out is not None)
    return _divide(F.relu(signed), signed.abs().sum(-1, keepdim=True), out)


def softpick_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    # exp(s) / sum |exp(s) - 1| times (g where s > 0, less sign(s) w.g)
    signed = _scaled_expm1(scores)
    largest = _largest_size(signed)
    total = signed.div_(largest).abs().sum(-1, keepdim=True)
    slope = torch.sub(scores, _largest(scores).clamp(min=0)).exp_().div_(_normal(largest))
    slope = _divide(slope, total, slope)
    torch.mul(d_weights, signed > 0, out=out)
    return out.sub_(signed.sign_() * torch.linalg.vecdot(weights, d_weights)[..., None]).mul_(slope)


def _over_largest(signed: Tensor, in_place: bool) -> Tensor:
    """Return the numbers of each row over the largest size among them.

    It cancels in a quotient of two such numbers.

    Very small numbers would lose digits. The derivative is that of a number which is large enough
    to have one: for scores near 1e-40 it would be infinite in float32, and then NaN in a sum.
    `in_place`: without autograd.
    """
    largest = _largest_size(signed)
    if in_place:
        return signed.div_(largest)
    if not signed.requires_grad:
        return signed / largest
    over = signed / _normal(largest)
    # adds 0 but for numbers that are not normal
    return over + over.detach() * (_normal(largest) / largest - 1)


def _largest_size(signed: Tensor) -> Tensor:
    """Return the largest size in each row, [..., 1], without gradient; 1 where all are 0."""
    largest = _largest(signed.abs())
    return largest.masked_fill(largest == 0, 1.0)


def _normal(largest: Tensor) -> Tensor:
    """Return at least ten times the least normal number.

    So gradients times the inverse are finite.
    """
    return largest.clamp_min(2.3e-307 if largest.dtype == torch.float64 else 1.2e-37)


def _scaled_expm1(scores: Tensor) -> Tensor:
    """Return exp(s) - 1 over the row's exp(max(s, 0)), without loss of digits; 0 if hidden."""
    largest, up = _largest(scores).clamp(min=0), F.relu(scores)
    down = F.relu(-scores.masked_fill(scores == float("-inf"), 0.0))
    return torch.exp(-largest) * torch.expm1(-down) - torch.exp(up - largest) * torch.expm1(-up)


def entmax15(scores: Tensor, seen: bool = False, out: Tensor | None = None) -> Tensor:
    # relu(s / 2 - t)^2; a key is in the support if the threshold of the keys down to its own is
    # below it
    if scores.size(-1) == 0:
        return scores
    halves = _shifted(scores) / 2
    ranked = halves.detach().clamp(min=-1).sort(-1, descending=True)[0]  # t >= -1
    number = torch.arange(1, ranked.size(-1) + 1, dtype=ranked.dtype, device=ranked.device)
    mean = ranked.cumsum(-1) / number
    variance = ranked.square().cumsum(-1) / number - mean.square()
    thresholds = mean - (1 / number - variance).clamp(min=0).sqrt()
    size = (thresholds < ranked).sum(-1, keepdim=True).clamp(min=1)
    support = halves > thresholds.gather(-1, size - 1)
    inside = halves.masked_fill(~support, 0.0)
    # once more for the support alone, which loses no digits and has a gradient
    number = support.sum(-1, keepdim=True).clamp(min=1).to(scores.dtype)
    mean = inside.sum(-1, keepdim=True) / number
    spread = (inside - mean).masked_fill(~support, 0.0).square().sum(-1, keepdim=True)
    weights = F.relu(halves - mean + ((1 - spread) / number).sqrt()).square()
    return weights if out is None else out.copy_(weights)


def entmax15_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    # r (g - r.g / sum r), with r the root of the weights
    root = weights.sqrt()
    mean = _divide(torch.linalg.vecdot(root, d_weights)[..., None], root.sum(-1, keepdim=True))
    return torch.sub(d_weights, mean, out=out).mul_(root)


def _tangent(weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    """Return g - w (w.g), the part of the gradient that keeps the length of a row."""
    return torch.addcmul(
        d_weights, weights, torch.linalg.vecdot(weights, d_weights)[..., None], value=-1, out=out
    )


NORMALIZERS = {
    "softmax": Normalizer(
        softmax, softmax_grad, False, "exp(s) / sum exp(s)", "Vaswani et al. 2017, eq. 1", True
    ),
    "sigsoftmax": Normalizer(
        sigsoftmax,
        sigsoftmax_grad,
        True,
        "exp(s) sigmoid(s) / sum exp(s) sigmoid(s)",
        "mixhead eq. 21",
        True,
    ),
    "l2": Normalizer(
        l2, l2_grad, False, "exp(s) / sqrt(sum exp(2 s))", "l2 essay, 'New Normalization'", True
    ),
    "unnormalized": Normalizer(
        unnormalized, unnormalized_grad, False, "exp(s)", "l2 essay, 'Removing the Denominator'"
    ),
    "relu2": Normalizer(
        relu2,
        relu2_grad,
        True,
        "relu(s)^2 / (number of visible keys)",
        "l2 essay and GAU, but they divide by all keys",
    ),
    "swish-l2": Normalizer(
        swish_l2,
        swish_l2_grad,
        True,
        "swish(s) / sqrt(sum swish(s)^2)",
        "l2 essay, 'A Turn of Events'",
    ),
    "sigmoid": Normalizer(
        sigmoid,
        sigmoid_grad,
        True,
        "sigmoid(s - log n), n visible keys",
        "Ramapuram et al. 2024; their n is all keys",
    ),
    "softpick": Normalizer(
        softpick,
        softpick_grad,
        True,
        "relu(exp(s) - 1) / sum |exp(s) - 1|",
        "Zuhri et al. 2025; they add a constant below",
        jumps=True,
    ),
    "entmax15": Normalizer(
        entmax15,
        entmax15_grad,
        False,
        "relu(s / 2 - t)^2, with the t of which they sum to 1",
        "Peters et al. 2019",
        True,
    ),
}


def sink_problem(normalizer: str) -> str:
    """Return why a normalizer takes no sink, or an empty string."""
    if NORMALIZERS[normalizer].takes_sink:
        return ""
    takers = ", ".join(name for name, entry in NORMALIZERS.items() if entry.takes_sink)
    return f"needs one of the normalizers {takers}, not {normalizer}"
