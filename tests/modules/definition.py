"""Define attention by its equations, in any dtype, and share helpers among the tests of modules."""

import copy
from typing import Dict, List, Optional

import torch

from mixhead_plugin import ops
from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.modules.synthesizer import SynthesizerAttention
from tests.helpers import shake

E, H, B, NQ, NK = 16, 4, 3, 5, 7
LONGEST = 10  # input of a synthesizer
OWN_SIZES = {"factorized-dense": 3, "factorized-random": 2}  # of synthesizers
KDIM = 12  # of the keys of encoder-decoder attention
# tests/ops has all of them: these need the largest score, the number of visible keys, and the length of a row
NORMALIZERS = ["softmax", "relu2", "l2"]

# Attentions that differ in where their keys are and in what their scores know of distances.
CROSS = {"encoder_decoder_attention": True, "kdim": KDIM, "vdim": KDIM}
RELATIVE = {"rotary": {"relative_position": "rotary"}, "t5": {"relative_position": "t5"}, "gain": {"relative_gain": 3}}
KINDS = {
    "self": {},
    **RELATIVE,
    "constant": {"add_bias_kv": True},
    "zero": {"add_zero_attn": True},
    "cross": CROSS,
}


def build(kind="self", mixing="none", normalizer="softmax", **options):
    """Build a module in evaluation mode; its parameters of mixing and distances are away from their start."""
    torch.manual_seed(3)
    options = {"self_attention": kind != "cross", "causal": kind != "cross", **KINDS[kind], **options}
    module = shake(MixheadAttention(E, H, head_mixing=mixing, normalizer=normalizer, **options))
    for child in (module.relative_position, module.relative_gain):
        for parameter in child.parameters() if child is not None else ():
            torch.nn.init.normal_(parameter)
    return module.eval()


def build_synthesizer(synthesizer, mixing="none", normalizer="softmax", **options):
    torch.manual_seed(5)
    options = {"head_mixing": mixing, "normalizer": normalizer, **options}
    return shake(SynthesizerAttention(E, H, LONGEST, synthesizer, OWN_SIZES.get(synthesizer), **options)).eval()


def inputs(kind="self", batch=B, dtype=torch.float32):
    """Return query and key [N, B, embed_dim], and the masks of the call."""
    query = torch.randn(NQ, batch, E, dtype=dtype)
    if kind != "cross":
        return query, query, {"attn_mask": future(dtype=dtype)}
    return query, torch.randn(NK, batch, KDIM, dtype=dtype), {"key_padding_mask": padding(batch), "static_kv": True}


def padding(batch=B, n_keys=NK):
    mask = torch.zeros(batch, n_keys, dtype=torch.bool)
    mask[1, -2:] = True
    mask[-1, -1:] = True
    return mask


def future(n=NQ, dtype=torch.float32):
    return torch.full((n, n), float("-inf"), dtype=dtype).triu(1)


def heads(x, number=H):
    """Reshape [N, B, H * D] to [B, H, N, D]."""
    return x.unflatten(2, (number, -1)).permute(1, 2, 0, 3)


def turned(x):
    """Rotate pairs of features, as complex numbers, by angles that grow with their position (RoPE)."""
    half = x.size(-1) // 2
    frequency = 10000.0 ** (-2 * torch.arange(half, dtype=torch.float64) / x.size(-1))
    angle = torch.arange(x.size(2))[:, None] * frequency
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag], -1).to(x.dtype)


def finish(module, scores, hidden, v, q):
    """Normalize scores [B, H, Nq, Nk], mix heads and project; return outputs and mixed weights [H, B, Nq, Nk]."""
    weights = ops.NORMALIZERS[module.normalizer].weights(scores.masked_fill(hidden, float("-inf")))
    n_queries, n_keys = scores.shape[2:]
    if module.relative_gain is not None:
        clip = module.relative_gain.clip
        offsets = torch.arange(n_keys) - torch.arange(n_keys - n_queries, n_keys)[:, None]  # key - query
        weights = weights * module.relative_gain.weight[:, offsets.clamp(-clip, clip) + clip]
    if module.head_mixing_kind == "position-wise":
        matrix = torch.einsum("bjtd,di->btji", q, module.head_mixing.query_weight) + module.head_mixing.bias
        weights = torch.einsum("btji,bjtk->bitk", matrix, weights)
    elif module.head_mixing is not None:
        weights = torch.einsum("ji,bjtk->bitk", module.head_mixing.weight, weights)
    out = torch.einsum("bhtk,bhkd->tbhd", weights, v)
    return module.out_proj(out.flatten(2)), weights.transpose(0, 1)


def definition(module, query, key, hidden):
    """Compute mixhead eqs 8-12 with relative positions; `hidden`, bool, is broadcastable to [B, H, Nq, Nk]."""
    q, k, v = heads(module.q_proj(query)), heads(module.k_proj(key)), heads(module.v_proj(key))
    products = turned(q) @ turned(k).mT if module.relative_position_kind == "rotary" else q @ k.mT
    scores = products * module.head_dim**-0.5
    if module.relative_position_kind == "t5":
        offsets = torch.arange(k.size(2)) - torch.arange(q.size(2))[:, None]
        scores = scores + module.relative_position.weight[module.relative_position.buckets(offsets)].permute(2, 0, 1)
    return finish(module, scores, hidden, v, q)


def check_half_precision(found, formula, module, tensors, dtype):
    """Assert that a module in half precision is at most twice as far from float64 as the formula in that dtype.

    Args:
        found, formula: called with the module and the tensors; both return the output
    """
    module, tensors = copy.deepcopy(module).to(dtype), [tensor.to(dtype) for tensor in tensors]
    exact = formula(copy.deepcopy(module).double(), *(tensor.double() for tensor in tensors))
    out = found(module, *tensors)
    assert out.dtype == dtype
    error, allowed = ((result.double() - exact).abs().max() for result in (out, formula(module, *tensors)))
    assert 0 < error <= 2 * allowed


def decode(module, x, key=None, state=None, **options):
    """Call the module with one query at a time, as beam search does; return the outputs and the state."""
    state, steps = {} if state is None else state, []
    for t in range(x.size(0)):
        k = x[t : t + 1] if key is None else key
        arguments = {"incremental_state": state, "need_weights": False, "static_kv": key is not None, **options}
        steps.append(module(x[t : t + 1], k, k, **arguments)[0])
    return torch.cat(steps), state


class StepByStep(torch.nn.Module):
    """Decode inside TorchScript, because only there its dictionaries can be changed in place."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor, key: Optional[torch.Tensor]):
        state: Dict[str, Dict[str, Optional[torch.Tensor]]] = {}
        steps: List[torch.Tensor] = []
        for t in range(x.size(0)):
            step = x[t : t + 1]
            k = step if key is None else key
            steps.append(
                self.attention(step, k, k, incremental_state=state, need_weights=False, static_kv=key is not None)[0]
            )
        return torch.cat(steps)
