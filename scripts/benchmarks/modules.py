"""The multi-head attention: fairseq's against ours."""

import copy
from argparse import Namespace
from typing import Iterator, List

import torch
from torch import Tensor

from benchmarks.cases import Contender, Level, Row, Shape, triton_problem, unmeasured
from benchmarks.checks import must_be_right
from benchmarks.measuring import measure, rows_of

MIXINGS = {"no mixing": "none", "Mixhead A": "position-independent", "Mixhead B": "position-wise"}


def module_problem(impl: str, device: str, dtype: torch.dtype) -> str:
    """Why `impl` cannot be timed; empty if it can"""
    if impl != "triton":
        return ""
    return triton_problem(device) or (f"has no kernel for {dtype}" if dtype == torch.float64 else "")


def modules(shape: Shape, dropout_p: float, device: str, dtype: torch.dtype) -> Level:
    from fairseq.modules import MultiheadAttention

    from mixhead_plugin.modules.attention import MixheadAttention

    b, h, n, d = shape
    embed_dim = h * d
    torch.manual_seed(1)
    stock = MultiheadAttention(embed_dim, h, dropout=dropout_p, self_attention=True)
    attentions, reasons = {"fairseq": stock}, {}
    for label, head_mixing in MIXINGS.items():
        for impl in ("auto", "reference", "triton"):
            name = f"mixhead_plugin: {label}{'' if impl == 'auto' else f', {impl}'}"
            if reason := module_problem(impl, device, dtype):
                reasons[name] = reason
                continue
            attentions[name] = MixheadAttention(
                embed_dim, h, dropout=dropout_p, self_attention=True, head_mixing=head_mixing, impl=impl
            )
    x = torch.randn(n, b, embed_dim).to(device, dtype).requires_grad_()
    future = torch.full((n, n), float("-inf"), device=device, dtype=dtype).triu(1)

    def forward(module: torch.nn.Module, x: Tensor) -> Tensor:
        return module(x, x, x, attn_mask=future.to(x.dtype), need_weights=False)[0]

    def full(module: torch.nn.Module, x: Tensor) -> List[Tensor]:
        return torch.autograd.grad(forward(module, x).sum(), [x, *module.parameters()])

    def results(module: torch.nn.Module, x: Tensor) -> List[Tensor]:
        d_x, *d_parameters = full(module, x)
        # together, because some are nothing but rounding: a bias of the keys moves no softmax
        return [forward(module, x).detach(), d_x, torch.cat([d.flatten() for d in d_parameters])]

    contenders = {}
    for name, module in attentions.items():
        module.load_state_dict(stock.state_dict(), strict=False)
        shake(module)
        module.to(device, dtype).eval()
        # fairseq's own is compared to ours without mixing, of the same parameters
        formula = copy.deepcopy(module if module is not stock else attentions["mixhead_plugin: no mixing"])
        formula.load_state_dict(module.state_dict())
        formula.to(device, dtype).eval().impl = "reference"
        exact = copy.deepcopy(formula).double()
        parts = ["output", "gradient of x", "gradient of the parameters"]
        x64 = x.detach().double().requires_grad_()
        must_be_right(name, parts, results(module, x), results(formula, x), results(exact, x64))
        module.train()
        contenders[name] = Contender(lambda m=module: full(m, x), lambda m=module: forward(m, x))
    return Level(contenders, reasons)


def shake(model: torch.nn.Module) -> None:
    """Mixing starts as the identity, where a wrong one would not be noticed."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "head_mixing" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


def tables(options: Namespace) -> Iterator[List[Row]]:
    shape = Shape(max(1, options.tokens // 512), options.heads, 512, options.head_dim)
    contenders, reasons = modules(shape, options.dropout, options.device, getattr(torch, options.dtype))
    times = measure(contenders, options.rounds, options.device, "module")
    yield rows_of("module", shape, times, dict.fromkeys(contenders, "fairseq")) + unmeasured("module", shape, reasons)
