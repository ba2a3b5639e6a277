"""The parts `tiles` and `tile_compile`: the kernels with more tiles than tuning.py lists."""

import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.kernels import REHEARSED_KERNELS, Launch, launches, measured
from benchmarks.gpu.settings import Settings
from benchmarks.steps import Row

SLICES = 4  # processes that compile the tiles of a kernel


def more_tiles(launch: Launch) -> list[Any]:
    """Return tiles around those of tuning.py: all sizes that may fit the registers."""
    first = launch.tiles[0]
    if launch.kernel in ("mix_kernel", "mixed_bwd_ds_kernel", "mixed_bwd_dm_kernel"):
        axes = ((1, 4, 16), (64, 128), (1, 2, 4), (2, 3, 4))
    else:
        axes = ((64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4))
    found = []
    for bm, bn, warps, stages in itertools.product(*axes):
        found.append(first._replace(BM=bm, BN=bn, warps=warps, stages=stages))
    return list(dict.fromkeys([*launch.tiles, *found]))


def tile_cases(settings: Settings) -> dict[str, list[str]]:
    """Return the kernels of each case."""
    mixed = [
        "mixed_weights_kernel",
        "mix_kernel",
        "product_over_keys_kernel",
        "mixed_bwd_dw_kernel",
        "mixed_bwd_dm_kernel",
        "mixed_bwd_ds_kernel",
        "product_over_queries_kernel",
    ]
    flash = ["flash_fwd_kernel", "flash_bwd_dq_kernel", "flash_bwd_dkv_kernel"]
    if settings.quick:
        return dict.fromkeys(REHEARSED_KERNELS, mixed[:1])
    return {
        "8x8x2048x64 bfloat16 B": mixed,
        "8x8x2048x64 bfloat16 A": mixed,
        "8x8x2048x64 bfloat16 softmax": flash,
    }


def tile_steps(settings: Settings) -> list[str]:
    return [
        f"{case} | {kernel}" for case, kernels in tile_cases(settings).items() for kernel in kernels
    ]


def tile_compile_steps(settings: Settings) -> list[str]:
    return [f"{step} | {i}" for step in tile_steps(settings) for i in range(SLICES)]


def tile_step(settings: Settings, step: str) -> Iterator[Row]:
    """Yield time and resources of a kernel with many tiles."""
    case, kernel = step.split(" | ")
    launch = next(one for one in launches(settings, case) if one.kernel == kernel)
    for tile in more_tiles(launch)[: 3 if settings.quick else None]:
        yield {"case": case, **measured(settings, launch, tile)}


def tile_compile_step(settings: Settings, step: str) -> Iterator[Row]:
    """Compile a share of the tiles of `tile_step`; yield those that fail.

    `tile_step` then finds them on disk.
    """
    case, kernel, place = step.split(" | ")
    launch = next(one for one in launches(settings, case) if one.kernel == kernel)
    for tile in more_tiles(launch)[int(place) :: SLICES][: 1 if settings.quick else None]:
        row = measured(settings, launch, tile, timed=False)
        if "fault" in row:
            yield {"case": case, **row}
