"""Benchmark what is not a training pass of float32.

One step of decoding, and a training step of twelve layers, for its memory.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.core import Size, peak_of
from benchmarks.measure import Case, end_if_wrong, fault_of
from mixhead_plugin.nn import MixedAttention
from mixhead_plugin.ops import attention

KEYS = 1024


def step(size: Size, dtype: str) -> Case:
    """Return one query of each sentence against KEYS keys, as a step of decoding computes it."""
    batch, heads, _, head_dim = size
    torch.manual_seed(1)
    own = getattr(torch, dtype)
    query = torch.randn(batch, heads, 1, head_dim).to(own)
    key, value = (torch.randn(batch, heads, KEYS, head_dim).to(own) for _ in range(2))
    shared = torch.eye(heads) + 0.1 * torch.randn(heads, heads)
    by_query = torch.eye(heads) + 0.1 * torch.randn(batch, 1, heads, heads)
    mixings = {"softmax": None, "Mixhead A": shared.to(own), "Mixhead B": by_query.to(own)}

    def results(mixing: Tensor | None, dtype: torch.dtype = own, impl: str = "auto") -> Tensor:
        given = (tensor.to(dtype) for tensor in (query, key, value))
        mixing = mixing if mixing is None else mixing.to(dtype)
        return attention(*given, mixing=mixing, impl=impl)

    contenders: dict[str, Any] = {
        "torch": functools.partial(F.scaled_dot_product_attention, query, key, value)
    }
    with torch.no_grad():
        for name, mixing in mixings.items():
            found = results(mixing)
            formula = results(mixing, impl="reference")
            exact = results(mixing, torch.float64, "reference")
            end_if_wrong(fault_of(name, ["output"], [found], [formula], [exact]))
            contenders[name] = torch.no_grad()(functools.partial(results, mixing))
    shown = f"batch {batch}, heads {heads}, head size {head_dim}, 1 query, {KEYS} keys"
    return Case("step of decoding", shown, contenders, "softmax")


LAYERS = 12


class Setting(NamedTuple):
    """One way to train.

    Args:
        mixing: a value of --head-mixing
        budget: MIXHEAD_KEPT_MIB; an empty string for its default
        checkpointed: whether each layer is computed again in the backward pass
    """

    mixing: str
    budget: str = ""
    checkpointed: bool = False


SETTINGS = {}
for letter, mixing in (("A", "position-independent"), ("B", "position-wise")):
    SETTINGS[f"Mixhead {letter}, weights kept"] = Setting(mixing)
    SETTINGS[f"Mixhead {letter}, nothing kept"] = Setting(mixing, budget="0")
    SETTINGS[f"Mixhead {letter}, checkpointing"] = Setting(mixing, checkpointed=True)


class Layer(nn.Module):
    def __init__(self, embed_dim: int, heads: int, mixing: str):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(embed_dim) for _ in range(2))
        self.attention = MixedAttention(
            embed_dim, heads, batch_first=True, causal=True, head_mixing=mixing
        )
        self.feed_forward = nn.Sequential(
            nn.Linear(embed_dim, 4 * embed_dim), nn.ReLU(), nn.Linear(4 * embed_dim, embed_dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.feed_forward(self.norms[1](x))


def layers_peak(size: Size, name: str) -> float:
    """Return the peak memory of a training step beyond that of the model, in MiB.

    It has to run in a fresh process that was started with the budget of SETTINGS[name].
    """
    batch, heads, length, head_dim = size
    setting = SETTINGS[name]
    torch.manual_seed(1)
    model = nn.ModuleList(Layer(heads * head_dim, heads, setting.mixing) for _ in range(LAYERS))

    def through(layer: nn.Module, x: Tensor) -> Tensor:
        if setting.checkpointed:
            return checkpoint(layer, x, use_reentrant=False)
        return layer(x)

    def run(length: int) -> None:
        x = torch.randn(batch, length, heads * head_dim)
        for layer in model:
            x = through(layer, x)
        x.square().mean().backward()

    run(64)  # libraries load, threads start, and gradients get their memory
    return peak_of(functools.partial(run, length))
