"""The parts `module` and `decoding`: the attention with its projections, a step of decoding."""

import functools
import importlib.util
import time
from collections.abc import Generator, Iterator

import torch
from torch import nn

from benchmarks import core
from benchmarks.gpu.settings import Settings, synchronize
from benchmarks.measure import Case, fault_of, measure
from benchmarks.steps import Row
from mixhead_plugin.ops import attention


def decoding(settings: Settings, step: str) -> Iterator[Row]:
    """Yield the time of one step of decoding.

    One query, 1,024 keys, 8 heads of 64, 16 sentences.
    """
    batch, heads, keys, head_dim = (2, 2, 16, 16) if settings.quick else (16, 8, 1024, 64)
    dtype = torch.bfloat16 if settings.device == "cuda" else torch.float32
    made = functools.partial(torch.randn, device=settings.device, dtype=dtype)
    query = made(batch, heads, 1, head_dim)
    key = made(batch, heads, keys, head_dim)
    value = made(batch, heads, keys, head_dim)
    mixings = {
        "softmax": None,
        "Mixhead A": made(heads, heads),
        "Mixhead B": made(batch, 1, heads, heads),
    }
    runs = {"torch": lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value)}
    for name, mixing in mixings.items():
        runs[name] = functools.partial(attention, query, key, value, mixing=mixing)
    repeats = 3 if settings.quick else 200
    with torch.no_grad():
        for name, run in runs.items():
            for _ in range(3):
                run()
            synchronize(settings)
            began = time.perf_counter()
            for _ in range(repeats):
                run()
            synchronize(settings)
            yield {"name": name, "microseconds": 1e6 * (time.perf_counter() - began) / repeats}


def module_steps(settings: Settings) -> list[str]:
    steps = ["torch"]
    if importlib.util.find_spec("fairseq") is not None:
        steps.append("fairseq")
    return steps


def module_step(settings: Settings, step: str) -> Iterator[Row]:
    """Yield the times of the attention with its projections, forward and backward pass."""
    size = (2, 2, 32, 16) if settings.quick else (8, 8, 2048, 64)
    dtype = "bfloat16" if settings.device == "cuda" else "float32"
    if step == "fairseq":
        from benchmarks import module

        case = module.case(size, True, 0.0, settings.device, dtype)
    else:
        case = yield from torch_module(size, settings.device, dtype)
    for row in measure(case, 2 if settings.quick else 15, settings.device):
        yield {"module": step, **{name: value for name, value in row.items() if name != "case"}}


def torch_module(size: core.Size, device: str, dtype: str) -> Generator[Row, None, Case]:
    """Return `nn.MultiheadAttention` and the plugin's, causal and without dropout.

    Yield what is wrong with the plugin's.

    A wrong one is timed, too: the allowed error is that of float32 inside, so it is a hint and not
    a law.
    """
    from mixhead_plugin.nn import MixedAttention

    batch, heads, length, head_dim = size
    torch.manual_seed(1)
    upstream = nn.MultiheadAttention(heads * head_dim, heads, batch_first=True)
    modules: dict[str, nn.Module] = {"torch": upstream}
    kinds = {"softmax": "none", "Mixhead A": "position-independent", "Mixhead B": "position-wise"}
    for name, mixing in kinds.items():
        modules[name] = MixedAttention(
            heads * head_dim, heads, batch_first=True, head_mixing=mixing
        )
        modules[name].load_state_dict(upstream.state_dict(), strict=False)
    own = {"device": device, "dtype": getattr(torch, dtype)}
    x = torch.randn(batch, length, heads * head_dim).to(**own).requires_grad_()
    future = torch.full((length, length), float("-inf"), **own).triu(1)

    def results(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = future.to(x.dtype)
        output = module(x, x, x, need_weights=False, attn_mask=mask, is_causal=True)[0]
        gradients = torch.autograd.grad(output.sum(), [x, *module.parameters()])
        return output.detach(), gradients[0]

    for name, module in modules.items():
        module.to(**own)
        if name == "torch":
            continue
        formula = MixedAttention(
            heads * head_dim, heads, batch_first=True, head_mixing=kinds[name], impl="reference"
        )
        formula.load_state_dict(module.state_dict())
        exact = formula.to(device, torch.float64)
        one = x.detach()[:1]
        right = results(exact, one.double().requires_grad_())
        rounded = results(formula.to(**own), one.clone().requires_grad_())
        got = results(module, one.clone().requires_grad_())
        fault = fault_of(name, ("output", "gradient of x"), got, rounded, right)
        if fault:
            yield {"module": "torch", "name": name, "fault": fault}
    runs = {name: functools.partial(results, module, x) for name, module in modules.items()}
    return Case("module", core.title(size, 0.0), runs, "softmax")
