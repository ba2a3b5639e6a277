"""The attention alone, from queries, keys and values, by every provider."""

import functools
from argparse import Namespace
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from benchmarks.cases import Contender, Row, Shape, one_line, triton_problem, unmeasured
from benchmarks.checks import exact_causal, must_be_right, must_be_zero, sentences_to_check
from benchmarks.measuring import measure, rows_of
from mixhead_plugin.ops import NORMALIZERS, attention

PROVIDERS = {
    "torch": "torch's scaled_dot_product_attention, by what it chooses",
    "flash": "the same, by FlashAttention",
    "eager": "the formula in PyTorch",
    "compiled": "the formula through torch.compile",
    "flex": "torch's FlexAttention",
    "mixhead_plugin": "mixhead_plugin, by what it chooses",
    "blockwise": "mixhead_plugin, by blocks of queries",
    "triton": "mixhead_plugin, by fused kernels",
}
VARIANTS = [*((name, "none") for name in ("softmax", "sigsoftmax", "l2")), ("softmax", "A"), ("softmax", "B")]
_HALF = ("float16", "bfloat16")


class Core(NamedTuple):
    """One kind of attention."""

    provider: str  # a key of PROVIDERS
    normalizer: str = "softmax"
    mixing: str = "none"  # or A, B
    dropout_p: float = 0.0
    causal_flag: bool = False  # torch alone: is_causal instead of the mask

    @property
    def name(self) -> str:
        variant = self.normalizer if self.mixing == "none" else f"Mixhead {self.mixing}"
        flag = ", is_causal" if self.causal_flag else ""
        dropout = f", dropout {self.dropout_p}" if self.dropout_p else ""
        return f"{self.provider}: {variant}{flag}{dropout}"


def cores(dropout_p: float) -> List[Core]:
    found = [Core("torch"), Core("torch", causal_flag=True)]
    for provider in ("eager", "mixhead_plugin"):
        found += [Core(provider, *variant) for variant in VARIANTS]
    found += [Core("torch", dropout_p=dropout_p)]
    for provider in ("eager", "mixhead_plugin"):
        found += [Core(provider, mixing=mixing, dropout_p=dropout_p) for mixing in ("none", "A", "B")]
    found += [Core("flash", causal_flag=True, dropout_p=p) for p in (0.0, dropout_p)]
    for provider in ("compiled", "flex", "triton"):
        found += [Core(provider, *variant) for variant in VARIANTS]
    for provider in ("compiled", "triton"):
        found += [Core(provider, mixing=mixing, dropout_p=dropout_p) for mixing in "AB"]
    return found


def problem(core: Core, device: str, dtype: str) -> str:
    """Why it cannot be timed on this machine; empty if it can."""
    if core.provider == "flex" and core.mixing != "none":
        return "a score_mod sees one head at a time"
    if core.provider == "triton":
        return triton_problem(device)
    if core.provider == "flash" and device == "cuda" and dtype not in _HALF:
        return f"has no kernel for {dtype}"
    if device == "cpu":
        return {
            "flash": "needs --device cuda; on a CPU it is torch's choice with is_causal anyway",
            "compiled": "needs --device cuda; for a CPU it would compile for minutes",
            "flex": "needs --device cuda; on a CPU it has no backward pass",
        }.get(core.provider, "")
    return ""


def baseline(core: Core, device: str = "cpu", dtype: str = "float32") -> Core:
    """What a contender is measured by"""
    if device == "cuda" and dtype in _HALF:
        return Core("flash", causal_flag=True, dropout_p=core.dropout_p)
    return Core("torch", dropout_p=core.dropout_p)


def eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Optional[Tensor],
    normalizer: str,
    mask: Tensor,
    dropout_p: float,
) -> Tensor:
    """The formula as one would write it, in the dtype of its inputs."""
    scores = query @ key.transpose(2, 3) * query.shape[3] ** -0.5 + mask  # [B, H, N, N]
    weights = torch.softmax(scores, -1) if normalizer == "softmax" else NORMALIZERS[normalizer].weights(scores)
    if mixing is not None:
        pattern = "bjqk,ji->biqk" if mixing.dim() == 2 else "bjqk,bqji->biqk"
        weights = torch.einsum(pattern, weights, mixing)
    return F.dropout(weights, dropout_p) @ value


