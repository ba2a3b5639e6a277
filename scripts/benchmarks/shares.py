"""Compare attention with the machine's own product of matrices, at the same shapes and threads.

The operations that a call needs are those of its products for the keys that each query sees, 2 for
each multiplication. For a query, a key that it sees, and a head of size D among H heads:

                     forward               backward
    softmax          4 D  (QK, PV)         8 D  (dP, dV, dQ, dK)
    with mixing      4 D + 2 H  (Pbar)     8 D + 4 H  (dM, dP)

Nothing else is needed: a product that a call computes twice, the half of a block that a causal mask
hides, exponents, dropout, and copies all lower its share.
"""

import functools
import statistics
from typing import Any

import torch

from benchmarks import core
from benchmarks.measure import CLOCKS

ROWS = 64  # queries of a block
CONTENDERS = (
    core.Core("is_causal"),
    core.Core("blockwise"),
    core.Core("blockwise", "softmax", "A"),
    core.Core("blockwise", "softmax", "B"),
)


def needed(size: core.Size, mixes: bool) -> dict[str, float]:
    """Return the operations of both passes."""
    batch, heads, length, head_dim = size
    pairs = batch * heads * length * (length + 1) / 2
    mixing = 2 * heads if mixes else 0
    return {
        "forward": pairs * (4 * head_dim + mixing),
        "backward": pairs * (8 * head_dim + 2 * mixing),
    }


class Machine:
    """torch.mm for one head and one block of queries: their scores, and their values' sum."""

    def __init__(self, size: core.Size):
        _, heads, length, head_dim = size
        self.repeats = heads
        self.query = torch.randn(ROWS, head_dim)
        self.key = torch.randn(length, head_dim)
        self.scores = torch.empty(ROWS, length)
        self.output = torch.empty(ROWS, head_dim)
        self.operations = heads * 2 * 2 * ROWS * length * head_dim

    def run(self) -> None:
        for _ in range(self.repeats):
            torch.mm(self.query, self.key.t(), out=self.scores)
            torch.mm(self.scores, self.key, out=self.output)


def table(size: core.Size, rounds: int, clock: str) -> list[dict[str, Any]]:
    """Return a row for each contender and pass; a share is a median over the rounds."""
    now = CLOCKS[clock]
    inputs = core.Inputs(size, "cpu", "float32")
    for contender in CONTENDERS:
        inputs.end_if_wrong(contender)
    machine = Machine(size)

    def seconds(function: Any) -> float:
        began = now()
        function()
        return now() - began

    speeds: list[float] = []
    times: dict[tuple[str, str], list[float]] = {}
    for round_number in range(-1, rounds):  # the first one warms up
        speed = machine.operations / seconds(machine.run)
        for contender in CONTENDERS:
            forward = seconds(functools.partial(inputs.forward, contender, 0.0))
            both = seconds(functools.partial(inputs.run, contender, 0.0, inputs.d_output))
            if round_number >= 0:
                times.setdefault((contender.name, "forward"), []).append(forward)
                times.setdefault((contender.name, "backward"), []).append(both - forward)
        if round_number >= 0:
            speeds.append(speed)

    rows = []
    for contender in CONTENDERS:
        for which, operations in needed(size, bool(contender.mixing)).items():
            took = times[contender.name, which]
            shares = [operations / t / speed for t, speed in zip(took, speeds)]
            row = {
                "case": "shares",
                "size": core.title(size, 0.0),
                "name": f"{contender.name}, {which}",
                "ms": 1e3 * statistics.median(took),
                "gflop": operations / 1e9,
                "share_of_mm": statistics.median(shares),
            }
            rows.append(row)
    speed = statistics.median(speeds)
    rows.append(
        {"case": "shares", "size": "", "name": "torch.mm, GFLOP a second", "gflop": speed / 1e9}
    )
    return rows
