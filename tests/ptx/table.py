"""The instructions: operands, meaning in the terms of the PTX ISA, and function.

Braces in an opcode stand for one of their words. Operands are results, a colon, sources: a type of
PTX, `T` for the last type in the opcode, `T*` for a vector of them or one alone, `parts` for one T
or equal parts of it, `int` for a number in the text, `address`. A function takes arrays over
threads. What it computes is written as a formula, which the tests evaluate. One that also needs the
machine has its name in quotes: it is a method, which takes the instruction, the lanes that take
part, and the sources.
"""

import itertools
import operator
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tests.ptx import numbers
from tests.ptx.numbers import F16, F32, TYPES, flushing


class Row(NamedTuple):
    results: list[str]
    sources: list[str]
    meaning: str
    function: Callable | str


TABLE: dict[str, Row] = {}


def row(opcodes: str, operands: str, meaning: str, function: Callable | str) -> None:
    parts = [part.split(",") for part in re.split(r"[{}]", opcodes)]
    for opcode in map("".join, itertools.product(*parts)):
        kind = next((part for part in reversed(opcode.split(".")) if part in TYPES), "none")
        results, sources = (re.sub(r"\bT\b", kind, side).split() for side in operands.split(":"))
        TABLE[opcode] = Row(results, sources, meaning, function)


# Integers and bits
row("add.{u16,s16,u32,s32,u64,s64,f32}", "T: T T", "a + b", np.add)
row("sub.{u16,s16,u32,s32,u64,s64,f32}", "T: T T", "a - b", np.subtract)
row("mul.{lo.s16,lo.u32,lo.s32,lo.s64,f32}", "T: T T", "a * b", np.multiply)
row(
    "mul.hi.{u32,s32}",
    "T: T T",
    "a * b >> 32",
    lambda a, b: (numbers.wide(a) * b >> 32).astype(a.dtype),
)
for kind in ("u", "s"):
    row(f"mul.wide.{kind}32", f"{kind}64: T T", "a * b", lambda a, b: numbers.wide(a) * b)
    row(
        f"mad.wide.{kind}32",
        f"{kind}64: T T {kind}64",
        "a * b + c",
        lambda a, b, c: numbers.wide(a) * b + c,
    )
row("mad.lo.{u32,s32,u64,s64}", "T: T T T", "a * b + c", lambda a, b, c: a * b + c)
row("div.{u32,s32}", "T: T T", "quotient(a, b)", numbers.divide)
row("rem.{u32,s32}", "T: T T", "remainder(a, b)", numbers.remainder)
row("min.{u32,s32,u64,s64}", "T: T T", "min(a, b)", np.minimum)
row("max.{u32,s32,u64,s64}", "T: T T", "max(a, b)", np.maximum)
row("max.relu.s32", "T: T T", "max(a, b, 0)", lambda a, b: np.maximum(np.maximum(a, b), 0))
row("neg.{s32,s64,f32}", "T: T", "-a", np.negative)
for name, sign in {"and": "&", "or": "|", "xor": "^"}.items():
    row(f"{name}.{{pred,b16,b32,b64}}", "T: T T", f"a {sign} b", getattr(np, f"bitwise_{name}"))
row("not.{pred,b16,b32,b64}", "T: T", "~a", np.invert)
row("shl.{b16,b32,b64}", "T: T u32", "a << b", numbers.shifted(np.left_shift))
row("shr.{u16,s16,u32,s32,u64,s64}", "T: T u32", "a >> b", numbers.shifted(np.right_shift))
row("bfe.u32", "T: T u32 u32", "field(a, b, c, False)", numbers.bit_field)
row("bfe.s32", "T: T u32 u32", "field(a, b, c, True)", numbers.bit_field)
row("prmt.b32", "T: T T T", "permuted(a, b, c)", numbers.permute)

# Floats
row("fma.rn.f32", "T: T T T", "fused(a, b, c)", numbers.fma)
row("fma.rn.ftz.f32", "T: T T T", "fused(a, b, c)", flushing(numbers.fma))
row("div.full.f32", "T: T T", "quotient(a, b)", np.divide)  # within 2 ulp, as the next two
row("sqrt.approx.ftz.f32", "T: T", "sqrt(a) if a >= 0 else nan", flushing(np.sqrt))
row("ex2.approx.ftz.f32", "T: T", "2.0**a if a < 128 else inf if a > 0 else a", flushing(np.exp2))
row("min.f32", "T: T T", "b if a != a else a if b != b else min(a, b)", np.fmin)
row("max.f32", "T: T T", "b if a != a else a if b != b else max(a, b)", np.fmax)
row("min.NaN.f32", "T: T T", "nan if a != a or b != b else min(a, b)", np.minimum)
row("max.NaN.f32", "T: T T", "nan if a != a or b != b else max(a, b)", np.maximum)
row("abs.f32", "T: T", "abs(a)", np.abs)

