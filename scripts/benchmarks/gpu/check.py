"""The part `check`: `mixhead check` for the variants that matter most."""

import time
from collections.abc import Iterator

import torch

from benchmarks.gpu.settings import Settings
from benchmarks.steps import Row
from mixhead_plugin.check.judging import judge
from mixhead_plugin.check.variants import DIMS_OF_MIXING, kinds_to_try
from mixhead_plugin.ops.sample_calls import CallKind
from mixhead_plugin.ops.triton import support

# Head sizes and variants that are timed below: what they compile here is found on disk there.
TIMED = [
    ("8x64", "softmax", "position-wise", "causal", "bfloat16"),
    ("8x64", "softmax", "position-independent", "causal", "bfloat16"),
    ("8x64", "softmax", "none", "causal", "bfloat16"),
    ("8x64", "softmax", "position-wise", "causal", "float16"),
    ("8x64", "softmax", "position-independent", "causal", "float16"),
    ("8x64", "softmax", "position-wise", "causal", "float32"),
    ("8x64", "softmax", "position-independent", "causal", "float32"),
    ("16x64", "softmax", "position-wise", "causal", "bfloat16"),
    ("16x64", "softmax", "position-independent", "causal", "bfloat16"),
    ("32x8", "softmax", "position-wise", "causal", "bfloat16"),
    ("32x8", "softmax", "position-independent", "causal", "bfloat16"),
    ("8x64", "sigsoftmax", "none", "causal", "bfloat16"),
    ("8x64", "l2", "none", "causal", "bfloat16"),
    ("8x64", "softmax", "none", "none", "bfloat16"),
    ("16x64", "softmax", "none", "causal", "bfloat16"),
    ("32x8", "softmax", "none", "causal", "bfloat16"),
]


REHEARSED = [
    ("2x16", "softmax", "position-wise", "causal", "float32"),
    ("2x16", "l2", "none", "none", "float32"),
]


def named_variants(settings: Settings) -> dict[str, tuple[dict[str, str], CallKind]]:
    """Return the variants to try by name, in order of worth.

    First those that are timed below, then pairs of all values.

    All of `mixhead check` would take hours, because every variant of the kernels is compiled.
    """
    listed = REHEARSED if settings.quick else TIMED
    device = torch.device(settings.device)
    every = {}
    for shape in dict.fromkeys(row[0] for row in listed):
        heads, head_dim = map(int, shape.split("x"))
        for names, kind in kinds_to_try(device, heads, head_dim):
            every[shape, *names.values()] = names, kind
    chosen = list(listed)
    if not settings.quick:
        shape = listed[0][0]
        by_kernels = {
            row: row[1] in support.KERNEL_NORMALIZERS and row[2] in DIMS_OF_MIXING for row in every
        }
        # Kernels first, then what torch alone computes, which compiles nothing.
        for served in (True, False):
            chosen += pairs([row for row in every if row[0] == shape and by_kernels[row] == served])
    return {" / ".join(row): every[row] for row in dict.fromkeys(chosen)}


def pairs(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return some of the rows, in which every pair of values occurs that occurs in all of them."""
    found = []
    missing = {pair for row in rows for pair in pairs_of(row)}
    while missing:
        best = max(rows, key=lambda row: len(missing & pairs_of(row)))
        missing -= pairs_of(best)
        found.append(best)
    return found


def pairs_of(row: tuple[str, ...]) -> set[tuple[int, str, int, str]]:
    return {(i, row[i], j, row[j]) for j in range(len(row)) for i in range(j)}


def check_steps(settings: Settings) -> list[str]:
    return list(named_variants(settings))


def check_step(settings: Settings, step: str) -> Iterator[Row]:
    """Yield the row of `mixhead check` for a variant, with the seconds of its first use."""
    names, kind = named_variants(settings)[step]
    torch.set_num_threads(1)
    began = time.monotonic()
    judged = judge(kind)
    heads = f"{kind.heads}x{kind.head_dim}"
    yield {"heads": heads, **names, **judged._asdict(), "seconds": time.monotonic() - began}
