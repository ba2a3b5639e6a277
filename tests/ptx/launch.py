"""Compile a triton kernel as its first launch on a GPU would, but to PTX alone and without a GPU; run it."""

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_manager
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import create_function_from_signature

from tests.ptx.machine import run
from tests.ptx.program import Program

SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes that one block may have, by compute capability
FORMATS = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d"}


def prepare(kernel: Any, arguments: tuple[Any, ...], warps: int, stages: int, target: GPUTarget) -> tuple:
    """Return what a first launch compiles (source, backend, options), and its arguments as pairs of type and value."""
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, kinds, given = bind(*arguments, num_warps=warps, num_stages=stages)
    options, signature, constants, attributes = kernel._pack_args(backend, given, bound, kinds, given)
    values = list(_flat(signature.values(), bound.values()))
    return ASTSource(kernel, signature, constants, attributes), backend, options, values


def lower(source: Any, backend: Any, options: Any, target: GPUTarget, *names: str) -> tuple[dict, dict]:
    """Return the text after each of the first stages of the compiler, and the metadata."""
    context, stages, texts = ir.context(), {}, {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, *functions, context)
    metadata = {"target": target, **options.__dict__}
    backend.add_stages(stages, options, source.language)
    for name in names:
        module = stages[name](module, metadata)
        texts[name] = str(module)
    return texts, metadata


def _flat(kinds: Any, values: Any) -> Iterator[tuple[str, Any]]:
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(kind, value)
        elif kind != "constexpr":
            yield kind, value


def launch(
    kernel: Any, blocks: int, arguments: tuple[Any, ...], warps: int, stages: int, capability: int = 80
) -> tuple[dict, Counter]:
    """Compile and run a kernel; return its texts, and how many threads executed each opcode."""
    target = GPUTarget("cuda", capability, 32)
    source, backend, options, values = prepare(kernel, arguments, warps, stages, target)
    name = f"{triton.__version__} {source.hash()} {backend.hash()} {options.hash()}"
    cache = get_cache_manager(hashlib.sha256(name.encode()).hexdigest())
    path = cache.get_file("ptx.json")
    if path is None:
        texts, made = lower(source, backend, options, target, "ttir", "ttgir", "llir", "ptx")
        assert not made.get("global_scratch_size") and not made.get("profile_scratch_size")
        path = cache.put(json.dumps(texts | {key: made[key] for key in ("shared", "num_warps")}), "ptx.json", False)
    made = json.loads(Path(path).read_text())
    if made["shared"] > SHARED[capability]:
        raise OutOfResources(made["shared"], SHARED[capability], "shared memory")
    given = [v if kind.startswith("*") else struct.pack("<" + FORMATS[kind], v) for kind, v in values]
    return made, run(Program(made["ptx"]), blocks, made["num_warps"], made["shared"], given)
