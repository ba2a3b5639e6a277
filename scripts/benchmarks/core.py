"""Benchmark the attention alone: causal, from queries, keys and values, forward and backward pass."""

import functools
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure import Case, check, peak_of_process
from mixhead_plugin.ops import NORMALIZERS, attention

Size = tuple[int, int, int, int]  # batch, heads, length, head size
VARIANTS = [("softmax", ""), ("softmax", "A"), ("softmax", "B"), ("sigsoftmax", ""), ("l2", "")]
PARTS = ("output", *(f"gradient of {name}" for name in ("query", "key", "value", "the mixing")))


class Core(NamedTuple):
    """A contender: a kind of attention, and the code that computes it."""

    provider: str  # mask, is_causal, flash: torch's; formula; an implementation of the plugin
    normalizer: str = "softmax"
    mixing: str = ""  # or A, B

    @property
    def name(self) -> str:
        return f"{self.provider}: {f'Mixhead {self.mixing}' if self.mixing else self.normalizer}"


def cores(device: str, dtype: str, dropout_p: float) -> list[Core]:
    """Return the contenders, upstream's first; with dropout there is no formula."""
    upstream = ("flash", "mask") if (device, dtype) == ("cuda", "bfloat16") else ("mask", "is_causal")
    providers = [*([] if dropout_p else ["formula"]), "auto", *(["blockwise"] if device == "cuda" else [])]
    return [*map(Core, upstream), *(Core(provider, *variant) for provider in providers for variant in VARIANTS)]


def formula(
    query: Tensor, key: Tensor, value: Tensor, mixing: Tensor | None, normalizer: str, future: Tensor
) -> Tensor:
    """Compute the attention by its formula, in the dtype of its inputs."""
    scores = query @ key.transpose(2, 3) * query.shape[3] ** -0.5 + future  # [B, H, N, N]
    weights = torch.softmax(scores, -1) if normalizer == "softmax" else NORMALIZERS[normalizer].weights(scores)
    if mixing is not None:
        weights = torch.einsum("bjqk,ji->biqk" if mixing.dim() == 2 else "bjqk,bqji->biqk", weights, mixing)
    return weights @ value


class Inputs:
    """The tensors that all contenders of one size share."""

    def __init__(self, size: Size, device: str, dtype: str):
        b, h, n, d = size
        generator = torch.Generator().manual_seed(1)

        def tensor(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        tensors = {name: tensor(b, h, n, d) for name in ("query", "key", "value")}
        tensors |= {"A": torch.eye(h) + 0.1 * tensor(h, h), "B": torch.eye(h) + 0.1 * tensor(b, n, h, h)}
        own = {"device": device, "dtype": getattr(torch, dtype)}
        self.tensors = {name: t.to(**own).requires_grad_() for name, t in tensors.items()}
        self.d_output = tensor(b, h, n, d).to(**own)
        self.future = torch.full((n, n), float("-inf"), **own).triu(1)

    def of(self, core: Core) -> list[Tensor]:
        return [self.tensors[name] for name in ("query", "key", "value", *core.mixing)]

    def run(self, core: Core, dropout_p: float) -> Tensor:
        query, key, value, mixing = (*self.of(core), None)[:4]
        if core.provider == "formula":
            return formula(query, key, value, mixing, core.normalizer, self.future)
        if core.provider == "mask":
            return F.scaled_dot_product_attention(query, key, value, self.future, dropout_p)
        if core.provider in ("is_causal", "flash"):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if core.provider == "flash" else nullcontext():
                return F.scaled_dot_product_attention(query, key, value, None, dropout_p, is_causal=True)
        options = {"normalizer": core.normalizer, "mixing": mixing, "causal": True, "dropout_p": dropout_p}
        return attention(query, key, value, impl=core.provider, **options)

    def with_gradients(self, core: Core, dropout_p: float, d_output: Tensor) -> list[Tensor]:
        output = self.run(core, dropout_p)
        return [output.detach(), *torch.autograd.grad(output, self.of(core), d_output)]

    def check(self, core: Core) -> None:
        """Run at full size without dropout; compare the first and the last sentence with the formula in float64.

        The other sentences get no gradient: theirs must be 0, and the gradient of a shared mixing is known.
        """
        chosen = sorted({0, len(self.d_output) - 1})
        d_output = torch.zeros_like(self.d_output)
        d_output[chosen] = self.d_output[chosen]
        got = self.with_gradients(core, 0.0, d_output)
        if any(g[1:-1].any() for g in got[1:] if g.dim() == 4):
            sys.exit(f"{core.name}: a gradient comes from another sentence; nothing is timed")
        found = []
        for dtype in (self.d_output.dtype, torch.float64):
            leaves = [(t[chosen] if t.dim() == 4 else t).detach().to(dtype).requires_grad_() for t in self.of(core)]
            output = formula(*(*leaves, None)[:4], core.normalizer, self.future.to(dtype))
            gradients = torch.autograd.grad(output, leaves, d_output[chosen].to(dtype))
            found.append([output.detach(), *gradients])
        check(core.name, PARTS, [g[chosen] if g.dim() == 4 else g for g in got], *found)


def title(size: Size, dropout_p: float) -> str:
    return "batch {}, heads {}, length {}, head size {}".format(*size) + f", dropout {dropout_p}"


def cases(size: Size, device: str, dtype: str, dropout_p: float) -> Iterator[Case]:
    """Yield the checked contenders of one size, without dropout and with it."""
    inputs = Inputs(size, device, dtype)
    for core in cores(device, dtype, 0.0):
        inputs.check(core)
    for p in dict.fromkeys([0.0, dropout_p]):
        chosen = cores(device, dtype, p)
        contenders = {core.name: functools.partial(inputs.with_gradients, core, p, inputs.d_output) for core in chosen}
        yield Case("core", title(size, p), contenders, Core("auto").name)


def peak(size: Size, core: Core, dtype: str, dropout_p: float) -> float:
    """Return the peak memory of a contender beyond its inputs, in MiB; call it in a fresh process."""
    for length in (min(256, size[2]), size[2]):  # in the first, libraries load and threads start
        inputs = Inputs((size[0], size[1], length, size[3]), "cpu", dtype)
        found = peak_of_process(functools.partial(inputs.with_gradients, core, dropout_p, inputs.d_output))
    return found
