"""Does each of some heads come from its own part of some inputs? Gradients tell.

A feature that an output depends on has a gradient that is not 0.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mixhead_plugin.hf.trial import random_like
from mixhead_plugin.ops.precision import upcast


def in_order(heads: Tensor, inputs: Tensor, by_part: Callable[[Tensor], Tensor]) -> bool:
    """Return whether head h comes from the h-th part of the inputs, for every h.

    Each bit of h decides a sign of the head in a sum. The gradient of the sum by the h-th part has
    this sign, too. Four heads in order:

        bit   the sum                                its gradient by parts 0 1 2 3 has the signs
        0     head 0 - head 1 + head 2 - head 3      + - + -
        1     head 0 + head 1 - head 2 - head 3      + + - -

    If head 1 came from part 2, and head 2 from part 1, the first line would end in + + - -, because
    1 and 2 differ in bit 0. Any two numbers differ in a bit, so no wrong order has all signs right.
    For H heads that takes log2 H gradients, not H.

    Args:
        heads: [H, n], computed from the inputs
        inputs: the tensor to derive by
        by_part: takes the inputs or a gradient, and returns it as [H, m], a row for each part
    """
    features = by_part(inputs.detach())
    (gradient,) = gradients_of(heads, [inputs])
    reached = by_part(gradient) != 0  # some parts have features of other positions, too
    unsigned = _within_a_head(by_part(gradient), features, reached)

    numbers = torch.arange(heads.size(0), device=heads.device)[:, None]  # [H, 1]
    for bit in range((heads.size(0) - 1).bit_length()):
        signs = 1 - 2 * ((numbers >> bit) & 1)
        (gradient,) = gradients_of(heads, [inputs], signs)
        signed = _within_a_head(by_part(gradient), features, reached)
        # 1 where the gradient by a part is the same as without signs, -1 where it is the opposite.
        found = (signed * unsigned).sum(1) / unsigned.square().sum(1)  # [H]
        if not ((found - signs[:, 0]).abs() < 0.5).all():  # so that NaN is no order, either
            return False
    return True


def gradients_of(
    heads: Tensor, inputs: Sequence[Tensor], signs: Tensor | None = None
) -> list[Tensor]:
    """Return the gradients of a sum of all features of some heads, with random factors.

    Args:
        heads: [H, n], computed from the inputs
        inputs: the tensors to derive by
        signs: the sign of each head in the sum, [H, 1]; None for 1
    """
    factors = random_like(heads, tuple(heads.shape), seed=0)
    if signs is not None:
        factors = factors * signs
    total = (heads * factors).sum()
    if not total.requires_grad:  # they come from no projection that the row names
        return [torch.zeros_like(tensor) for tensor in inputs]
    # 0 for inputs that they do not depend on.
    gradients = torch.autograd.grad(total, inputs, retain_graph=True, materialize_grads=True)
    return list(gradients)


def _within_a_head(gradient: Tensor, features: Tensor, reached: Tensor) -> Tensor:
    """Return what is left of a gradient without changes of the mean and the length of each head.

    A norm over all heads, as of Olmo 2, divides by the length of all features. So head 0 depends on
    head 1 a little, but only on how long head 1 is:

        change of head 1    along its features (longer)    across them (turned)
        head 0              gets smaller                    stays

    A norm that subtracts the mean of all features depends on the mean of head 1 in the same way.
    So what is left of the gradient by head 1, across these two directions, shows nothing of head 0,
    whatever the weights of the norm are.

    Args:
        gradient: the gradient by the features of each head, [H, m]
        features: the features of each head, [H, m]
        reached: which of them matter, [H, m]
    """
    gradient = upcast(gradient)
    features = upcast(features) * reached
    number = reached.sum(1, keepdim=True)
    directions = []
    if number.min() > 2:  # else nothing would be left without both
        directions.append(reached.to(features))
        features = (features - features.sum(1, keepdim=True) / number) * reached
    if number.min() > 1:
        directions.append(features)
    for direction in directions:
        square = direction.square().sum(1, keepdim=True).clamp_min(torch.finfo(gradient.dtype).tiny)
        gradient = gradient - direction * (gradient * direction).sum(1, keepdim=True) / square
    return gradient
