"""Compute the papers' definitions of one call of attention apart from the package.

The tests of the normalizers, of the CPU's implementations and of their transformations compare with
them.
"""

import torch

INF = float("inf")


def _divide(weights, total):
    return weights / total.where(total > 0, 1.0)


def _entmax15(s, v):
    """Find the threshold by bisection, then by an equation that has a gradient.

    The equation says that the squares sum to 1.
    """
    x = s.masked_fill(v == 0, -INF)
    x = (x - x.detach().amax(-1, True).nan_to_num(neginf=0.0)) / 2
    high = torch.zeros_like(x[..., :1])
    low = high - 1
    for _ in range(60):
        middle = (low + high) / 2
        above = (x.detach() - middle).clamp(min=0).square().sum(-1, True) >= 1
        low = middle.where(above, low)
        high = high.where(above, middle)
    inside = x > high
    n = inside.sum(-1, True).clamp(min=1)
    x = x.where(inside, 0.0)
    mean = x.sum(-1, True) / n
    spread = (x - mean).where(inside, 0.0).square().sum(-1, True)
    return (x - mean + ((1 - spread) / n).clamp(min=0).sqrt()).where(inside, 0.0).square()


def _swish(s):
    return s * torch.sigmoid(s)


# Weights of scores `s` [..., K]; `v` is 1 for a visible key and 0 for a hidden one. A new
# normalizer needs a row here.
NORMALIZERS = {
    "softmax": lambda s, v: _divide(v * s.exp(), (v * s.exp()).sum(-1, True)),
    "sigsoftmax": lambda s, v: _divide(
        v * s.exp() * s.sigmoid(), (v * s.exp() * s.sigmoid()).sum(-1, True)
    ),
    "l2": lambda s, v: _divide(v * s.exp(), (v * (2 * s).exp()).sum(-1, True).sqrt()),
    "unnormalized": lambda s, v: v * s.exp(),
    "relu2": lambda s, v: _divide(v * s.clamp(min=0).square(), v.sum(-1, True)),
    "sigmoid": lambda s, v: v / (1 + v.sum(-1, True) * (-s).exp()),
    "softpick": lambda s, v: _divide(
        v * s.expm1().clamp(min=0), (v * s.expm1().abs()).sum(-1, True)
    ),
    "entmax15": _entmax15,
    "swish-l2": lambda s, v: _divide(
        v * _swish(s), torch.linalg.vector_norm(v * _swish(s), dim=-1, keepdim=True)
    ),
}


def weights(normalizer, scores, visible):
    """Return the weights [..., K] of scores [..., K] for a bool `visible` of the same shape."""
    return NORMALIZERS[normalizer](scores.masked_fill(~visible, 0.0), visible.to(scores.dtype))


def attention(
    query,
    key,
    value,
    *,
    normalizer="softmax",
    mixing=None,
    causal=False,
    attn_mask=None,
    key_padding_mask=None,
    relative=None,
    gain=None,
    sink=None,
    score_mixing=None,
    scale=None,
):
    """Compute `ops.attention` by definition, all of it in the dtype of the inputs."""
    batch, heads, n_queries, head_dim = query.shape
    n_keys = key.shape[2]
    distances = [[k - t + n_queries - 1 for k in range(n_keys)] for t in range(n_queries)]
    distances = torch.tensor(distances, dtype=torch.long).view(n_queries, n_keys)
    scores = torch.einsum("bhtd,bhkd->bhtk", query, key) * (
        head_dim**-0.5 if scale is None else scale
    )
    if score_mixing is not None:
        scores = torch.einsum(
            "bjtk,ji->bitk" if score_mixing.dim() == 2 else "bjtk,btji->bitk", scores, score_mixing
        )
    visible = torch.ones(batch, heads, n_queries, n_keys, dtype=torch.bool)
    if relative is not None:
        # zeros for distances without a row
        rows = torch.nn.functional.pad(relative[1], [0, 0, 0, n_queries])
        scores = scores + torch.einsum("bhtr,htkr->bhtk", relative[0], rows[:, distances])
    if attn_mask is not None:
        visible = visible & (attn_mask > -INF)
        scores = scores + attn_mask.masked_fill(attn_mask == -INF, 0.0).to(scores.dtype)
    if causal:
        visible = visible & (distances <= n_keys - 1)
    if key_padding_mask is not None:
        visible = visible & ~key_padding_mask[:, None, None]
    if sink is not None:
        scores = torch.cat([scores, sink.view(1, heads, 1, 1).expand(batch, -1, n_queries, -1)], -1)
        visible = torch.cat([visible, torch.ones_like(scores[..., -1:], dtype=torch.bool)], -1)
    found = weights(normalizer, scores, visible)[..., :n_keys]
    if gain is not None:
        found = found * gain[:, distances]
    if isinstance(mixing, tuple):
        left, right, diagonal = mixing
        mixing = torch.einsum("btjr,btir->btji", left, right)
        mixing = mixing + torch.diag_embed(diagonal) + torch.eye(heads, dtype=mixing.dtype)
    if mixing is not None:
        found = torch.einsum(
            "bjtk,ji->bitk" if mixing.dim() == 2 else "bjtk,btji->bitk", found, mixing
        )
    return torch.einsum("bhtk,bhkd->bhtd", found, value)
