#!/usr/bin/env python
"""How fast attention is, and how much memory it takes, side by side in one run.

    scripts/benchmark.py                          everything that runs here, a quarter of an hour on two cores
    scripts/benchmark.py core memory --tokens 4096
    scripts/benchmark.py core --busy              with another process busy on the same cores
    scripts/benchmark.py --device cuda --dtype bfloat16

Levels: `core` is the attention alone, from queries, keys and values; `module` the multi-head attention around it;
`step` a training step of a language model; `decoding` a beam search; `memory` what core,
module and step need beyond what was there.
Every contender first has to give the right values and gradients; where one does not, nothing is timed. Contenders take
turns, so that a change in the machine's speed meets all of them; percentiles are over the rounds. Results go to
`benchmark.csv` and `benchmark.svg` in --out and, as a table, to the terminal. `module`, `step` and `decoding` need
fairseq.
"""

import argparse
import copy
import csv
import ctypes
import functools
import importlib.util
import json
import logging
import multiprocessing
import platform
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mixhead_plugin.ops import NORMALIZERS, attention

HAS_FAIRSEQ = importlib.util.find_spec("fairseq") is not None


class Contender(NamedTuple):
    """Something to be timed, and its forward pass alone if there is another."""

    full: Callable[[], Any]
    forward: Optional[Callable[[], Any]] = None


class Shape(NamedTuple):
    batch: int
    heads: int
    length: int
    head_dim: int


# --- core ---------------------------------------------------------------------------------------------------------


class Core(NamedTuple):
    """One kind of attention in the level `core`."""

    provider: str  # torch, eager or mixhead_plugin; on a GPU the keys of ON_GPU too
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


# What there is on a GPU alone.
ON_GPU = {
    "flash": "torch's scaled_dot_product_attention, by FlashAttention",
    "compiled": "the formula through torch.compile",
    "flex": "torch's FlexAttention: no mixing of heads, no dropout",
    "triton": "mixhead_plugin's fused kernels, whatever `auto` would take",
}


def cores(dropout_p: float, device: str = "cpu", dtype: str = "float32") -> List[Core]:
    found = [Core("torch"), Core("torch", causal_flag=True)]
    for provider in ("eager", "mixhead_plugin"):
        found += [Core(provider, name) for name in ("softmax", "sigsoftmax", "l2")]
        found += [Core(provider, mixing=mixing) for mixing in "AB"]
    found += [Core("torch", dropout_p=dropout_p)]
    for provider in ("eager", "mixhead_plugin"):
        found += [Core(provider, mixing=mixing, dropout_p=dropout_p) for mixing in ("none", "A", "B")]
    return [*found, *cores_on_gpu(dropout_p, dtype)] if device == "cuda" else found


def cores_on_gpu(dropout_p: float, dtype: str) -> List[Core]:
    if dtype == "float64":
        return []
    found = (
        [] if dtype == "float32" else [baseline(Core("flash", dropout_p=p), "cuda", dtype) for p in (0.0, dropout_p)]
    )
    for provider in ("compiled", "flex", "triton"):
        found += [Core(provider, name) for name in ("softmax", "sigsoftmax", "l2")]
    for provider in ("compiled", "triton"):
        found += [Core(provider, mixing=mixing) for mixing in "AB"]
        found += [Core(provider, mixing=mixing, dropout_p=dropout_p) for mixing in "AB"]
    return found


def baseline(core: Core, device: str = "cpu", dtype: str = "float32") -> Core:
    """What a contender is measured by"""
    if device == "cuda" and dtype in ("float16", "bfloat16"):
        return Core("flash", causal_flag=True, dropout_p=core.dropout_p)
    return Core("torch", dropout_p=core.dropout_p)


@functools.lru_cache(None)
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.config.recompile_limit = 256  # beyond it, a function would run as it is, and nobody be told
    return torch.compile(function, dynamic=False)


@functools.lru_cache(None)
def causal_blocks(length: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=device)


