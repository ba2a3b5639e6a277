"""Arithmetic of PTX that numpy lacks, on arrays.

An array has one number for each thread, or a single one where all agree.
"""

import numpy as np

PRED, U8, U16, U32, U64 = (
    np.dtype(name) for name in ("bool", "uint8", "uint16", "uint32", "uint64")
)
S8, S16, S32, S64 = (np.dtype(name) for name in ("int8", "int16", "int32", "int64"))
F16, F32, F64 = (np.dtype(name) for name in ("float16", "float32", "float64"))
# A type of PTX is held as this type of numpy. bfloat16, tf32 and pairs of halves are held as their
# bits.
TYPES = {
    "pred": PRED,
    "b8": U8,
    "u8": U8,
    "s8": S8,
    "b16": U16,
    "u16": U16,
    "s16": S16,
    "b32": U32,
    "u32": U32,
}
TYPES |= {
    "s32": S32,
    "b64": U64,
    "u64": U64,
    "s64": S64,
    "f16": F16,
    "f32": F32,
    "f64": F64,
    "bf16": U16,
    "tf32": U32,
}
TYPES |= {"f16x2": U32, "bf16x2": U32}
BITS = {1: U8, 2: U16, 4: U32, 8: U64}
# What memory and registers hold before they are written: NaN in each format of floats, far outside
# as an address.
POISON = {PRED: True, U8: 0x7F, U16: 0x7FDE, U32: 0x7FDE7FDE, U64: 0x7FDE7FDE7FDE7FDE}


def flushed(x):
    """Replace subnormal numbers by zero of their sign (.ftz)."""
    return np.where(np.abs(x) < np.finfo(F32).tiny, np.copysign(F32.type(0), x), x)


def flushing(function):
    return lambda *numbers: flushed(function(*map(flushed, numbers)))


def fma(a, b, c):
    """Multiply and add with one rounding.

    float64 holds the product exactly, and its sum is rounded twice.
    """
    return (a.astype(F64) * b + c).astype(F32)


def to_bf16(x):
    """Round float32 to the nearest bfloat16, ties to even; return the bits."""
    bits = x.view(U32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(U16)


def from_bf16(x):
    return (x.astype(U32) << 16).view(F32)


def paired(convert):
    """Return a conversion of two numbers to the halves of a word, the first the upper one."""
    return lambda a, b: convert(a).view(U16).astype(U32) << 16 | convert(b).view(U16)


def wide(x):
    """Extend 32-bit integers to 64 bits, by their sign if they have one."""
    return x.astype(f"{x.dtype.kind}8")


def shifted(shift):
    """Return a shift, by as much as the width or more, too."""
    return lambda a, b: shift(a, np.minimum(b, 64).astype(a.dtype))


def truncated(x):
    """Convert floats to u32: round to zero, saturate, and make 0 of NaN."""
    return np.where(np.isnan(x), 0, np.clip(np.trunc(x.astype(F64)), 0, 2**32 - 1)).astype(U32)


def divide(a, b):
    """Divide 32-bit integers and round to zero; the result for a divisor of 0 is not defined."""
    x = a.astype(S64)
    y = np.where(b == 0, 1, b.astype(S64))
    return (np.abs(x) // np.abs(y) * np.sign(x) * np.sign(y)).astype(a.dtype)


def remainder(a, b):
    """Return what `divide` leaves; it has the sign of a."""
    return (a.astype(S64) - b.astype(S64) * divide(a, b).astype(S64)).astype(a.dtype)


def bit_field(a, first, length):
    """Return `length` bits of a from bit `first` on, extended.

    Beyond bit 31 there are zeros, or the sign of s32.
    """
    x = wide(a)
    rest = 64 - np.minimum(length & 255, 32)
    first = np.minimum(first & 255, 32).astype(x.dtype)
    rest = rest.astype(x.dtype)
    return (x >> first << rest >> rest).astype(a.dtype)


def permute(a, b, selector):
    """Pick four of the eight bytes of b:a by the nibbles of the selector.

    Bit 3 of a nibble spreads the byte's sign.
    """
    both = b.astype(U64) << 32 | a
    picked = 0
    for i in range(4):
        nibble = selector.astype(U64) >> 4 * i
        byte = both >> (nibble & 7) * 8 & 255
        byte = np.where(nibble & 8, (byte >> 7) * 255, byte)
        picked = picked | byte << 8 * i
    return picked.astype(U32)
