"""Benchmark the attention alone: causal, from queries, keys and values."""

import ctypes
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.measure import Case, measure, resident
from benchmarks.opponents import OPPONENTS, Attend, problem
from mixhead_plugin.ops.accuracy import compare, fault_in, results
from mixhead_plugin.ops.api import attend
from mixhead_plugin.ops.inputs import AttentionInputs

Size = tuple[int, int, int, int]  # batch, heads, length, head size
MIXED = [("softmax", "A"), ("softmax", "B")]
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

    @property
    def is_opponent(self) -> bool:
        return self.provider in OPPONENTS

    @property
    def is_compiled(self) -> bool:
        return self.is_opponent and OPPONENTS[self.provider].compiled

    @property
    def forward_only(self) -> bool:
        return self.is_opponent and OPPONENTS[self.provider].forward_only


def cores(device: str, dtype: str, dropout_p: float, without: Sequence[str] = ()) -> list[Core]:
    """Return the contenders, torch's own first.

    Args:
        device: "cpu" or "cuda"
        dtype: the name of the numbers
        dropout_p: probability of dropping a weight
        without: words; a contender whose name holds one is left out
    """
    if (device, dtype) == ("cuda", "bfloat16"):
        upstream = [Core("flash"), Core("mask")]
    else:
        upstream = [Core("is_causal"), Core("mask")]
    mixing = [provider for provider, opponent in OPPONENTS.items() if opponent.mixes]

    found = list(upstream)
    if not dropout_p:
        found.append(Core("flex"))  # has no dropout
    for provider in ("auto", "blockwise") if device == "cuda" else ("auto",):
        found += [Core(provider, *variant) for variant in VARIANTS]
    for provider in mixing:
        found += [Core(provider, *variant) for variant in MIXED]

    needed = (found[0], Core("auto"))  # others are compared with these two
    kept = []
    for core in found:
        if core in needed or not any(word in core.name for word in without):
            kept.append(core)
    return kept


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
        if not core.is_opponent:
            return attend(call, core.provider)
        if core not in self.functions:
            self.functions[core] = OPPONENTS[core.provider].make()
        return self.functions[core](call)

    def forward(self, core: Core, dropout_p: float) -> Tensor:
        """Return the output alone."""
        call = self.call(core, dropout_p)
        # Without gradients in the inputs, too: FlexAttention asks them, and has no backward pass on
        # a CPU.
        call = call.with_tensors(
            {name: tensor.detach() for name, tensor in call.operands().items()}
        )
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
        if core.forward_only:
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
        draw = compare(
            call.with_tensors(some(call.operands())), d_output[chosen], kept, some(found)
        )
        # torch's own attention rounds more often than the formula
        return fault_in([draw], most=2.0)

    def end_if_wrong(self, core: Core) -> None:
        """End the command before it times a contender that is wrong."""
        fault = self.fault(core)
        if fault:
            sys.exit(f"{core.name}: {fault}; nothing is timed")


def title(size: Size, dropout_p: float) -> str:
    b, h, n, d = size
    return f"batch {b}, heads {h}, length {n}, head size {d}, dropout {dropout_p}"


def tables(
    size: Size,
    device: str,
    dtype: str,
    dropout_p: float,
    rounds: int,
    clock: str,
    without: Sequence[str] = (),
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of one size: both passes without and with dropout, and the forward pass alone.

    A contender that gives other numbers than the formula ends the command. All take turns in this
    process.
    """
    inputs = Inputs(size, device, dtype)
    chosen = []
    for core in cores(device, dtype, 0.0, without):
        if why := problem(core.provider, device):
            print(f"left out: {core.name}: {why}")
        else:
            inputs.end_if_wrong(core)
            chosen.append(core)
    own = Core("auto").name

    both = [core for core in chosen if not core.forward_only]
    for p in dict.fromkeys([0.0, dropout_p]):
        runs = {core.name: functools.partial(inputs.run, core, p, inputs.d_output) for core in both}
        seconds = {core.name: first_call(inputs, core, p) for core in both if core.is_compiled}
        rows = measure(Case("core", title(size, p), runs, own), rounds, device, clock)
        for row in rows:
            if row["name"] in seconds:
                row["compile_s"] = seconds[row["name"]]
            if device == "cpu":
                row["peak_mib"] = peak_of(runs[row["name"]])
        yield beside_checkpointed(rows)

    # Without gradients a compiled contender would be compiled once more; only FlexAttention has
    # nothing else.
    alone = [core for core in chosen if core.forward_only or not core.is_compiled]
    alone = [core for core in alone if "checkpointed" not in core.provider]
    forward = {core.name: functools.partial(inputs.forward, core, 0.0) for core in alone}
    yield measure(
        Case("core, forward pass alone", title(size, 0.0), forward, own), rounds, device, clock
    )


def first_call(inputs: Inputs, core: Core, dropout_p: float) -> float:
    """Return how many seconds longer the first call of a compiled contender takes than the next.

    That is little if torch finds on disk what it has compiled before.
    """
    inputs.functions.pop(core, None)
    took = []
    for _ in range(2):
        began = time.perf_counter()
        inputs.run(core, dropout_p, inputs.d_output)
        took.append(time.perf_counter() - began)
    return took[0] - took[1]


CHECKPOINTED = ", checkpointed"


def beside_checkpointed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put time and memory of a loop with checkpointing into columns of the same loop without it.

    A loop that was timed with checkpointing alone keeps its own row.
    """
    row_of = {row["name"]: row for row in rows}
    kept = []
    for row in rows:
        without = row_of.get(row["name"].replace(CHECKPOINTED, ""))
        if CHECKPOINTED in row["name"] and without is not None:
            without["ms_checkpointed"] = row["ms"]
            without["peak_checkpointed_mib"] = row["peak_mib"]
        else:
            kept.append(row)
    return kept


def peak_of(function: Callable[[], Any]) -> float:
    """Return the peak memory that a call adds to this process, in MiB, as Linux counts."""
    # free memory that the process keeps would lower the peak: malloc_trim(3)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here: proc(5)
    before = resident("VmRSS")
    function()
    return (resident("VmHWM") - before) / 2**10


def peak(size: Size, core: Core, dtype: str, dropout_p: float) -> float:
    """Return the peak memory of a contender beyond its inputs, in MiB, in a fresh process."""
    for length in (min(256, size[2]), size[2]):  # in the first, libraries load and threads start
        inputs = Inputs((size[0], size[1], length, size[3]), "cpu", dtype)
        found = peak_of(functools.partial(inputs.run, core, dropout_p, inputs.d_output))
    return found