@functools.lru_cache(None)
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.config.recompile_limit = 256  # one for each shape and variant
    return torch.compile(function, dynamic=False, fullgraph=True)  # whole or not at all: no part of it runs as it is


@functools.lru_cache(None)
def causal_blocks(length: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(_is_past, None, None, length, length, device=device)


def _is_past(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def _sigsoftmax(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - F.softplus(-score)  # + logsigmoid(score), whose operator has two results, one of them empty on a GPU


def flex(query: Tensor, key: Tensor, value: Tensor, normalizer: str) -> Tensor:
    """Causal attention by FlexAttention, run as it is meant to be: compiled"""
    from torch.nn.attention.flex_attention import flex_attention

    run = compiled(flex_attention) if query.is_cuda else flex_attention
    blocks = causal_blocks(query.shape[2], query.device.type)
    if normalizer == "sigsoftmax":
        return run(query, key, value, score_mod=_sigsoftmax, block_mask=blocks)
    if normalizer == "softmax":
        return run(query, key, value, block_mask=blocks)
    # exp(s) / sqrt(sum exp(2s)) is the softmax times exp(log sum exp(s) - log sum exp(2s) / 2)
    out, of_sum = _with_lse(run, query, key, value, blocks)
    # For the sums alone no values would do, but 16 numbers of each are the least that it multiplies.
    _, of_squares = _with_lse(run, 2 * query, key, value.detach()[..., :16], blocks)
    return out * torch.exp(of_sum - of_squares / 2)[..., None].to(out.dtype)


def _with_lse(run: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, blocks: Any) -> Tuple[Tensor, Tensor]:
    """The softmax attention [B, H, N, D], and the natural logarithm of its sums [B, H, N]"""
    from torch.nn.attention import flex_attention as module

    if not hasattr(module, "AuxRequest"):  # torch < 2.9
        return run(query, key, value, block_mask=blocks, return_lse=True)
    out, aux = run(query, key, value, block_mask=blocks, return_aux=module.AuxRequest(lse=True))
    return out, aux.lse


class CoreInputs:
    def __init__(self, shape: Shape, device: str, dtype: torch.dtype, with_mask: bool = True):
        b, h, n, d = shape
        generator = torch.Generator().manual_seed(1)

        def randn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64)

        tensors = {name: randn(b, h, n, d) for name in ("query", "key", "value")}
        tensors["A"] = torch.eye(h, dtype=torch.float64) + 0.1 * randn(h, h)
        tensors["B"] = torch.eye(h, dtype=torch.float64) + 0.1 * randn(b, n, h, h)
        self.tensors = {name: t.to(device, dtype).requires_grad_() for name, t in tensors.items()}
        self.d_output = randn(b, h, n, d).to(device, dtype)
        self.future = torch.full((n, n), float("-inf"), device=device, dtype=dtype).triu(1) if with_mask else None
        self.sentences = sentences_to_check(b, h, n)
        self.known: Dict[Tuple[str, str], Tuple[List[Tensor], List[Tensor]]] = {}

    def of(self, core: Core) -> List[Tensor]:
        names = ["query", "key", "value", *([core.mixing] if core.mixing != "none" else [])]
        return [self.tensors[name] for name in names]

    def run(self, core: Core) -> Tensor:
        """The output of the attention [B, H, N, D]"""
        query, key, value, mixing = (*self.of(core), None)[:4]
        if core.provider in ("eager", "compiled"):
            formula = compiled(eager) if core.provider == "compiled" else eager
            return formula(query, key, value, mixing, core.normalizer, self.future, core.dropout_p)
        if core.provider == "flash":
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(query, key, value, None, core.dropout_p, is_causal=True)
        if core.provider == "flex":
            return flex(query, key, value, core.normalizer)
        if core.provider == "torch":
            mask = None if core.causal_flag else self.future
            return F.scaled_dot_product_attention(query, key, value, mask, core.dropout_p, is_causal=core.causal_flag)
        options = dict(normalizer=core.normalizer, mixing=mixing, causal=True, dropout_p=core.dropout_p)
        if core.provider != "mixhead_plugin":
            options["impl"] = core.provider
        return attention(query, key, value, **options)

    def with_gradients(self, core: Core, d_output: Optional[Tensor] = None) -> List[Tensor]:
        out = self.run(core)
        d_output = self.d_output if d_output is None else d_output
        return [out.detach(), *torch.autograd.grad(out, self.of(core), d_output)]

    def contender(self, core: Core) -> Contender:
        return Contender(lambda: self.with_gradients(core), lambda: self.run(core))

    def check(self, core: Core) -> None:
        """Run at full size, and compare all heads and queries of the sentences that are checked with float64.

        The output of the other sentences has no gradient here, so theirs are 0, and the sum over the batch that is the
        gradient of a shared mixing is known too.
        """
        names = ["output", *(f"gradient of {name}" for name in ("query", "key", "value", "the mixing"))]
        d_output = torch.zeros_like(self.d_output)
        d_output[self.sentences] = self.d_output[self.sentences]
        got = self.with_gradients(core._replace(dropout_p=0.0), d_output)
        others = [b for b in range(len(d_output)) if b not in self.sentences]
        per_sentence = [g.dim() == 4 for g in got]  # all but the gradient of the mixing [H, H]
        if others:
            must_be_zero(core.name, names[1:], [g[others] for g, is_ in zip(got[1:], per_sentence[1:]) if is_])
        formula, exact = self._expected(core)
        must_be_right(
            core.name, names, [g[self.sentences] if is_ else g for g, is_ in zip(got, per_sentence)], formula, exact
        )

    def _expected(self, core: Core) -> Tuple[List[Tensor], List[Tensor]]:
        """Output and gradients for the sentences to check, by the formula in the same dtype and in float64"""
        key = (core.normalizer, core.mixing)
        if key not in self.known:
            d_output = self.d_output[self.sentences]
            tensors = [t.detach()[self.sentences] if t.dim() == 4 else t.detach() for t in self.of(core)]
            leaves = [t.requires_grad_() for t in tensors]
            out = eager(*(*leaves, None)[:4], core.normalizer, self.future, 0.0)
            formula = [out.detach(), *torch.autograd.grad(out, leaves, d_output)]
            del out
            self.known[key] = formula, exact_causal(eager, tensors, core.normalizer, d_output)
        return self.known[key]


def refusal(inputs: CoreInputs, core: Core) -> str:
    """Why it does not run at this size, although nothing is wrong; empty if it runs and was checked."""
    try:
        inputs.check(core)
        if core.dropout_p:
            inputs.with_gradients(core)  # checked without it
    except torch.OutOfMemoryError as error:
        reason = one_line(error)
    except RuntimeError as error:  # `ops.attention` says that an implementation does not serve, torch that flash does
        if not str(error).startswith("impl '") and core.provider != "flash":
            raise
        reason = one_line(error)
    else:
        return ""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # here, where the error no longer holds what it was raised among
    return reason


def tables(options: Namespace) -> Iterator[List[Row]]:
    for length in options.lengths:
        shape = Shape(max(1, options.tokens // length), options.heads, length, options.head_dim)
        inputs = CoreInputs(shape, options.device, getattr(torch, options.dtype))
        reasons, contenders, baselines = {}, {}, {}
        for core in tqdm(cores(options.dropout), desc=f"core {length}: are all right?", leave=False, disable=None):
            reason = problem(core, options.device, options.dtype)
            if core.provider in ("eager", "compiled") and length > options.eager_up_to:
                reason = reason or f"--eager-up-to {options.eager_up_to}"
            if reason := reason or refusal(inputs, core):
                reasons[core.name] = reason
                continue
            contenders[core.name] = inputs.contender(core)
            baselines[core.name] = baseline(core, options.device, options.dtype).name
        times = measure(contenders, options.rounds, options.device, f"core {length}")
        yield rows_of("core", shape, times, baselines) + unmeasured("core", shape, reasons)
