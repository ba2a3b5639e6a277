"""How one row of scores becomes attention weights, and how a gradient goes back: every normalizer once.

Scores are ``[..., K]`` in float32 or float64, ``-inf`` where a key is hidden. Weights ``[..., K]`` are exactly 0 for a
hidden key, and for a row without any visible key; so are the gradients of their scores. The gradient of 0/0 is 0. A
caller who knows that every row has a visible key says so with `seen`, and saves the care for it; one who does without
autograd may offer memory for the weights with `out`. TorchScript compiles the weights. The gradients, for
implementations with a backward pass of their own, are written to `out`, a tensor ``[..., K]`` apart from the others.

Weights that are too large for a float32, exp(s) from s = 89 on and s^2 from 2e19 on, are infinite, and gradients with
them NaN or infinite: the definition of `unnormalized` and `relu2` leaves nothing to shift. Training stops there, since
fairseq takes no step by such gradients.
"""

from typing import Callable, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Normalizer(NamedTuple):
    """One entry of the flag ``--attention-normalizer``."""

    weights: Callable[..., Tensor]  # scores [..., K], -inf where hidden, seen=False, out=None -> weights [..., K]
    grad: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # scores, weights, d_weights, out -> d_scores, in out
    grad_reads_scores: bool  # or else their weights are enough
    formula: str
    source: str


def _shifted_exp(scores: Tensor) -> Tensor:
    """exp(s - max s): the shift cancels in a quotient, so it needs no gradient."""
    if scores.size(-1) == 0:  # amax of nothing is an error
        return scores
    largest = scores.detach().amax(-1, keepdim=True)
    return torch.exp(scores - largest.masked_fill(largest == float("-inf"), 0.0))


def _divide(weights: Tensor, total: Tensor, out: Optional[Tensor] = None) -> Tensor:
    """weights / total, with 0/0 = 0 and no gradient there: dividing by infinity gives both."""
    total = total.masked_fill(total == 0, float("inf"))
    return weights / total if out is None else torch.div(weights, total, out=out)


def softmax(scores: Tensor, seen: bool = False, out: Optional[Tensor] = None) -> Tensor:
    visible: Optional[Tensor] = None
    if not seen and scores.size(-1) > 0:  # amax of nothing is an error
        largest = scores.detach().amax(-1, keepdim=True)
        visible = largest != float("-inf")  # [..., 1]
        # A row that sees nothing is raised to 0, lest it be 0/0; the others, NaN too, stay as they are.
        scores = torch.maximum(scores, torch.zeros_like(largest).masked_fill(visible, float("-inf")))
    if out is None:
        weights = torch.softmax(scores, -1)
        return weights if visible is None else weights * visible
    torch.softmax(scores, -1, out=out)
    return out if visible is None else out.mul_(visible)


def softmax_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    # P (dP - sum P dP) in one pass
    return torch._softmax_backward_data(d_weights, weights, -1, weights.dtype, grad_input=out)


def sigsoftmax(scores: Tensor, seen: bool = False, out: Optional[Tensor] = None) -> Tensor:
    # logsigmoid, not log(sigmoid): the latter is -inf from s = -104 on in float32
    return softmax(F.logsigmoid(scores).add_(scores), seen, out)


def sigsoftmax_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    # d (s + logsigmoid(s)) / ds = 2 - sigmoid(s)
    return softmax_grad(scores, weights, d_weights, out).mul_(torch.sigmoid(scores).neg_().add_(2))


def l2(scores: Tensor, seen: bool = False, out: Optional[Tensor] = None) -> Tensor:
    # exp(s) / sqrt(sum exp(2 s)), above and below divided by sum exp(s)
    weights = softmax(scores, seen, out)
    return _divide(weights, torch.linalg.vector_norm(weights, dim=-1, keepdim=True), out)


def l2_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    return _along_the_sphere(weights, d_weights, out).mul_(weights)