def flex(query: Tensor, key: Tensor, value: Tensor, normalizer: str) -> Tensor:
    """Causal attention by FlexAttention, run as it is meant to be: compiled"""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    run = compiled(flex_attention) if query.is_cuda else flex_attention
    blocks = causal_blocks(query.shape[2], query.device.type)
    if normalizer == "sigsoftmax":
        return run(query, key, value, score_mod=lambda s, b, h, i, j: s + F.logsigmoid(s), block_mask=blocks)
    if normalizer == "softmax":
        return run(query, key, value, block_mask=blocks)
    # exp(s) / sqrt(sum exp(2s)) is the softmax times exp(log sum exp(s) - log sum exp(2s) / 2)
    out, of_sum = run(query, key, value, block_mask=blocks, return_aux=AuxRequest(lse=True))
    _, of_squares = run(2 * query, key, value, block_mask=blocks, return_aux=AuxRequest(lse=True))
    return out * torch.exp(of_sum.lse - of_squares.lse / 2)[..., None].to(out.dtype)


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

    def run(self, core: Core, exact: bool = False) -> Tuple[Tensor, List[Tensor]]:
        """The output of the attention, and its inputs; `exact` computes it in float64 by the formula."""
        names = ["query", "key", "value", *([core.mixing] if core.mixing != "none" else [])]
        tensors = [self.tensors[name] for name in names]
        future = self.future
        if exact:
            tensors, future = [t.detach().double().requires_grad_() for t in tensors], future.double()
        query, key, value, mixing = (*tensors, None)[:4]
        if exact or core.provider in ("eager", "compiled"):
            formula = compiled(eager) if core.provider == "compiled" and not exact else eager
            out = formula(query, key, value, mixing, core.normalizer, future, core.dropout_p)
        elif core.provider == "flash":
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = F.scaled_dot_product_attention(query, key, value, None, core.dropout_p, is_causal=True)
        elif core.provider == "flex":
            out = flex(query, key, value, core.normalizer)
        elif core.provider == "torch":
            mask = None if core.causal_flag else future
            out = F.scaled_dot_product_attention(query, key, value, mask, core.dropout_p, is_causal=core.causal_flag)
        else:
            options = dict(normalizer=core.normalizer, mixing=mixing, causal=True, dropout_p=core.dropout_p)
            if core.provider == "triton":
                options["impl"] = "triton"
            out = attention(query, key, value, **options)
        return out, tensors

    def with_gradients(self, core: Core, exact: bool = False) -> List[Tensor]:
        out, tensors = self.run(core, exact)
        return [out.detach(), *torch.autograd.grad(out, tensors, self.d_output.to(out.dtype))]

    def contender(self, core: Core) -> Contender:
        return Contender(lambda: self.with_gradients(core), lambda: self.run(core))

    def check(self, core: Core) -> None:
        plain = core._replace(dropout_p=0.0)
        formula = self.with_gradients(plain._replace(provider="eager", causal_flag=False))
        names = ["output", *(f"gradient of {name}" for name in ("query", "key", "value", "the mixing"))]
        must_be_right(core.name, names, self.with_gradients(plain), formula, self.with_gradients(plain, exact=True))


def must_be_right(
    name: str, parts: Iterable[str], got: Iterable[Tensor], by_formula: Iterable[Tensor], exact: Iterable[Tensor]
) -> None:
    """Twice the error of the formula in the same dtype is allowed, and rounding, that of float64 included."""
    for part, value, formula, right in zip(parts, got, by_formula, exact):
        rounding = torch.finfo(value.dtype).eps + 100 * torch.finfo(right.dtype).eps
        allowed = 2 * (formula - right).abs().max() + rounding * right.abs().max()
        error = (value - right).abs().max()
        if not error <= allowed:
            raise SystemExit(f"{name}: {part} is wrong by {error:.2g}, {allowed:.2g} is allowed; nothing is timed")


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


# --- module, step, decoding: fairseq's own against ours --------------------------------------------------------------

MIXINGS = {"no mixing": "none", "Mixhead A": "position-independent", "Mixhead B": "position-wise"}


def modules(shape: Shape, dropout_p: float, device: str, dtype: torch.dtype) -> Dict[str, Contender]:
    from fairseq.modules import MultiheadAttention

    from mixhead_plugin.modules.attention import MixheadAttention

    b, h, n, d = shape
    embed_dim = h * d
    torch.manual_seed(1)
    stock = MultiheadAttention(embed_dim, h, dropout=dropout_p, self_attention=True)
    attentions = {"fairseq": stock}
    for label, head_mixing in MIXINGS.items():
        for impl in ("auto", "reference"):
            ours = MixheadAttention(
                embed_dim, h, dropout=dropout_p, self_attention=True, head_mixing=head_mixing, impl=impl
            )
            attentions[f"mixhead_plugin: {label}{', reference' if impl == 'reference' else ''}"] = ours
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
        _shake(module)
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
    return contenders


