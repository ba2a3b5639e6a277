"""Small modules that call F.scaled_dot_product_attention, and what it has to compute when mixed."""

import torch
from torch import nn
from torch.nn import functional as F

B, N, C, H, D = 2, 5, 12, 4, 3


class Attention(nn.Module):
    """Attention to x or to a memory, with the keywords of the call as they are given."""

    def __init__(self, key_heads=H, value_dim=D, repeat=False, **keywords):
        super().__init__()
        self.q = nn.Linear(C, H * D)
        self.k = nn.Linear(C, key_heads * D)
        self.v = nn.Linear(C, key_heads * value_dim)
        self.out = nn.Linear(H * value_dim, C)
        self.key_heads = key_heads
        self.repeat = repeat
        self.keywords = keywords

    def project(self, x, memory=None):
        """Return queries [B, H, Nq, D], keys and values [B, G, Nk, ...]."""
        memory = x if memory is None else memory
        heads = [(self.q(x), H), (self.k(memory), self.key_heads), (self.v(memory), self.key_heads)]
        return [features.unflatten(2, (number, -1)).transpose(1, 2) for features, number in heads]

    def forward(self, x, memory=None, cache=None, **more):
        query, key, value = self.project(x, memory)
        if cache is not None:
            key = torch.cat([*cache.get("key", []), key], dim=2)
            value = torch.cat([*cache.get("value", []), value], dim=2)
            cache.update(key=[key], value=[value])
        if self.repeat:
            key, value = (t.repeat_interleave(H // self.key_heads, 1) for t in (key, value))
        out = self.attend(query, key, value, **self.keywords, **more)
        return self.out(out.transpose(1, 2).flatten(2))

    def attend(self, query, key, value, **keywords):
        return F.scaled_dot_product_attention(query, key, value, **keywords)


class Final(Attention):
    def __init_subclass__(cls):
        raise TypeError("no subclass")


class Model(nn.Module):
    """Two layers of attention with a residual."""

    def __init__(self, attention=Attention, **keywords):
        super().__init__()
        self.layers = nn.ModuleList([attention(**keywords) for _ in range(2)])

    def forward(self, x, **more):
        for layer in self.layers:
            x = x + layer(x, **more)
        return x


class Mixed(nn.Module):
    """A model with attentions of both kinds."""

    def __init__(self):
        super().__init__()
        self.packed = nn.MultiheadAttention(C, H, batch_first=True)
        self.calling = Attention()

    def forward(self, x):
        return x + self.packed(x, x, x, need_weights=False)[0] + self.calling(x)


def move(model):
    """Give all trained numbers other values, so that the mixing is away from the identity."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def inputs(batch=B, length=N):
    torch.manual_seed(7)
    return torch.randn(batch, length, C, dtype=torch.float64)


def defined(attention, x, memory=None, visible=None, added=None, scale=D**-0.5):
    """Return the output of a position-wise mixed `Attention`, from its own parameters.

    Args:
        visible: bool, broadcastable to [B, H, Nq, Nk]; None if all keys are
        added: to the scores, likewise
        scale: factor on query . key
    """
    query, key, value = attention.project(x, memory)
    group = H // attention.key_heads
    outputs = []
    for i in range(H):
        mixed = 0
        for j in range(H):
            scores = query[:, j] @ key[:, j // group].mT * scale  # [B, Nq, Nk]
            if added is not None:
                scores = scores + added.expand(len(x), H, *scores.shape[1:])[:, j]
            if visible is not None:
                hidden = ~visible.expand(len(x), H, *scores.shape[1:])[:, j]
                scores = scores.masked_fill(hidden, -torch.inf)
            weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
            mixing = query[:, j] @ attention.head_mixing.query_weight[:, i]  # [B, Nq]
            mixing = mixing + attention.head_mixing.bias[j, i]
            mixed = mixed + mixing[..., None] * weights
        outputs.append(mixed @ value[:, i // group])
    return attention.out(torch.cat(outputs, -1))
