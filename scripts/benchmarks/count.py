"""Count what kernels execute for a pair of query and key of one head: `scripts/emulate.py --count`.

The counts do not tell how long a kernel takes on a GPU: triton.md, 'Measured'.
"""

from collections import Counter

import numpy as np
import torch

from benchmarks import flash_attention
from mixhead_plugin.ops.accuracy import compare, fault_in
from mixhead_plugin.ops.sample_calls import CallKind, sample_call
from mixhead_plugin.ops.triton import calls, programs, tuning
from mixhead_plugin.ops.triton.passes import backward, forward
from tests.ptx import launch, machine
from tests.ptx.memory import Memory
from tests.ptx.shared import Shared

# With the dimensions of M; 0 without it.
CONTENDERS = {"FlashAttention-2": 0, "no mixing": 0, "shared": 2, "per query": 4}
# Instructions and products are of a thread; a warp multiplies 16 x 8 x 16 numbers at once. Cycles
# are times 32.
COLUMNS = ("instr.", "mma", "ex2", "shared B", "cycles", "conflicts", "global B")

tally: Counter = Counter()


class CountingShared(Shared):
    """Count the bytes and the cycles of the accesses.

    In a cycle, 32 banks of 4 bytes serve a group of threads: a warp, or fewer threads if they want
    more than 4 bytes each, so that they have at most 128 together.
    """

    def _places(self, site, on, address, size):
        threads = 32 if size <= 4 else 128 // size  # of a group
        group = np.unique(on // threads, return_inverse=True)[1]
        words = address.astype(np.int64)[:, None] // 4 + np.arange(-(-size // 4))
        # Threads of a group that touch one word are served together, so it counts once. A pair of
        # group and word is one int64, so that np.unique can count pairs:
        #
        #     bit 63        32 31         0
        #        [   group   ][   word    ]    bank = word % 32
        found = np.unique(group[:, None] << 32 | words)
        group_of = found >> 32
        bank_of = found % 32
        groups = group.max() + 1
        banks = np.bincount(32 * group_of + bank_of, minlength=32 * groups)
        # A group takes as many cycles as its fullest bank has words; without conflicts it is one.
        cycles = int(banks.reshape(-1, 32).max(1).sum())
        tally.update({"shared B": len(on) * size, "cycles": 32 * cycles})
        tally["conflicts"] += 32 * (cycles - groups)
        return super()._places(site, on, address, size)


class CountingMemory(Memory):
    def _place(self, site, who, address, size):
        tally["global B"] += len(address) * size
        return super()._place(site, who, address, size)


def passes(
    contender: str, place: int, heads: int, size: int, length: int = 256
) -> dict[str, dict[str, float]]:
    """Return the counts of a contender's passes, forward and backward; refuse wrong results."""
    like = CallKind(
        "softmax",
        heads,
        size,
        size,
        torch.float16,
        torch.device("cpu"),
        mixing_dim=CONTENDERS[contender],
    )
    like = like._replace(mixing_dtype=torch.float16 if like.mixing_dim else None)
    inputs, d_out = sample_call(like, length, length, batch=1)
    found: dict[str, dict[str, float]] = {}

    def start(kernel, blocks, arguments, tile):
        tally.clear()
        _, executed = launch.launch(kernel, blocks, arguments, tile.warps, tile.stages)
        for opcode, threads in executed.items():
            tally.update({"instr.": threads, opcode.split(".")[0]: threads})
        line = {column: tally[column] / (heads * length**2) for column in COLUMNS}
        # The number, because a pass may launch a kernel twice.
        found[f"{len(found) + 1} {kernel.fn.__name__} {'x'.join(map(str, tile))}"] = line

    machine.Shared = CountingShared
    machine.Memory = CountingMemory
    programs.start = start
    if contender == "FlashAttention-2":
        tiles = []
        for name in flash_attention.PASSES:
            tiles.append(tuning.tiles_for(f"flash_{name}_kernel", heads, size, 2)[0])
        results = flash_attention.run(*inputs[:3], d_out, inputs.scale, tiles, start)
        named = dict(zip(("output", *inputs.operands()), results))
    else:
        call = calls.Call(inputs, place, poison=True)
        out, statistics = forward(call)
        named = {"output": out, **backward(call, d_out, statistics, out)}
    fault = fault_in([compare(inputs, d_out, torch.ones(1), named)])
    assert not fault, f"{contender}: {fault}"
    return found