def _shake(model: torch.nn.Module) -> None:
    """Mixing starts as the identity, where a wrong one would not be noticed."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "head_mixing" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


def _task(n_words: int) -> Any:
    from fairseq.data import Dictionary
    from fairseq.tasks.translation import TranslationConfig, TranslationTask

    words = Dictionary()
    for i in range(n_words):
        words.add_symbol(f"w{i}")
    return TranslationTask(TranslationConfig(), words, words)


def _models(stock: str, flags: Dict[str, Any], variants: Dict[str, Dict[str, str]], task: Any) -> Dict[str, Any]:
    """fairseq's model and ours, with the same parameters."""
    from fairseq.models import ARCH_CONFIG_REGISTRY, build_model

    import mixhead_plugin  # noqa: F401  (registers the architectures)

    models = {}
    for name, own in variants.items():
        arch = stock if name == "fairseq" else f"mixhead_{stock}"
        args = Namespace(arch=arch, **flags, **own)
        ARCH_CONFIG_REGISTRY[arch](args)
        torch.manual_seed(1)
        models[name] = build_model(args, task)
        models[name].load_state_dict(models["fairseq"].state_dict(), strict=False)
    return models


def steps(shape: Shape, dropout_p: float, device: str) -> Dict[str, Contender]:
    """A training step of a language model of 4 layers: loss, with penalties for the last ones, gradients, Adam."""
    from mixhead_plugin.modules.penalties import PenalisedPass

    flags = dict(
        tokens_per_sample=shape.length,
        decoder_layers=4,
        decoder_embed_dim=shape.heads * shape.head_dim,
        decoder_ffn_embed_dim=4 * shape.heads * shape.head_dim,
        decoder_attention_heads=shape.heads,
        dropout=0.1,
        attention_dropout=dropout_p,
        share_decoder_input_output_embed=True,
        max_target_positions=shape.length,
    )
    variants = {"fairseq": {}}
    for label, head_mixing in MIXINGS.items():
        variants[f"mixhead_plugin: {label}"] = {"head_mixing": head_mixing}
    variants["mixhead_plugin: Mixhead B, reference"] = {"attention_impl": "reference"}
    penalties = {
        "mixhead_plugin: Mixhead A, orthogonal penalty": {"orthogonal": 0.01},
        "mixhead_plugin: Mixhead B, orthogonal penalty": {"orthogonal": 0.01},
        "mixhead_plugin: Mixhead B, rank penalty": {"rank": 0.01},
    }
    variants |= {name: variants[name.rpartition(",")[0]] for name in penalties}
    task = _task(4000)
    task.args = Namespace(**flags)
    tokens = torch.randint(10, 4000, (shape.batch, shape.length), device=device)
    real = torch.ones_like(tokens, dtype=torch.bool)

    def contender(model: torch.nn.Module, weights: Dict[str, float]) -> Contender:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

        def plain() -> Tensor:
            return F.cross_entropy(model(tokens)[0].flatten(0, 1).float(), tokens.flatten())

        def penalised() -> Tensor:
            with PenalisedPass(model, weights, {"decoder": real}) as of_pass:
                loss = plain()
            return of_pass.add_to(loss, 1)

        forward = penalised if weights else plain
        if weights and not forward() > plain() * 1.0001:  # the mixing is shaken: no penalty is 0
            raise SystemExit(f"{weights}: the penalty adds nothing to the loss; nothing is timed")

        def full() -> None:
            optimizer.zero_grad()
            forward().backward()
            optimizer.step()

        return Contender(full, forward)

    models = _models("transformer_lm", flags, variants, task)
    for name, model in models.items():
        _shake(model)
        model.to(device).eval()
        if name != "fairseq":
            _check_step(name, model, tokens)
    contenders = {name: contender(model, penalties.get(name, {})) for name, model in models.items()}
    for model in models.values():
        model.train()
    return contenders


