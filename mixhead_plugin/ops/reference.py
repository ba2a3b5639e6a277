"""Mixed attention by the equations of the papers; every other implementation is tested against it.

    S      = scale * Q K^T, mixed by L, + relative scores + masks     `masked_scores`
    P_j    = normalizer(S_j) * gain                                   `source_weights`
    Pbar_i = sum_j M[j, i] P_j                                        `mix_weights`
    O_i    = dropout(Pbar_i) V_i                                      `weighted_values`

The steps are separate functions, because a module that is scripted calls them one by one.
TorchScript compiles them, so they keep to its rules (torchscript.md).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.low_rank import mix_by_factors
from mixhead_plugin.ops.masks import additive_mask, no_masks
from mixhead_plugin.ops.normalizers import NORMALIZERS
from mixhead_plugin.ops.precision import upcast, without_autocast
from mixhead_plugin.ops.relative import relative_scores, toeplitz


def masked_scores(inputs: AttentionInputs) -> Tensor:
    """Return S = scale * Q K^T, mixed by L, + relative scores + masks (mixhead eq. 9).

    It is [B, H, Nq, Nk], in float32 or float64. Under autocast the product would be in half
    precision, so eager callers call `exact_scores`, or have put `without_autocast` around this.
    """
    query = upcast(inputs.query)
    key = upcast(inputs.key)
    products = torch.matmul(query * inputs.scale, key.transpose(2, 3))  # [B, H, Nq, Nk]
    scores = mix_heads(products, inputs.score_mixing)

    # TorchScript: local names become tensors after `is not None`, attributes do not.
    relative_query = inputs.relative_query
    relative_key = inputs.relative_key
    if relative_query is not None and relative_key is not None:
        scores = scores + relative_scores(upcast(relative_query), upcast(relative_key), key.size(2))
    mask = additive_mask(inputs, scores.dtype)
    return scores if mask is None else scores + mask


def exact_scores(inputs: AttentionInputs) -> Tensor:
    """Return `masked_scores` in float32 or float64, also under autocast."""
    with without_autocast(inputs.query.device):
        return masked_scores(inputs)


def append_sink(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Return the scores of the keys and of the sink, which every row sees, [B, H, Nq, Nk + 1].

    The sink has no value. So its weight is left out before gain, mixing and dropout.

    Args:
        scores: [B, H, Nq, Nk]
        sink: [H], the score of one more key for each head; None to return the scores as they are
    """
    if sink is None:
        return scores
    by_head = upcast(sink).to(scores.dtype)[None, :, None, None]  # [1, H, 1, 1]
    column = by_head.expand(scores.size(0), -1, scores.size(2), -1)  # [B, H, Nq, 1]
    return torch.cat([scores, column], -1)


def apply_gain(weights: Tensor, gain: Tensor | None) -> Tensor:
    """Return the weights P [B, H, Nq, Nk] times the gain of each distance, [H, Nq + Nk - 1]."""
    if gain is None:
        return weights
    by_key = toeplitz(gain.to(weights.dtype), weights.size(2), weights.size(3))  # [H, Nq, Nk]
    return weights * by_key


def mix_heads(weights: Tensor, mixing: Tensor | None) -> Tensor:
    """Return Pbar_i = sum_j M[j, i] P_j, [B, H', Nq, Nk] (mixhead eq. 12).

    Scores are mixed by L in the same way.

    Args:
        weights: P, [B, H, Nq, Nk]
        mixing: M, [H, H'] or [B, Nq, H, H']; M[..., j, i] is the weight of source head j in mixed
            head i. None to return the weights as they are.
    """
    if mixing is None:
        return weights
    mixing = mixing.to(weights.dtype)
    if mixing.dim() == 2:
        # One product a sentence, for all queries.
        back = mixing.t().expand(weights.size(0), -1, -1)  # [B, H', H]
        of_all = torch.matmul(back, weights.flatten(2))  # [B, H', Nq * Nk]
        return of_all.unflatten(2, [weights.size(2), weights.size(3)])
    by_query = weights.transpose(1, 2)  # [B, Nq, H, Nk]
    return torch.matmul(mixing.transpose(-2, -1), by_query).transpose(1, 2)


def mix_weights(weights: Tensor, inputs: AttentionInputs) -> Tensor:
    """Return the mixed weights Pbar [B, H', Nq, Nk] of P [B, H, Nq, Nk], by M or by its factors."""
    left = inputs.mixing_left
    right = inputs.mixing_right
    diagonal = inputs.mixing_diagonal
    if left is not None and right is not None and diagonal is not None:
        return mix_by_factors(weights, left, right, diagonal)
    return mix_heads(weights, inputs.mixing)


def weighted_values(weights: Tensor, inputs: AttentionInputs) -> Tensor:
    """Return dropout(Pbar) V, [B, H', Nq, Dv], in the dtype of the values."""
    dropped = F.dropout(weights, inputs.dropout_p, training=True)  # p is 0 outside of training
    out = torch.matmul(dropped, upcast(inputs.value))
    return out.to(inputs.value.dtype)


def source_weights(inputs: AttentionInputs) -> Tensor:
    """Return P [B, H, Nq, Nk] with the gains of distances, before mixing and dropout.

    It is in float32 or better.
    """
    normalize = NORMALIZERS[inputs.normalizer].weights
    with without_autocast(inputs.query.device):
        scores = append_sink(masked_scores(inputs), inputs.sink)  # [B, H, Nq, Nk or Nk + 1]
        weights = normalize(scores, seen=no_masks(inputs))
        weights = weights[..., : inputs.key.size(2)]  # without that of the sink
        return apply_gain(weights, inputs.gain)


def reference_with_weights(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Return the output of `reference_attention`, and Pbar [B, H', Nq, Nk] before dropout."""
    with without_autocast(inputs.query.device):
        mixed = mix_weights(source_weights(inputs), inputs)  # [B, H', Nq, Nk]
        return weighted_values(mixed, inputs), mixed


def reference_attention(inputs: AttentionInputs) -> Tensor:
    """Compute mixhead eqs 8-12 in float32 or better for inputs of any dtype."""
    return reference_with_weights(inputs)[0]
