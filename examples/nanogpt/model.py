"""A language model built like nanoGPT: names, sizes and the call of attention are nanoGPT's."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the outputs of the heads; all are [B, H, N, D]."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.c_attn(x).split(x.size(2), dim=2)
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in projected
        )
        y = self.attend(query, key, value)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Give the logits of the next token [B, N, vocabulary] for tokens [B, N].

    Args:
        vocabulary: number of tokens
        positions: the number of tokens in the longest text
        layers: number of blocks
        heads: the number of heads of each attention
        width: the size of the states; a head has width / heads numbers
    """

    def __init__(self, vocabulary: int, positions: int, layers: int, heads: int, width: int):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(positions, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        # What writes into the residual stream starts smaller, the more layers there are.
        for block in self.h:
            for last in (block.attn.c_proj, block.mlp[2]):
                nn.init.normal_(last.weight, std=0.02 / (2 * layers) ** 0.5)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.size(1), device=tokens.device)
        x = self.wte(tokens) + self.wpe(places)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of all tokens [B, N] but the first, in nats."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
