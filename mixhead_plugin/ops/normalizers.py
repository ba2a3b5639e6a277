"""How one row of scores becomes attention weights: every normalizer once.

All functions take scores ``[..., K]`` in float32 or float64, ``-inf`` where a key is hidden, and return weights
``[..., K]``: exactly 0 for a hidden key, and for a row without any visible key. The gradient of 0/0 is 0. TorchScript
compiles them.
"""

from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Normalizer(NamedTuple):
    """One entry of the flag ``--attention-normalizer``."""

    weights: Callable[[Tensor], Tensor]  # scores [..., K], -inf where hidden -> weights [..., K]
    formula: str
    source: str


def _shifted_exp(scores: Tensor) -> Tensor:
    """exp(s - max s): the shift cancels in every quotient below, so it needs no gradient."""
    if scores.size(-1) == 0:  # amax of nothing is an error
        return scores
    largest = scores.detach().amax(-1, keepdim=True)
    return torch.exp(scores - largest.masked_fill(largest == float("-inf"), 0.0))


def _divide(weights: Tensor, total: Tensor) -> Tensor:
    """weights / total, with 0/0 = 0 and no gradient there: dividing by infinity gives both."""
    return weights / total.masked_fill(total == 0, float("inf"))


def softmax(scores: Tensor) -> Tensor:
    weights = _shifted_exp(scores)
    return _divide(weights, weights.sum(-1, keepdim=True))


def sigsoftmax(scores: Tensor) -> Tensor:
    # logsigmoid, not log(sigmoid): the latter is -inf from s = -104 on in float32
    return softmax(scores + F.logsigmoid(scores))


def l2(scores: Tensor) -> Tensor:
    weights = _shifted_exp(scores)
    return _divide(weights, torch.linalg.vector_norm(weights, dim=-1, keepdim=True))


def unnormalized(scores: Tensor) -> Tensor:
    return torch.exp(scores)


def relu2(scores: Tensor) -> Tensor:
    visible = (scores != float("-inf")).sum(-1, keepdim=True)
    return _divide(F.relu(scores).square(), visible.to(scores.dtype))


def swish_l2(scores: Tensor) -> Tensor:
    # swish(s) = s exp(logsigmoid(s)), shifted like the others: a row of s < -104 would vanish in float32
    visible = scores.masked_fill(scores == float("-inf"), 0.0)
    weights = visible * _shifted_exp(F.logsigmoid(scores))
    return _divide(weights, torch.linalg.vector_norm(weights, dim=-1, keepdim=True))


NORMALIZERS = {
    "softmax": Normalizer(softmax, "exp(s) / sum exp(s)", "Vaswani et al. 2017, eq. 1"),
    "sigsoftmax": Normalizer(sigsoftmax, "exp(s) sigmoid(s) / sum exp(s) sigmoid(s)", "mixhead eq. 21"),
    "l2": Normalizer(l2, "exp(s) / sqrt(sum exp(2 s))", "l2 essay, 'New Normalization'"),
    "unnormalized": Normalizer(unnormalized, "exp(s)", "l2 essay, 'Removing the Denominator'"),
    "relu2": Normalizer(relu2, "relu(s)^2 / (number of visible keys)", "l2 essay, GAU"),
    "swish-l2": Normalizer(swish_l2, "swish(s) / sqrt(sum swish(s)^2)", "l2 essay, 'A Turn of Events'"),
}
