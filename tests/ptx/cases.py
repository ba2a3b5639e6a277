"""Run the project's kernels, compiled for NVIDIA, in the emulator.

Judge them by `ops/accuracy.py`.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mixhead_plugin.ops import accuracy
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.sample_calls import CallKind, sample_call
from mixhead_plugin.ops.triton import calls, passes, programs, tuning
from mixhead_plugin.ops.triton.tuning import Tile
from tests.covering import pairwise
from tests.ptx import launch

TABLES = tuning.tiles_for
MIXING = {"none": 0, "shared": 2, "per query": 4}  # dimensions of M
HIDDEN = {
    "causal": {"causal": True},
    "padding": {"padding": True},
    "mask by head": {"mask_dtype": torch.float32, "mask_by": "head"},
    "mask": {"mask_dtype": torch.float32},
    "causal padding": {"causal": True, "padding": True},
    "nothing": {},
}
SMALL = ["4x16", "3x16"]  # heads and their size; in small tiles
AXES = {
    "mixing": [*MIXING],
    "normalizer": ["softmax", "sigsoftmax", "l2", "sigmoid"],
    "dtype": ["float16", "bfloat16", "float32"],
    "hidden": [*HIDDEN][:4],
    "extra": ["dropout", "sink", "plain"],
    "stages": [1, 2, 3],
    "shape": SMALL,
}
MORE = {  # with the tiles of tuning.py
    "dtype": [*AXES["dtype"], "tf32"],
    "hidden": [*HIDDEN],
    "shape": [*SMALL, "8x64", "16x64", "12x64", "32x16", "64x8", "8x128"],
}


class Case(NamedTuple):
    mixing: str = "none"
    normalizer: str = "softmax"
    dtype: str = "float16"
    hidden: str = "causal"
    extra: str = "plain"
    stages: int = 2  # 0: those of tuning.py
    shape: str = "4x16"
    place: int = 0  # of the tile in its list
    capability: int = 80
    queries: int = 37
    keys: int = 38  # one more than queries: a tile of keys that ends too early is noticed

    @property
    def name(self) -> str:
        return "/".join(str(value).replace(" ", "-") for value in self)

    def kind(self) -> CallKind:
        heads, size = map(int, self.shape.split("x"))
        dtype = getattr(torch, self.dtype.replace("tf32", "float32"))
        dims = MIXING[self.mixing]
        like = CallKind(
            self.normalizer,
            heads,
            size,
            size,
            dtype,
            torch.device("cpu"),
            dtype if dims else None,
            dims,
        )
        extra = {
            "dropout": self.extra == "dropout",
            "sink": self.extra == "sink" and self.normalizer != "sigmoid",
        }
        return like._replace(**HIDDEN[self.hidden], **extra, tf32=self.dtype == "tf32")

    def tiles(self, kernel: str, *size: int) -> list[Tile]:
        if self.shape not in SMALL:
            found = TABLES(kernel, *size)
            return [
                tile._replace(stages=self.stages or tile.stages)
                for tile in found[self.place :] or found[-1:]
            ]
        return [Tile(32, 32, 4, self.stages)]


def cover(axes: dict[str, list]) -> list[Case]:
    """Return cases in which every pair of values of two axes occurs."""
    rows = pairwise([len(values) for values in axes.values()])
    return [Case(*(values[i] for values, i in zip(axes.values(), row))) for row in rows]


def slow_cases() -> Iterator[Case]:
    """Yield cases of more values of the axes.

    They have capability 9.0 for small tiles, one head, many tiles and longer rows.
    """
    for n, case in enumerate(cover(AXES | MORE)):
        yield case._replace(
            place=n % 2, capability=90 if case.shape in SMALL else 80, queries=75, keys=83
        )
    yield Case("per query", hidden="causal padding", stages=1, shape="1x16")
    yield Case(
        "shared", hidden="causal padding", extra="dropout", shape="8x64", queries=512, keys=512
    )
    yield from (
        Case(mixing, hidden="nothing", stages=0, shape="8x64", queries=80, keys=96)
        for mixing in MIXING
    )
    # multiples of 16
    yield Case("per query", hidden="causal padding", extra="dropout", queries=64, keys=96)


def philox(seed: int, c: list) -> list:
    """Return four draws of 32 bits for each counter of four words.

    This is Philox 4x32 with 7 rounds (Salmon 2011).
    """
    mask = 0xFFFFFFFF
    k = [seed & mask, seed >> 32 & mask]
    for _ in range(7):
        high = c[0] * 0xD2511F53
        low = c[2] * 0xCD9E8D57
        c = [low >> 32 ^ c[1] ^ k[0], low & mask, high >> 32 ^ c[3] ^ k[1], high & mask]
        k = [k[0] + 0x9E3779B9 & mask, k[1] + 0xBB67AE85 & mask]
    return c


def kept_weights(inputs: AttentionInputs) -> Tensor:
    """Return the factors of dropout on the weights, [B, H, Nq, Nk].

    They come from their definition in triton.md.
    """
    if inputs.dropout_p == 0:
        return torch.ones(1)
    (batch, heads, n_queries, _), n_keys = inputs.query.shape, inputs.key.shape[2]
    rows, queries, keys = np.indices((batch * heads, n_queries, -(-n_keys // 4)), np.uint64)
    draws = np.stack(philox(int(inputs.seed), [keys, queries, rows, 0 * keys]), -1)
    draws = draws.reshape(batch, heads, n_queries, -1)[..., :n_keys]
    kept = torch.from_numpy((draws >= int(inputs.dropout_p * 2.0**32)).astype(np.float32))
    return kept / (1 - inputs.dropout_p)


def run(case: Case, interpreted: bool = False) -> dict:
    """Return a report of a case.

    It says what is wrong, its largest share of the bound, and the seconds of the emulator.
    """
    kind = case.kind()
    begin = time.process_time()
    inputs, d_out = sample_call(kind, case.queries, case.keys, 0.3)

    def start(kernel, blocks, arguments, tile) -> None:
        launch.launch(kernel, blocks, arguments, tile.warps, tile.stages, case.capability)

    torch.backends.cuda.matmul.allow_tf32 = kind.tf32
    tuning.tiles_for = case.tiles
    if not interpreted:
        programs.start = start
    call = calls.Call(inputs, 0, poison=True)
    out, statistics = passes.forward(call)
    found = {"output": out, **passes.backward(call, d_out, statistics, out)}
    seconds = time.process_time() - begin
    draws = [accuracy.compare(inputs, d_out, kept_weights(inputs), found)]
    # the formula is not rounded to the 10 bits of tf32 on a CPU
    most = 2.0**13 if kind.tf32 else 1.0
    share = float(np.max([*accuracy.shares(draws).values()])) / most
    return dict(case=case.name, fault=accuracy.fault_in(draws, most), share=share, seconds=seconds)
