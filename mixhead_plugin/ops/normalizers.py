"""How one row of scores becomes attention weights, and how a gradient goes back: every normalizer once.

All functions take scores ``[..., K]`` in float32 or float64, ``-inf`` where a key is hidden. Weights ``[..., K]`` are
exactly 0 for a hidden key, and for a row without any visible key; so are the gradients of their scores. The gradient of
0/0 is 0. A caller who knows that every row has a visible key says so with `seen`, and saves the care for it.
TorchScript compiles the weights.
"""

from typing import Callable, NamedTuple, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Normalizer(NamedTuple):
    """One entry of the flag ``--attention-normalizer``."""

    weights: Callable[..., Tensor]  # scores [..., K], -inf where hidden, and seen = False -> weights [..., K]
    grad: Callable[[Tensor, Tensor, Tensor], Tensor]  # scores, their weights, d_weights -> d_scores, each [..., K]
    formula: str
    source: str


def _divide(weights: Tensor, total: Tensor) -> Tensor:
    """weights / total, with 0/0 = 0 and no gradient there: dividing by infinity gives both."""
    return weights / total.masked_fill(total == 0, float("inf"))


def softmax(scores: Tensor, seen: bool = False) -> Tensor:
    if seen or scores.size(-1) == 0:  # amax of nothing is an error
        return torch.softmax(scores, -1)
    visible = scores.amax(-1, keepdim=True) != float("-inf")  # [..., 1]
    # exp of the lowest number is 0 as well, but a row of it is no 0/0. NaN stays.
    finite = torch.nan_to_num(scores, float("nan"), float("inf"))
    return torch.softmax(finite, -1) * visible


def softmax_grad(scores: Tensor, weights: Tensor, d_weights: Tensor) -> Tensor:
    # P (dP - sum P dP) in one pass
    return torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype)


def sigsoftmax(scores: Tensor, seen: bool = False) -> Tensor:
    # logsigmoid, not log(sigmoid): the latter is -inf from s = -104 on in float32
    return softmax(scores + F.logsigmoid(scores), seen)


def sigsoftmax_grad(scores: Tensor, weights: Tensor, d_weights: Tensor) -> Tensor:
    # d (s + logsigmoid(s)) / ds = 1 + sigmoid(-s)
    return softmax_grad(scores, weights, d_weights) * torch.sigmoid(scores.neg()).add_(1)


def l2(scores: Tensor, seen: bool = False) -> Tensor:
    # exp(s) / sqrt(sum exp(2 s)), above and below divided by sum exp(s)
    weights = softmax(scores, seen)
    return _divide(weights, torch.linalg.vector_norm(weights, dim=-1, keepdim=True))


def l2_grad(scores: Tensor, weights: Tensor, d_weights: Tensor) -> Tensor:
    return weights * _orthogonal_to(weights, d_weights)


def unnormalized(scores: Tensor, seen: bool = False) -> Tensor:
    return torch.exp(scores)


def unnormalized_grad(scores: Tensor, weights: Tensor, d_weights: Tensor) -> Tensor:
    return weights * d_weights


def relu2(scores: Tensor, seen: bool = False) -> Tensor:
    return _divide(F.relu(scores).square(), _count(scores))


def relu2_grad(scores: Tensor, weights: Tensor, d_weights: Tensor) -> Tensor:
    return _divide(2 * F.relu(scores) * d_weights, _count(scores))


def _count(scores: Tensor) -> Tensor:
    """The number of visible keys, [..., 1]"""
    return (scores != float("-inf")).sum(-1, keepdim=True).to(scores.dtype)


def swish_l2(scores: Tensor, seen: bool = False) -> Tensor:
    visible, sigmoid = _shifted_sigmoid(scores)
    weights = visible * sigmoid
    return _divide(weights, torch.linalg.vector_norm(weights, dim=-1, keepdim=True))


def swish_l2_grad(scores: Tensor, weights: Tensor, d_weights: Tensor) -> Tensor:
    visible, sigmoid = _shifted_sigmoid(scores)
    norm = torch.linalg.vector_norm(visible * sigmoid, dim=-1, keepdim=True)
    slope = sigmoid * (1 + visible * torch.sigmoid(-visible))  # of swish, shifted like it
    return _divide(slope * _orthogonal_to(weights, d_weights), norm).masked_fill(scores == float("-inf"), 0.0)


def _shifted_sigmoid(scores: Tensor) -> Tuple[Tensor, Tensor]:
    """Scores with 0 for hidden keys, and their sigmoid divided by the row's largest; 0 for hidden keys.

    The shift cancels in a quotient of swishes; without it a row of s < -104 would vanish in float32.
    """
    visible = scores.masked_fill(scores == float("-inf"), 0.0)
    log = F.logsigmoid(scores)
    if scores.size(-1) == 0:
        return visible, log
    largest = log.detach().amax(-1, keepdim=True)
    return visible, torch.exp(log - largest.masked_fill(largest == float("-inf"), 0.0))


def _orthogonal_to(weights: Tensor, d_weights: Tensor) -> Tensor:
    """d_weights - weights (weights . d_weights): how unit rows can move."""
    return d_weights - weights * torch.linalg.vecdot(weights, d_weights).unsqueeze(-1)


NORMALIZERS = {
    "softmax": Normalizer(softmax, softmax_grad, "exp(s) / sum exp(s)", "Vaswani et al. 2017, eq. 1"),
    "sigsoftmax": Normalizer(
        sigsoftmax, sigsoftmax_grad, "exp(s) sigmoid(s) / sum exp(s) sigmoid(s)", "mixhead eq. 21"
    ),
    "l2": Normalizer(l2, l2_grad, "exp(s) / sqrt(sum exp(2 s))", "l2 essay, 'New Normalization'"),
    "unnormalized": Normalizer(unnormalized, unnormalized_grad, "exp(s)", "l2 essay, 'Removing the Denominator'"),
    "relu2": Normalizer(relu2, relu2_grad, "relu(s)^2 / (number of visible keys)", "l2 essay, GAU"),
    "swish-l2": Normalizer(
        swish_l2, swish_l2_grad, "swish(s) / sqrt(sum swish(s)^2)", "l2 essay, 'A Turn of Events'"
    ),
}