def unnormalized(scores: Tensor, seen: bool = False, out: Optional[Tensor] = None) -> Tensor:
    return torch.exp(scores) if out is None else torch.exp(scores, out=out)


def unnormalized_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    return torch.mul(weights, d_weights, out=out)


def relu2(scores: Tensor, seen: bool = False, out: Optional[Tensor] = None) -> Tensor:
    return _divide(F.relu(scores).square(), _count(scores), out)


def relu2_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    slope = _divide(torch.full_like(scores[..., :1], 2.0), _count(scores))  # [..., 1]
    return torch.mul(F.relu(scores), d_weights, out=out).mul_(slope)


def _count(scores: Tensor) -> Tensor:
    """The number of visible keys, [..., 1]"""
    return (scores != float("-inf")).sum(-1, keepdim=True).to(scores.dtype)


def swish_l2(scores: Tensor, seen: bool = False, out: Optional[Tensor] = None) -> Tensor:
    visible, sigmoid = _visible_and_sigmoid(scores)
    weights = visible * sigmoid
    return _divide(weights, torch.linalg.vector_norm(weights, dim=-1, keepdim=True), out)


def swish_l2_grad(scores: Tensor, weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    visible, sigmoid = _visible_and_sigmoid(scores)
    norm = torch.linalg.vector_norm(visible * sigmoid, dim=-1, keepdim=True)  # [..., 1]
    slope = torch.sigmoid(-visible).mul_(visible).add_(1).mul_(sigmoid)  # of swish, with the sigmoid's factor
    return _along_the_sphere(weights, d_weights, out).mul_(_divide(slope, norm))


def _visible_and_sigmoid(scores: Tensor) -> Tuple[Tensor, Tensor]:
    """Scores, and their sigmoid divided so that the row's largest swish is 1 or -1, each with 0 for a hidden key.

    The factor cancels in a quotient of swishes; without it a row of s < -104 would vanish in float32, and so would the
    squares of very small and of very large scores.
    """
    visible = torch.nan_to_num(scores, float("nan"), float("inf"), 0.0)
    sigmoid = _shifted_exp(F.logsigmoid(scores))
    if scores.size(-1) == 0:  # amax of nothing is an error
        return visible, sigmoid
    largest = (visible * sigmoid).detach().abs().amax(-1, keepdim=True)
    # no less than float32's least, of which the inverse is a number as well
    return visible, sigmoid / largest.clamp_min(1.2e-38).masked_fill(largest == 0, 1.0)


def _along_the_sphere(weights: Tensor, d_weights: Tensor, out: Tensor) -> Tensor:
    """dP - P (P . dP): what of d_weights keeps the length of a row"""
    return torch.addcmul(d_weights, weights, torch.linalg.vecdot(weights, d_weights)[..., None], value=-1, out=out)


NORMALIZERS = {
    "softmax": Normalizer(softmax, softmax_grad, False, "exp(s) / sum exp(s)", "Vaswani et al. 2017, eq. 1"),
    "sigsoftmax": Normalizer(
        sigsoftmax, sigsoftmax_grad, True, "exp(s) sigmoid(s) / sum exp(s) sigmoid(s)", "mixhead eq. 21"
    ),
    "l2": Normalizer(l2, l2_grad, False, "exp(s) / sqrt(sum exp(2 s))", "l2 essay, 'New Normalization'"),
    "unnormalized": Normalizer(
        unnormalized, unnormalized_grad, False, "exp(s)", "l2 essay, 'Removing the Denominator'"
    ),
    "relu2": Normalizer(relu2, relu2_grad, True, "relu(s)^2 / (number of visible keys)", "l2 essay, GAU"),
    "swish-l2": Normalizer(
        swish_l2, swish_l2_grad, True, "swish(s) / sqrt(sum swish(s)^2)", "l2 essay, 'A Turn of Events'"
    ),
}
