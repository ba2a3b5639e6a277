"""Which calls `mixhead check` tries: `kinds_to_try` but for what NOT_TRIED names."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from mixhead_plugin.ops import NORMALIZERS
from mixhead_plugin.ops.sample_calls import CallKind

# The dimensions of M, of the mixings that also have a measured speed.
DIMS_OF_MIXING = {"none": 0, "position-independent": 2, "position-wise": 4}
# The fields of a `CallKind`. Where weights are mixed, `kinds_to_try` adds the dtype of the mixing.
MIXED: dict[str, dict[str, Any]] = {
    **{name: {"mixing_dim": dim} for name, dim in DIMS_OF_MIXING.items()},
    "low-rank": {"rank": 2},  # the factors of M
    # Into half as many heads, whose values have twice the size.
    "differential": {"mixing_dim": 4},
    "of scores, position-independent": {"score_mixing_dim": 2},
    "of scores, position-wise": {"score_mixing_dim": 4},
}
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "mask, padding": {"mask_dtype": torch.float32, "padding": True},
    "mask by head": {"mask_dtype": torch.float32, "mask_by": "head"},
    "sink, causal": {"sink": True, "causal": True},
}
# What no `CallKind` has, and so no variant. The tests of `ops` try it.
NOT_TRIED = (
    "scores of distances (--relative-position t5, Transformer-XL)",
    "gains of distances (--relative-gain)",
)


def kinds_to_try(
    device: torch.device, heads: int, head_dim: int
) -> Iterator[tuple[dict[str, str], CallKind]]:
    """Yield every kind of call by its names and as a record, but for those that NOT_TRIED names.

    Args:
        device: of the calls; on a GPU there is one more dtype
        heads: H; without the differential mixing where it is odd
        head_dim: D
    """
    dtypes = [torch.float32, torch.bfloat16]
    if device.type == "cuda":
        dtypes.append(torch.float16)
    for normalizer, mixing, mask, dtype in itertools.product(NORMALIZERS, MIXED, MASKS, dtypes):
        if mixing == "differential" and heads % 2:
            continue
        if MASKS[mask].get("sink") and not NORMALIZERS[normalizer].takes_sink:
            continue
        names = {
            "normalizer": normalizer,
            "mixing": mixing,
            "mask": mask,
            "dtype": str(dtype).removeprefix("torch."),
        }
        value_dim = head_dim
        fields = {**MIXED[mixing], **MASKS[mask]}
        if fields.get("mixing_dim") or fields.get("rank"):
            fields["mixing_dtype"] = dtype
        if mixing == "differential":
            value_dim = 2 * head_dim
            fields["mixed_heads"] = heads // 2
        yield names, CallKind(normalizer, heads, head_dim, value_dim, dtype, device, **fields)