def _check_step(name: str, model: torch.nn.Module, tokens: Tensor) -> None:
    """Loss and gradients are those of the reference, to a thousandth of the largest."""
    from mixhead_plugin.modules.attention import MixheadAttention

    attentions = [module for module in model.modules() if isinstance(module, MixheadAttention)]
    chosen = attentions[0].impl
    found = []
    for impl in (chosen, "reference"):
        for module in attentions:
            module.impl = impl
        loss = F.cross_entropy(model(tokens)[0].flatten(0, 1).float(), tokens.flatten())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append([loss.detach(), torch.cat([gradient.flatten() for gradient in gradients])])
    for module in attentions:
        module.impl = chosen
    for part, got, expected in zip(("loss", "gradient of the parameters"), *found):
        error = (got - expected).abs().max() / expected.abs().max()
        if not error <= 1e-3:
            raise SystemExit(f"{name}: {part} differs by {error:.2g} of the reference's largest; nothing is timed")


def decodings(device: str, sentences: int, length: int, beam: int) -> Dict[str, Contender]:
    """A beam search over hypotheses of one fixed length, with the IWSLT architecture (6 + 6 layers, d 512)."""
    from fairseq.sequence_generator import SequenceGenerator

    variants = {"fairseq": {}}
    for label, head_mixing in MIXINGS.items():
        variants[f"mixhead_plugin: {label}"] = {"head_mixing": head_mixing}
    task = _task(4000)
    flags = dict(share_all_embeddings=True, max_source_positions=256, max_target_positions=256)
    models = _models("transformer_iwslt_de_en", flags, variants, task)
    source = torch.randint(10, 4000, (sentences, length), device=device)
    source[:, -1] = task.source_dictionary.eos()
    lengths = torch.full((sentences,), length, device=device)
    sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}

    def contender(model: torch.nn.Module) -> Contender:
        model.to(device).eval().make_generation_fast_(
            beamable_mm_beam_size=None, need_attn=False
        )  # as fairseq-generate
        search = SequenceGenerator(
            [model], task.target_dictionary, beam_size=beam, min_len=length, max_len_a=0, max_len_b=length
        )

        def full() -> List[float]:
            return [float(best["score"]) for best, *_ in search.generate([model], sample)]

        return Contender(full)

    contenders = {name: contender(model) for name, model in models.items()}
    expected = torch.tensor(contenders["fairseq"].full())
    for name, made in contenders.items():  # mixing is the identity here: the tests are about decoding what was trained
        error = (torch.tensor(made.full()) - expected).abs().max()
        if not error <= 1e-3 * expected.abs().max():
            raise SystemExit(f"{name}: its hypotheses' scores differ by {error:.2g} from fairseq's; nothing is timed")
    return contenders


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(
    contenders: Dict[str, Contender], rounds: int, device: str, title: str
) -> Dict[str, Dict[str, List[float]]]:
    """Milliseconds of each pass of each contender, round by round; the first round only warms up."""
    times = {name: {kind: [] for kind, f in c._asdict().items() if f is not None} for name, c in contenders.items()}
    bar = tqdm(total=(rounds + 1) * len(contenders), desc=title, leave=False, disable=None)
    for round_ in range(rounds + 1):
        for name, contender in contenders.items():
            for kind in times[name]:
                started = time.perf_counter()
                getattr(contender, kind)()
                if device == "cuda":
                    torch.cuda.synchronize()
                if round_ > 0:
                    times[name][kind].append(1e3 * (time.perf_counter() - started))
            bar.update()
    bar.close()
    return times


def rows_of(level: str, shape: Shape, times: Dict[str, Any], baselines: Dict[str, str]) -> List[Dict[str, Any]]:
    rows = []
    for name, passes in times.items():
        for kind, values in passes.items():
            base = statistics.median(times[baselines[name]][kind])
            p20, p50, p80 = (statistics.quantiles(values, n=10, method="inclusive")[i] for i in (1, 4, 7))
            figures = dict(p20_ms=p20, p50_ms=p50, p80_ms=p80, ratio=p50 / base, measured_by=baselines[name])
            rows.append(dict(level=level, name=name, **shape._asdict(), passes=kind, **figures))
    return rows


