"""Compile a triton kernel as its first launch on a GPU would, without a GPU, and run it.

It is compiled to PTX alone.
"""

import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import create_function_from_signature

from tests.ptx.machine import run
from tests.ptx.program import Program

SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes that one block may have, by compute capability
FORMATS = {
    "i1": "?",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u32": "I",
    "u64": "Q",
    "fp32": "f",
    "fp64": "d",
}


def prepare(
    kernel: Any, arguments: dict[str, Any], warps: int, stages: int, target: GPUTarget
) -> tuple:
    """Return what a first launch compiles, with which options, and its arguments.

    The arguments are pairs of type and value.
    """
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, kinds, given = bind(**arguments, num_warps=warps, num_stages=stages)
    options, signature, constants, attributes = kernel._pack_args(
        backend, given, bound, kinds, given
    )
    values = list(_flat(signature.values(), bound.values()))
    return ASTSource(kernel, signature, constants, attributes), options, values


def without_ptxas(*compiler: Any) -> tuple[str, str]:
    """Let triton's compiler end with PTX.

    It is the compiler's hook, for which it gives the backend and the stages, or asks a key.
    """
    if compiler:
        compiler[1]["cubin"] = lambda ptx, metadata: b""
    return "without ptxas", "without ptxas"


def _flat(kinds: Any, values: Any) -> Iterator[tuple[str, Any]]:
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(kind, value)
        elif kind != "constexpr":
            yield kind, value


def launch(
    kernel: Any, blocks: int, given: dict[str, Any], warps: int, stages: int, capability=80
) -> tuple[dict, Counter]:
    """Compile and run a kernel; return its texts, and how many threads executed each opcode."""
    target = GPUTarget("cuda", capability, 32)
    source, options, values = prepare(kernel, given, warps, stages, target)
    knobs.runtime.add_stages_inspection_hook = without_ptxas
    made = triton.compile(source, target=target, options=options.__dict__)
    assert not made.metadata.global_scratch_size and not made.metadata.profile_scratch_size
    if made.metadata.shared > SHARED[capability]:
        raise OutOfResources(made.metadata.shared, SHARED[capability], "shared memory")
    values = [
        v if kind.startswith("*") else struct.pack("<" + FORMATS[kind], v) for kind, v in values
    ]
    return made.asm, run(
        Program(made.asm["ptx"]), blocks, made.metadata.num_warps, made.metadata.shared, values
    )
