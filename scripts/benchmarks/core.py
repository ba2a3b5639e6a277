"""Benchmark the attention alone: causal, from queries, keys and values, forward and backward pass."""

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure import Case, resident
from mixhead_plugin.ops.accuracy import compare, fault_in, formula_weights, results
from mixhead_plugin.ops.api import attend
from mixhead_plugin.ops.inputs import AttentionInputs

Size = tuple[int, int, int, int]  # batch, heads, length, head size
VARIANTS = [("softmax", ""), ("softmax", "A"), ("softmax", "B"), ("sigsoftmax", ""), ("l2", "")]


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

    def call(self, core: Core, dropout_p: float) -> AttentionInputs:
        mixing = self.tensors[core.mixing] if core.mixing else None
        own = {name: self.tensors[name] for name in ("query", "key", "value")} | {"mixing": mixing}
        size = self.tensors["query"].shape[3]
        return AttentionInputs(**own, normalizer=core.normalizer, causal=True, dropout_p=dropout_p, scale=size**-0.5)

    def attend(self, core: Core, call: AttentionInputs) -> Tensor:
        query, key, value = call[:3]
        if core.provider == "formula":
            return formula_weights(call) @ value
        if core.provider == "mask":
            return F.scaled_dot_product_attention(query, key, value, self.future, call.dropout_p)
        if core.provider in ("is_causal", "flash"):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if core.provider == "flash" else nullcontext():
                return F.scaled_dot_product_attention(query, key, value, None, call.dropout_p, is_causal=True)
        return attend(call, core.provider)

    def run(self, core: Core, dropout_p: float, d_output: Tensor) -> dict[str, Tensor]:
        """Return the output and the gradients."""
        return results(functools.partial(self.attend, core), self.call(core, dropout_p), d_output)

    def check(self, core: Core) -> None:
        """Run at full size without dropout; compare the first and the last sentence with the formula in float64.

        The other sentences get no gradient: theirs must be 0, and the gradient of a shared mixing is known.
        """
        chosen = sorted({0, len(self.d_output) - 1})
        d_output = torch.zeros_like(self.d_output)
        d_output[chosen] = self.d_output[chosen]
        found, call = self.run(core, 0.0, d_output), self.call(core, 0.0)
        if any(t[1:-1].any() for name, t in found.items() if name != "output" and t.dim() == 4):
            sys.exit(f"{core.name}: a gradient comes from another sentence; nothing is timed")

        def some(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: t[chosen] if t.dim() == 4 else t for name, t in tensors.items()}

        kept = torch.ones(1, device=d_output.device)
        draw = compare(call.with_tensors(some(call.given())), d_output[chosen], kept, some(found))
        if fault := fault_in([draw], most=2.0):  # torch's own attention rounds more often than the formula
            sys.exit(f"{core.name}: {fault}; nothing is timed")


def title(size: Size, dropout_p: float) -> str:
    return "batch {}, heads {}, length {}, head size {}".format(*size) + f", dropout {dropout_p}"


def cases(size: Size, device: str, dtype: str, dropout_p: float) -> Iterator[Case]:
    """Yield the checked contenders of one size, without dropout and with it."""
    inputs = Inputs(size, device, dtype)
    for core in cores(device, dtype, 0.0):
        inputs.check(core)
    for p in dict.fromkeys([0.0, dropout_p]):
        chosen = cores(device, dtype, p)
        contenders = {core.name: functools.partial(inputs.run, core, p, inputs.d_output) for core in chosen}
        yield Case("core", title(size, p), contenders, Core("auto").name)


def peak(size: Size, core: Core, dtype: str, dropout_p: float) -> float:
    """Return the peak memory of a contender beyond its inputs, in MiB, as Linux counts; call it in a fresh process."""
    for length in (min(256, size[2]), size[2]):  # in the first, libraries load and threads start
        inputs = Inputs((size[0], size[1], length, size[3]), "cpu", dtype)
        ctypes.CDLL(None).malloc_trim(0)  # free memory that the process keeps would lower the peak: malloc_trim(3)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts here: proc(5)
        before = resident("VmRSS")
        inputs.run(core, dropout_p, inputs.d_output)
    return (resident("VmHWM") - before) / 2**10