def peak_memory(level: str, name: str, options: Namespace, shape: Shape) -> Dict[str, float]:
    """MiB that each pass needs at its peak beyond what was there before; run it in a fresh process."""
    dtype = getattr(torch, options.dtype)

    def build(shape: Shape) -> Contender:
        if level == "module":
            return modules(shape, options.dropout, options.device, dtype)[name]
        if level == "step":
            return steps(shape, options.dropout, options.device)[name]
        (core,) = [core for core in cores(options.dropout, options.device, options.dtype) if core.name == name]
        with_mask = core.provider in ("eager", "compiled")
        return CoreInputs(shape, options.device, dtype, with_mask).contender(core)

    build(shape._replace(length=min(256, shape.length))).full()  # libraries load, threads start
    contender = build(shape)
    peaks = {}
    for kind, function in (("forward", contender.forward), ("full", contender.full)):
        if options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            result = function()
            peaks[kind] = (torch.cuda.max_memory_allocated() - before) / 2**20
        else:
            ctypes.CDLL(None).malloc_trim(0)  # memory that is free but kept would hide what is needed: malloc_trim(3)
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts here: proc(5)
            before = _resident("VmRSS")
            result = function()
            peaks[kind] = (_resident("VmHWM") - before) / 2**10
        del result
    return peaks


