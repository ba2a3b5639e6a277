"""Small models that read words, and a tokenizer for them."""

import torch
from torch import nn

import mixhead_plugin.nn as door
from tests.heads.models import HEADS


class Letters:
    """A tokenizer that cuts text into letters."""

    def __call__(self, text=None, text_target=None, return_tensors="pt"):
        letters = text_target if text is None else text
        return {"input_ids": torch.tensor([[3 + ord(c) % 26 for c in letters]])}

    def decode(self, tokens):
        return f" <{tokens[0]}>"


class LanguageModel(nn.Module):
    """Reads words and sees none that are later."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(29, 16)
        self.attention = door.MixedAttention(
            16, HEADS, batch_first=True, head_mixing="position-wise"
        )

    def forward(self, words):
        x = self.embedding(words)
        return self.attention(x, x, x, is_causal=True, need_weights=False)[0]


class Reader(nn.Module):
    """Reads words and sees all of them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(29, 16)
        self.attention = door.MixedAttention(16, HEADS, batch_first=True)

    def forward(self, words):
        x = self.embedding(words)
        return self.attention(x, x, x, need_weights=False)[0]
