"""Which calls the kernels serve, on which machines; it is asked without importing triton."""

import importlib.util
import os
import re
from pathlib import Path

import torch

from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.transforms import while_traced

KERNEL_NORMALIZERS = ("softmax", "sigsoftmax", "l2", "sigmoid")
# The tensors that the kernels read, beside masks and seed. Of factors of M the matrix is built.
FACTORS = ("mixing_left", "mixing_right", "mixing_diagonal")
READ = ("query", "key", "value", "mixing", "sink", *FACTORS)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# triton's interpreter multiplies bfloat16 as integers.
INTERPRETED_DTYPES = (torch.float16, torch.float32)
MAX_HEAD_DIM = 256
MAX_HEADS = 64  # that mix
MIN_CAPABILITY = 8  # the major number of NVIDIA's compute capability
AMD = ("gfx90a", "gfx942", "gfx1100")  # the kernels compile for these and have not run there
MIN_VERSION = (3, 5)  # the oldest version that compiled the kernels
UNTRIED = "cannot be tried now"  # so begins a `trial_fault` that no trial has found


def _package_problem() -> str:
    """Return why the package triton cannot be used, without importing it."""
    spec = importlib.util.find_spec("triton")
    if spec is None:
        return "needs the package triton, which is not installed"
    version = _version_in(spec.origin)
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    if not numbers or tuple(numbers[:2]) >= MIN_VERSION:
        return ""
    oldest = ".".join(str(number) for number in MIN_VERSION)
    return f"needs triton {oldest} or newer, {version} is installed"


def _version_in(file: str | None) -> str:
    """Return the version that triton's __init__.py names, or an empty string.

    The metadata would have to be looked for under many names: pytorch-triton, triton-rocm,
    pytorch-triton-xpu, triton-windows and others.

    Args:
        file: the path of the __init__.py; None for a folder without one
    """
    if file is None:
        return ""
    text = Path(file).read_text(encoding="utf-8", errors="replace")
    found = re.search(r"""^__version__ = ['"](.+)['"]""", text, re.MULTILINE)
    return found[1] if found else ""


_PACKAGE_PROBLEM = _package_problem()  # at import, because torch.compile cannot trace it


def machine_problem() -> str:
    """Return why no kernel can run on the current device, in a few words; empty if one can.

    This initialises CUDA.
    """
    if _interpreted():
        return _PACKAGE_PROBLEM
    if not torch.cuda.is_available():
        return "needs a GPU of NVIDIA or AMD and none is visible"
    return _PACKAGE_PROBLEM or _device_problem("cuda", None)


def _interpreted() -> bool:
    """Return True where triton runs its kernels in Python on the CPU, as tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _device_problem(type_: str, index: int | None) -> str:
    """Return why no kernel can run on a device; empty if one can.

    Args:
        type_: type of the device, as in torch.device
        index: number of the device; None for the current one
    """
    if type_ == "cpu" and _interpreted():
        return ""
    if type_ != "cuda":
        return f"needs tensors on a CUDA device, not on {type_}"

    device = torch.cuda.get_device_properties(index)
    which = "the current one" if index is None else f"cuda:{index}"
    if torch.version.hip is not None:
        name = device.gcnArchName.partition(":")[0]  # without features, as in gfx90a:sramecc+
        if name in AMD:
            return ""
        return f"needs one of AMD's {', '.join(AMD)}, {which} is {name}"
    if device.major < MIN_CAPABILITY:
        return (
            f"needs a GPU of compute capability {MIN_CAPABILITY}.0, {which} has "
            f"{device.major}.{device.minor}"
        )
    return ""


def call_problem(inputs: AttentionInputs) -> str:
    """Return why the kernels cannot serve this call of `ops.attention`, or an empty string."""
    lacking = kind_problem(inputs)
    if lacking:
        return lacking
    dtype = inputs.query.dtype
    if _interpreted() and dtype not in INTERPRETED_DTYPES:
        return f"computes {dtype} wrongly under TRITON_INTERPRET=1"
    device = inputs.query.device
    return _device_problem(device.type, device.index)


def kind_problem(inputs: AttentionInputs) -> str:
    """Return why there is no kernel for such a call on any device, or an empty string."""
    query = inputs.query
    value = inputs.value
    heads = query.shape[1]
    head_dim = max(query.shape[3], value.shape[3])
    if inputs.normalizer not in KERNEL_NORMALIZERS:
        served = ", ".join(KERNEL_NORMALIZERS)
        return f"has no kernel for normalizer {inputs.normalizer!r}, only for {served}"
    if head_dim > MAX_HEAD_DIM:
        return f"has no kernel for head size {head_dim}, only up to {MAX_HEAD_DIM}"
    if inputs.mixes() and heads > MAX_HEADS:
        return f"mixes at most {MAX_HEADS} heads, not {heads}"
    for name in inputs.operands():
        if name not in READ:
            return f"has no kernel for {name.removesuffix('_query')}"  # relative_query is relative
    if value.shape[1] != heads:
        return f"mixes {heads} heads into as many, not into {value.shape[1]}"
    if query.dtype not in DTYPES:
        return f"has no kernel for {query.dtype}"
    if inputs.attn_mask is not None and inputs.attn_mask.requires_grad:
        return "gives a learned attn_mask no gradient"
    return ""


@while_traced
def allows_tf32() -> bool:
    """Return whether torch lets products of float32 use tf32."""
    matmul = torch.backends.cuda.matmul
    # Newer versions of torch have another switch, and raise when the old one is read after the new
    # one was set.
    if hasattr(matmul, "fp32_precision"):
        return matmul.fp32_precision == "tf32"
    return matmul.allow_tf32


def slower_than_blocks(inputs: AttentionInputs) -> bool:
    """Return whether `blockwise` is faster than the kernels.

    Without tf32 the kernels multiply float32 on CUDA cores. They took 1.5 (A) and 1.9 times (B) as
    long as `blockwise` on an H200 (triton.md, Limits).
    """
    return inputs.query.dtype == torch.float32 and not allows_tf32()


def trial_fault(inputs: AttentionInputs) -> str:
    """Return what the kernels do wrong here for such a call; empty if nothing (see `verify`)."""
    from mixhead_plugin.ops.triton import verify

    if _interpreted():  # a trial would take far longer than a call
        return ""
    return verify.trial_fault(inputs)
