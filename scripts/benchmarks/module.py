"""Benchmark the multi-head attention with its projections, fairseq's and the plugin's.

Forward and backward pass.
"""

import copy
import functools
from collections.abc import Mapping, Sequence

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor

from benchmarks.core import Size, title
from benchmarks.measure import Case, end_if_wrong, fault_of, shake
from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.ops import NORMALIZERS
from mixhead_plugin.parts import PARTS

Variants = Mapping[str, Mapping[str, str]]  # options of the attention, by name
MIXHEAD = {
    "softmax": {},
    "Mixhead A": {"head_mixing": "position-independent"},
    "Mixhead B": {"head_mixing": "position-wise"},
}
RESULTS = ("output", "gradient of x", "gradient of the parameters")


def every_variant() -> Variants:
    """Return each row of each table as a variant of its own, softmax first."""
    found: dict[str, dict[str, str]] = {"softmax": {}}
    for name in NORMALIZERS:
        if name != "softmax":
            found[name] = {"normalizer": name}
    for option, table in PARTS.items():
        for name, kind in table.items():
            if kind.build is not None:
                found[f"{option} {name}"] = {option: name}
    return found


def case(
    size: Size, causal: bool, dropout: float, device: str, dtype: str, variants: Variants = MIXHEAD
) -> Case:
    """Return the checked contenders.

    If not causal, the sentences have half to all of the length, and padding.
    """
    batch, heads, length, head_dim = size
    torch.manual_seed(1)
    upstream = MultiheadAttention(heads * head_dim, heads, dropout=dropout, self_attention=True)
    modules: dict[str, torch.nn.Module] = {"fairseq": upstream}
    for name, options in variants.items():
        own = MixheadAttention(
            heads * head_dim, heads, dropout=dropout, self_attention=True, causal=causal, **options
        )
        own.load_state_dict(upstream.state_dict(), strict=False)
        shake(own)
        modules[name] = own
    for module in modules.values():
        module.to(device, getattr(torch, dtype)).eval()
    # [N, B, E]
    x = (
        torch.randn(length, batch, heads * head_dim)
        .to(device, getattr(torch, dtype))
        .requires_grad_()
    )
    lengths = torch.linspace((length + 1) // 2, length, batch, device=device).round()
    padding = None if causal else torch.arange(length, device=device) >= lengths[:, None]  # [B, N]
    future = torch.full((length, length), float("-inf"), device=device).triu(1) if causal else None

    def results(module: torch.nn.Module, x: Tensor) -> Sequence[Tensor]:
        mask = None if future is None else future.to(x.dtype)
        output = module(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=False)[0]
        d_x, *gradients = torch.autograd.grad(output.sum(), [x, *module.parameters()])
        # in one tensor, because some are only rounding: a bias of the keys does not change softmax
        return output.detach(), d_x, torch.cat([gradient.flatten() for gradient in gradients])

    for name, module in modules.items():
        reference = copy.deepcopy(modules["softmax"] if module is upstream else module)
        reference.impl = "reference"
        exact = copy.deepcopy(reference).double()
        x64 = x.detach().double().requires_grad_()
        end_if_wrong(
            fault_of(name, RESULTS, results(module, x), results(reference, x), results(exact, x64))
        )
    contenders = {
        name: functools.partial(results, module.train(), x) for name, module in modules.items()
    }
    shown = f"{title(size, dropout)}, {'causal' if causal else 'padded'}"
    return Case("module", shown, contenders, "softmax")