# Comparisons
for name, sign in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    row(
        f"setp.{name}.{{s16,u16,s32,u32,s64,u64}}",
        "pred: T T",
        f"a {sign} b",
        getattr(operator, name),
    )
    row(
        f"setp.{name.replace('ne', 'neu')}.f32", "pred: T T", f"a {sign} b", getattr(operator, name)
    )
row("setp.eq.{b16,b32,b64}", "pred: T T", "a == b", np.equal)
row("setp.ne.{b16,b32,b64}", "pred: T T", "a != b", np.not_equal)
row(
    "selp.{b16,b32,b64,u16,u32,s32,f32}",
    "T: T T pred",
    "a if c else b",
    lambda a, b, c: np.where(c, a, b),
)

# Moves and conversions
row(
    "mov.{pred,b16,u16,b32,u32,s32,f32,b64,u64}",
    "parts: parts",
    "a copy; parts lie from the lowest on",
    "move",
)
for to, source in itertools.permutations(("u16", "u32", "s32", "u64", "s64"), 2):
    row(f"cvt.{to}.{source}", f"{to}: {source}", "a", lambda a, to=TYPES[to]: a.astype(to))
row("cvt.f32.f16", "f32: f16", "a", lambda a: a.astype(F32))
row("cvt.f32.bf16", "f32: bf16", "a", numbers.from_bf16)
row("cvt.rn.f16.f32", "f16: f32", "a", lambda a: a.astype(F16))
row("cvt.rn.bf16.f32", "bf16: f32", "a", numbers.to_bf16)
row("cvt.rn.f16x2.f32", "f16x2: f32 f32", "a above b", numbers.paired(lambda a: a.astype(F16)))
row("cvt.rn.bf16x2.f32", "bf16x2: f32 f32", "a above b", numbers.paired(numbers.to_bf16))
row("cvt.rn.f32.{u32,s32}", "f32: T", "a", lambda a: a.astype(F32))
row("cvt.rzi.u32.f32", "u32: f32", "0 if a != a else min(max(a, 0), 2**32 - 1)", numbers.truncated)

# Memory
row("ld.param.{b8,b16,b32,u32,s32,b64,u64,f32}", "T*: address", "an argument", "load_parameter")
for form in ("{,.v2,.v4}.{b8,b16,b32}", "{,.v2}.b64"):
    row(f"ld.{{global,shared}}{form}", "T*: address", "aligned to its size", "load")
    row(f"st.global{form}", ": address T*", "aligned to its size", "memory.store")
    row(f"st.shared{form}", ": address T*", "aligned to its size", "shared.store")
MATRICES = "matrix.sync.aligned.m8n8.{x1,x2,x4}{,.trans}.shared.b16"
row(f"ld{MATRICES}", "b32*: address", "rows of 8 x 8 matrices", "load_matrices")
row(f"st{MATRICES}", ": address b32*", "rows of 8 x 8 matrices", "store_matrices")
row(
    "cp.async.{ca,cg}.shared.global",
    ": address address int u32?",
    "a copy; zeros from byte d on",
    "copy_async",
)
row("cp.async.commit_group", ":", "the copies since the last one are a group", "shared.commit")
row(
    "cp.async.wait_group",
    ": int",
    "wait until at most so many groups of a thread are left",
    "shared.wait",
)

# Warps and tensor cores
row("shfl.sync.{bfly,idx}.b32", "T: T u32 u32 u32", "a of another lane", "shuffle")
row("redux.sync.{min,max,add}.{u32,s32}", "T: T u32", "over the lanes of the warp", "reduce")
row(
    "mma.sync.aligned.m16n8k16.row.col.f32.{f16.f16,bf16.bf16}.f32",
    "f32*: b32* b32* f32*",
    "D = A B + C",
    "multiply",
)
row(
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
    "f32*: b32* b32* f32*",
    "D = A B + C",
    "multiply",
)

# Control
row("bra{,.uni}", ": label", "go on there", "branch")
row("{ret,exit}", ":", "end the thread", "end")
row("bar.sync", ": int", "wait for all threads of the block", "barrier")
row("bar.warp.sync", ": u32", "wait for the lanes of a warp", "whole_warps")
CONTROL = {"branch", "end", "barrier"}
