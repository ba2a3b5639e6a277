"""Benchmark the attention alone: causal, from queries, keys and values,
forward and backward pass.
"""

import ctypes
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.measure import Case, resident
from benchmarks.opponents import OPPONENTS, Attend
from mixhead_plugin.ops.accuracy import compare, fault_in, results
from mixhead_plugin.ops.api import attend
from mixhead_plugin.ops.inputs import AttentionInputs

Size = tuple[int, int, int, int]  # batch, heads, length, head size
VARIANTS = [("softmax", ""), ("softmax", "A"), ("softmax", "B"), ("sigsoftmax", ""), ("l2", "")]


class Core(NamedTuple):
    """A contender: a kind of attention, and the code that computes it."""

    provider: str  # a key of OPPONENTS, or an implementation of the plugin
    normalizer: str = "softmax"
    mixing: str = ""  # or A, B
    causal: bool = True

    @property
    def name(self) -> str:
        kind = f"Mixhead {self.mixing}" if self.mixing else self.normalizer
        return f"{self.provider}: {kind}" + ("" if self.causal else ", not causal")


def cores(device: str, dtype: str, dropout_p: float) -> list[Core]:
    """Return the contenders, upstream's first; with dropout there is no formula."""
    upstream = (
        ("flash", "mask") if (device, dtype) == ("cuda", "bfloat16") else ("mask", "is_causal")
    )
    providers = [
        *([] if dropout_p else ["formula"]),
        "auto",
        *(["blockwise"] if device == "cuda" else []),
    ]
    return [
        *map(Core, upstream),
        *(Core(provider, *variant) for provider in providers for variant in VARIANTS),
    ]


class Inputs:
    """The tensors that all contenders of one size share."""

    def __init__(self, size: Size, device: str, dtype: str):
        b, h, n, d = size
        generator = torch.Generator().manual_seed(1)

        def tensor(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        tensors = {name: tensor(b, h, n, d) for name in ("query", "key", "value")}
        tensors |= {
            "A": torch.eye(h) + 0.1 * tensor(h, h),
            "B": torch.eye(h) + 0.1 * tensor(b, n, h, h),
        }
        own = {"device": device, "dtype": getattr(torch, dtype)}
        self.tensors = {name: t.to(**own).requires_grad_() for name, t in tensors.items()}
        self.d_output = tensor(b, h, n, d).to(**own)
        self.future = torch.full((n, n), float("-inf"), **own).triu(1)
        self.functions: dict[Core, Attend] = {}

    def call(self, core: Core, dropout_p: float) -> AttentionInputs:
        tensors = {name: self.tensors[name] for name in ("query", "key", "value")}
        by_mask = core.provider == "mask"
        return AttentionInputs(
            **tensors,
            mixing=self.tensors[core.mixing] if core.mixing else None,
            attn_mask=self.future if by_mask else None,
            normalizer=core.normalizer,
            causal=core.causal and not by_mask,
            dropout_p=dropout_p,
            scale=self.tensors["query"].shape[3] ** -0.5,
        )

    def attend(self, core: Core, call: AttentionInputs) -> Tensor:
        if core.provider not in OPPONENTS:
            return attend(call, core.provider)
        if core not in self.functions:
            self.functions[core] = OPPONENTS[core.provider].make()
        return self.functions[core](call)

    def forward(self, core: Core, dropout_p: float) -> Tensor:
        """Return the output alone."""
        call = self.call(core, dropout_p)
        # Without gradients in the inputs, too: FlexAttention asks them, and has no backward pass on
        # a CPU.
        call = call.with_tensors({name: tensor.detach() for name, tensor in call.given().items()})
        with torch.no_grad():
            return self.attend(core, call)

    def run(self, core: Core, dropout_p: float, d_output: Tensor) -> dict[str, Tensor]:
        """Return the output and the gradients."""
        return results(functools.partial(self.attend, core), self.call(core, dropout_p), d_output)

    def fault(self, core: Core) -> str:
        """Return what a contender computes wrongly, or an empty string.

        It runs at full size without dropout. The first and the last sentence are compared with the
        formula in float64. The other sentences get no gradient: theirs must be 0, and the gradient
        of a shared mixing is known.
        """
        chosen = sorted({0, len(self.d_output) - 1})
        call = self.call(core, 0.0)
        d_output = torch.zeros_like(self.d_output)
        d_output[chosen] = self.d_output[chosen]
        if core.provider in OPPONENTS and OPPONENTS[core.provider].forward_only:
            # Only the output is judged: the gradients of the formula stand where this contender has
            # none.
            found = self.run(core._replace(provider="formula"), 0.0, d_output)
            found["output"] = self.forward(core, 0.0)
        else:
            found = self.run(core, 0.0, d_output)
        if any(t[1:-1].any() for name, t in found.items() if name != "output" and t.dim() == 4):
            return "a gradient comes from another sentence"

        def some(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: t[chosen] if t.dim() == 4 else t for name, t in tensors.items()}

        kept = torch.ones(1, device=d_output.device)
        draw = compare(call.with_tensors(some(call.given())), d_output[chosen], kept, some(found))
        # torch's own attention rounds more often than the formula
        return fault_in([draw], most=2.0)


def title(size: Size, dropout_p: float) -> str:
    return "batch {}, heads {}, length {}, head size {}".format(*size) + f", dropout {dropout_p}"


def cases(size: Size, device: str, dtype: str, dropout_p: float) -> Iterator[Case]:
    """Yield the checked contenders of one size, without dropout and with it."""
    inputs = Inputs(size, device, dtype)
    for core in cores(device, dtype, 0.0):
        if fault := inputs.fault(core):
            sys.exit(f"{core.name}: {fault}; nothing is timed")
    for p in dict.fromkeys([0.0, dropout_p]):
        chosen = cores(device, dtype, p)
        contenders = {
            core.name: functools.partial(inputs.run, core, p, inputs.d_output) for core in chosen
        }
        yield Case("core", title(size, p), contenders, Core("auto").name)


def peak(size: Size, core: Core, dtype: str, dropout_p: float) -> float:
    """Return the peak memory of a contender beyond its inputs, in MiB, as Linux counts; call it in
    a fresh process.
    """
    for length in (min(256, size[2]), size[2]):  # in the first, libraries load and threads start
        inputs = Inputs((size[0], size[1], length, size[3]), "cpu", dtype)
        # free memory that the process keeps would lower the peak: malloc_trim(3)
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts here: proc(5)
        before = resident("VmRSS")
        inputs.run(core, dropout_p, inputs.d_output)
    return (resident("VmHWM") - before) / 2**10
