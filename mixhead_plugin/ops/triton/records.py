"""Records that the host fills and the kernels read, in place of arguments one by one."""

from typing import Any, NamedTuple

from torch import Tensor


class Strided(NamedTuple):
    """Hold the pointer and the strides of a tensor [B, H, N, D]."""

    p: Any
    s_b: Any
    s_h: Any
    s_n: Any
    s_d: Any


class Masks(NamedTuple):
    """Hold what hides keys or adds to scores; a field is None where there is nothing.

    The strides of the mask stand here, because a record must not hold another one: triton 3.6 loses
    the constants of an inner record, as a stride of 1, where a loop begins.
    """

    mask: Any  # pointer, [B, H, Nq, Nk]
    s_b: Any
    s_h: Any
    s_n: Any
    s_d: Any
    padding: Any  # pointer to int32, contiguous [B, Nk]


class Dropout(NamedTuple):
    """Hold what dropout draws from, and which draws drop a weight."""

    seed: Any  # pointer
    threshold: Any  # a weight whose draw of 32 bits is below it is dropped
    gain: Any  # 1 / (1 - p)


class Constants(NamedTuple):
    """Hold what a kernel is compiled for.

    All are fields and none a property, because triton finds a compiled kernel again by the fields
    alone.
    """

    H: int  # heads
    D: int  # head size of queries and keys
    DP: int  # D padded for tensor cores
    DV: int  # head size of values
    DVP: int
    NORMALIZER: str
    CAUSAL: bool
    PRECISION: str  # of products in float32
    PER_QUERY: bool  # every query has its own mixing matrix
    HP: int  # heads that mix, padded for tensor cores
    BM: int = 0  # queries of a tile
    BN: int = 0  # keys of a tile


def strided(tensor: Tensor) -> Strided:
    return Strided(tensor, *tensor.stride())


def strided_mixing(mixing: Tensor) -> Strided:
    """Return M, [B, Nq, H, H] or [H, H], as [B, H, Nq, H]."""
    s_b, s_n, s_h, s_d = (0, 0, *mixing.stride())[-4:]
    return Strided(mixing, s_b, s_h, s_n, s_d)