def _resident(field: str) -> int:
    """KiB of this process in memory, now (VmRSS) or at most (VmHWM), by Linux's account."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field + ":")]
    return int(line.split()[1])


def memory_rows(options: Namespace, level: str, names: List[str], shape: Shape) -> List[Dict[str, Any]]:
    """The first of the names is what the others are measured by."""
    found = {}
    for name in tqdm(names, desc=f"memory of {level}, {shape.length}", leave=False, disable=None):
        command = [sys.executable, __file__, "--device", options.device, "--dtype", options.dtype]
        command += ["--dropout", str(options.dropout), "--memory-of", json.dumps([level, name, shape])]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"memory of {name} at {shape.length}: {result.stderr.strip().splitlines()[-1]}")
        found[name] = json.loads(result.stdout.splitlines()[-1])
    rows = []
    for name, peaks in found.items():
        for kind, mib in peaks.items():
            figures = dict(peak_mib=mib, ratio=mib / max(found[names[0]][kind], 0.001), measured_by=names[0])
            rows.append(dict(level=f"{level} memory", name=name, **shape._asdict(), passes=kind, **figures))
    return rows


def memory_tables(options: Namespace) -> Iterator[List[Dict[str, Any]]]:
    chosen = [Core("torch", causal_flag=True), Core("mixhead_plugin", "sigsoftmax"), Core("mixhead_plugin", "l2")]
    chosen += [Core("mixhead_plugin", mixing=mixing) for mixing in "AB"]
    chosen += [Core("mixhead_plugin", mixing="B", dropout_p=options.dropout)]
    if options.device == "cuda" and options.dtype in ("float16", "bfloat16"):
        chosen = [c for c in cores_on_gpu(options.dropout, options.dtype) if c.provider in ("flash", "triton")]
    formula = [Core("eager", mixing=mixing) for mixing in "AB"]
    for length in options.memory_lengths:
        names = [core.name for core in [*chosen, *(formula if length <= options.eager_up_to else [])]]
        yield memory_rows(options, "core", names, Shape(1, options.heads, length, options.head_dim))
    if HAS_FAIRSEQ:
        shape = Shape(max(1, options.tokens // 512), options.heads, 512, options.head_dim)
        ours = [f"mixhead_plugin: {label}" for label in MIXINGS]
        for level in ("module", "step") if options.dtype == "float32" else ("module",):
            names = ["fairseq", *ours, "mixhead_plugin: Mixhead B, reference"]
            yield memory_rows(options, level, names, shape)


def _burn() -> None:
    a = torch.randn(1500, 1500)
    while True:
        a @ a


# --- results ----------------------------------------------------------------------------------------------------------


def machine(options: Namespace) -> Dict[str, str]:
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    fairseq = "none"
    if HAS_FAIRSEQ:
        import fairseq as package

        fairseq = package.__version__
    return dict(
        dtype=options.dtype,
        busy=str(options.busy).lower(),
        device=device,
        python=platform.python_version(),
        torch=torch.__version__,
        fairseq=fairseq,
    )


COLUMNS = "level name batch heads length head_dim passes p20_ms p50_ms p80_ms peak_mib ratio measured_by".split()


def print_table(rows: List[Dict[str, Any]]) -> None:
    first = rows[0]
    sizes = f"batch {first['batch']}, heads {first['heads']}, length {first['length']}, head size {first['head_dim']}"
    columns = ["peak"] if "peak_mib" in first else ["p20", "p50", "p80"]
    print(f"\n{first['level']}: {sizes}\n{'':60s}" + "".join(f"{c:>11s}" for c in [*columns, "ratio"]))
    for row in rows:
        label = f"{row['name']}{'' if row['passes'] == 'full' else ', forward alone'}"
        figures = [f"{row['peak_mib']:.1f} MiB"] if "peak_mib" in row else [f"{row[c + '_ms']:.1f} ms" for c in columns]
        print(f"  {label:58s}" + "".join(f"{figure:>11s}" for figure in [*figures, f"{row['ratio']:.2f}"]))


def write_csv(path: Path, rows: List[Dict[str, Any]], about: Dict[str, str]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *about])
        writer.writeheader()
        for row in rows:
            rounded = {key: f"{value:.3f}" if isinstance(value, float) else value for key, value in row.items()}
            writer.writerow({**rounded, **about})


COLOURS = {"softmax": "C0", "sigsoftmax": "C1", "l2": "C2", "Mixhead A": "C4", "Mixhead B": "C3"}
STYLES = {"torch": "--", "torch, is_causal": "-.", "eager": ":", "mixhead_plugin": "-"}
ON_GPU_STYLES = {
    "flash, is_causal": (0, (1, 1)),
    "compiled": (0, (3, 1, 1, 1)),
    "flex": (0, (5, 1)),
    "triton": (0, (9, 1)),
}


def draw(path: Path, rows: List[Dict[str, Any]], about: Dict[str, str]) -> None:
    """Time and memory over the length: a colour for each variant, a style for each provider."""
    import matplotlib

    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # fairseq turns on everyone's debugging messages
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    panels: Dict[str, Dict[Tuple[str, str], List[Tuple[int, float]]]] = {}
    for row in rows:
        if row["level"] not in ("core", "core memory") or row["passes"] != "full":
            continue
        provider, variant = row["name"].split(": ")
        variant, dropout, _ = variant.partition(", dropout")
        variant, flag, _ = variant.partition(", is_causal")
        if dropout and "peak_mib" in row:
            continue  # a panel for one line
        what = "peak memory beyond the inputs, MiB" if "peak_mib" in row else "forward + backward, ms"
        lines = panels.setdefault(f"{what}{', with dropout' if dropout else ''}", {})
        figure_of = row["peak_mib"] if "peak_mib" in row else row["p50_ms"]
        lines.setdefault((variant, provider + flag), []).append((row["length"], figure_of))
    if not panels:
        return
    styles = {**STYLES, **(ON_GPU_STYLES if any(row["name"].startswith(tuple(ON_GPU)) for row in rows) else {})}
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 4.4), squeeze=False)
    for axis, (title, lines) in zip(axes[0], panels.items()):
        for (variant, provider), points in lines.items():
            axis.plot(
                *zip(*sorted(points)), linestyle=styles[provider], color=COLOURS[variant], marker="o", markersize=3
            )
        axis.set(title=title, xlabel="length", xscale="log", yscale="log")
        axis.title.set_size(9)
        axis.set_xticks(sorted({n for points in lines.values() for n, _ in points}))
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.minorticks_off()
    used = {variant for lines in panels.values() for variant, _ in lines}
    handles = [Line2D([], [], color=colour, label=name) for name, colour in COLOURS.items() if name in used]
    handles += [Line2D([], [], color="grey", linestyle=style, label=name) for name, style in styles.items()]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), fontsize=8, frameon=False)
    figure.suptitle(f"{about['device']}, {about['dtype']}, torch {about['torch']}", fontsize=9)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path)
    plt.close(figure)


LEVELS = ("core", "module", "step", "decoding", "memory")


def parse(arguments: Optional[List[str]]) -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("levels", nargs="*", metavar="LEVEL", help=f"{', '.join(LEVELS)}; all that run here if none")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048], help="of the core")
    parser.add_argument("--tokens", type=int, default=2048, help="batch x length (default: %(default)s)")
    parser.add_argument("--memory-lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="at batch 1")
    parser.add_argument("--eager-up-to", type=int, default=2048, help="length beyond which the formula is left out")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16", "float16"], default="float32")
    parser.add_argument("--busy", action="store_true", help="another process computes on all cores meanwhile")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"))
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = set(options.levels) - set(LEVELS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: levels are {', '.join(LEVELS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device is visible")
    if "memory" in options.levels and options.device == "cpu" and not Path("/proc/self/clear_refs").exists():
        parser.error("memory: on a CPU it needs Linux's /proc/self/clear_refs")
    for flag in ("tokens", "heads", "head_dim", "lengths", "memory_lengths"):
        given = getattr(options, flag)
        if min(given if isinstance(given, list) else [given]) < 1:
            parser.error(f"--{flag.replace('_', '-')} {given}: must be at least 1")
    if not 0 < options.dropout < 1:
        parser.error(f"--dropout {options.dropout}: must be between 0 and 1")
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: percentiles need at least 2")
    needing = [level for level in options.levels if level in ("module", "step", "decoding")]
    if needing and not HAS_FAIRSEQ:
        parser.error(f"{', '.join(needing)}: needs fairseq, which is not installed; core and memory do not")
    single = [level for level in options.levels if level in ("step", "decoding")]
    if single and options.dtype != "float32":
        parser.error(f"--dtype {options.dtype}: {' and '.join(single)} run in float32")
    if not options.levels:
        options.levels = [level for level in LEVELS if HAS_FAIRSEQ or level in ("core", "memory")]
        if options.dtype != "float32":
            options.levels = [level for level in options.levels if level not in ("step", "decoding")]
    return options


def run(options: Namespace) -> Iterator[List[Dict[str, Any]]]:
    """The rows of one table after the other."""
    dtype = getattr(torch, options.dtype)
    if "core" in options.levels:
        for length in options.lengths:
            shape = Shape(max(1, options.tokens // length), options.heads, length, options.head_dim)
            chosen = [
                c
                for c in cores(options.dropout, options.device, options.dtype)
                if c.provider not in ("eager", "compiled") or length <= options.eager_up_to
            ]
            inputs = CoreInputs(shape, options.device, dtype)
            for core in tqdm(chosen, desc=f"core {length}: are all right?", leave=False, disable=None):
                inputs.check(core)
            contenders = {core.name: inputs.contender(core) for core in chosen}
            times = measure(contenders, options.rounds, options.device, f"core {length}")
            yield rows_of(
                "core", shape, times, {core.name: baseline(core, options.device, options.dtype).name for core in chosen}
            )
    for level in ("module", "step", "decoding"):
        if level not in options.levels:
            continue
        shape = Shape(max(1, options.tokens // 512), options.heads, 512, options.head_dim)
        if level == "module":
            contenders = modules(shape, options.dropout, options.device, dtype)
        elif level == "step":
            contenders = steps(shape, options.dropout, options.device)
        else:
            shape = Shape(16, 4, 25, 128)
            contenders = decodings(options.device, shape.batch, shape.length, beam=5)
        times = measure(contenders, options.rounds, options.device, level)
        yield rows_of(level, shape, times, dict.fromkeys(contenders, "fairseq"))
    if "memory" in options.levels:
        yield from memory_tables(options)


def main(arguments: Optional[List[str]] = None) -> None:
    options = parse(arguments)
    if options.memory_of:
        level, name, shape = json.loads(options.memory_of)
        print(json.dumps(peak_memory(level, name, options, Shape(*shape))))
        return
    about = machine(options)
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    burner = multiprocessing.get_context("spawn").Process(target=_burn, daemon=True) if options.busy else None
    if burner:
        burner.start()
    options.out.mkdir(parents=True, exist_ok=True)
    rows: List[Dict[str, Any]] = []
    try:
        for table in run(options):
            print_table(table)
            rows += table
            write_csv(options.out / "benchmark.csv", rows, about)  # each time: a run that is stopped keeps what it has
    finally:
        if burner:
            burner.kill()
    draw(options.out / "benchmark.svg", rows, about)
    print(f"\n{options.out}/benchmark.csv, {options.out}/benchmark.svg")


if __name__ == "__main__":
    main()
