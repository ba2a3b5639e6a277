"""Count what kernels execute: `scripts/emulate.py --count`. All numbers are for a pair of query and key of one head."""

from collections import Counter
from typing import NamedTuple

import numpy as np
import torch

from mixhead_plugin.ops.accuracy import Variant, compare, fault_in, sample_call
from mixhead_plugin.ops.triton import operators, tuning
from mixhead_plugin.ops.triton.rows import LOG2E
from tests.ptx import flash_attention, launch, machine
from tests.ptx.memory import Memory
from tests.ptx.shared import Shared

CONTENDERS = ("FlashAttention-2", "no mixing", "shared", "per query")
# An estimate from public figures. For each SM and clock: products of 16-bit numbers, instructions of warps, exp2, bytes
# of shared memory, bytes of L2 (measured by others). On H100 mma.sync reaches about 0.6 of what wgmma does.
GPUS = {"A100": (1024, 4, 16, 128, 47), "H100": (2048 * 0.6, 4, 16, 128, 42)}

tally: Counter = Counter()


class CountingShared(Shared):
    """Count the bytes, and the cycles: in each, 32 banks of 4 bytes serve the threads of at most 128 bytes."""

    def _places(self, site, on, address, size):
        group = np.unique(on // (32 if size <= 4 else 128 // size), return_inverse=True)[1]
        words = address.astype(np.int64)[:, None] // 4 + np.arange(-(-size // 4))
        found = np.unique(group[:, None] << 32 | words)  # threads that touch one word are served together
        banks = np.bincount((found >> 32) * 32 + found % 32, minlength=32 * (group.max(initial=-1) + 1))
        tally["shared bytes"] += len(on) * size
        tally["shared cycles"] += int(banks.reshape(-1, 32).max(1, initial=0).sum())
        tally["without conflicts"] += len(np.unique(group))
        return super()._places(site, on, address, size)


class CountingMemory(Memory):
    def _places(self, site, address, size, who):
        tally["global bytes"] += len(address) * size
        return super()._places(site, address, size, who)


class Counts(NamedTuple):
    """Hold the counts of one kernel or of several, per pair of query and key and per head."""

    instructions: float = 0.0  # of a thread
    mma: float = 0.0  # the same, of tensor cores; a warp multiplies 16 x 8 x 16 numbers at once
    exp2: float = 0.0
    shared: float = 0.0  # bytes
    cycles: float = 0.0  # of shared memory, times 32
    conflicts: float = 0.0  # those of them that conflicts of banks cost
    globally: float = 0.0  # bytes

    def clocks(self, gpu: str) -> float:
        """Return the clocks of an SM for 32 pairs, if its busiest part alone decided."""
        products, issued, exp2, shared, l2 = GPUS[gpu]
        return max(
            self.mma * 2048 / products, self.instructions / issued, 32 * self.exp2 / exp2, self.cycles * 128 / shared,
            32 * self.globally / l2,
        )  # fmt: skip


def counted(kernel, blocks: int, arguments: tuple, tile, pairs: int) -> Counts:
    """Run a kernel and return its counts."""
    tally.clear()
    opcodes = launch.launch(kernel, blocks, arguments, tile.warps, tile.stages)[1]
    of = lambda start: sum(n for opcode, n in opcodes.items() if opcode.startswith(start))  # noqa: E731
    cycles, least = tally["shared cycles"], tally["without conflicts"]
    found = (
        of(""),
        of("mma"),
        of("ex2"),
        tally["shared bytes"],
        32 * cycles,
        32 * (cycles - least),
        tally["global bytes"],
    )
    return Counts(*(n / pairs for n in found))


def passes(
    contender: str, place: int, heads: int, size: int, length: int = 256
) -> list[tuple[str, tuning.Tile, Counts]]:
    """Return the passes of a contender, forward and backward, with their tiles and counts; refuse wrong results."""
    like = Variant("softmax", heads, size, size, torch.float16, torch.device("cpu"))
    if contender in ("shared", "per query"):
        like = like._replace(mixing=torch.float16, mixing_dim=2 if contender == "shared" else 4)
    inputs, d_out = sample_call(like, length, length, batch=1)
    found: list[tuple[str, tuning.Tile, Counts]] = []

    def start(kernel, blocks, arguments, tile):
        found.append((kernel.fn.__name__, tile, counted(kernel, blocks, arguments, tile, heads * length**2)))

    machine.Shared, machine.Memory, operators.start = CountingShared, CountingMemory, start
    if contender == "FlashAttention-2":
        tiles = [tuning.tiles_for(f"flash_{name}_kernel", heads, size, 2) for name in ("fwd", "bwd_dq", "bwd_dkv")]
        results = flash_attention.run(*inputs[:3], d_out, inputs.scale, LOG2E.value, [t[0] for t in tiles], start)
    else:
        call = operators.Call(inputs, place)
        out, rows = call.forward()
        results = [out, *call.backward(d_out, rows, out)]
    fault = fault_in([compare(inputs, d_out, torch.ones(1), dict(zip(("output", *inputs.given()), results)))])
    assert not fault, f"{contender}: {fault}"
    return found


def table(shapes: list[str]) -> None:
    """Print the counts for shapes as 8x64 or 8x64x128: heads, their size, and positions.

    Nothing is hidden. 8x64/1 takes the second tiles of tuning.py.
    """
    columns = ("instr.", "mma", "exp2", "shared B", "cycles", "conflicts", "global B", *GPUS)
    print(f"{'':66}" + "".join(f"{name:>10}" for name in columns))
    for shape in shapes:
        size, _, place = shape.partition("/")
        for contender in CONTENDERS:
            found = passes(contender, int(place or 0), *map(int, size.split("x")))
            lines = [[*counts, *map(counts.clocks, GPUS)] for *_, counts in found]
            names = [f"{name} {'x'.join(map(str, tile))}" for name, tile, _ in found]
            for name, line in zip((*names, "all"), (*lines, [sum(column) for column in zip(*lines)])):
                print(f"{shape} {contender:16} {name:42}" + "".join(f"{n:10.2f}" for n in line), flush=True)
