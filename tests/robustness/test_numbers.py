"""Numbers at the ends of what floats hold: what comes out is right, or is seen to be wrong before it is saved."""

import itertools
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.nan_detector import NanDetector

from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.ops import NORMALIZERS, attention
from tests.commands import LM_SIZES, PLUGIN, SIZES, TRAINING, run
from tests.criterions.cases import CASES, PAD, criterion, model
from tests.robustness.inprocess import Seen, refusal, seen

INF, NAN = float("inf"), float("nan")
B, H, NQ, NK, D = 2, 3, 4, 5, 4
# Every one that a score of a float of 16 bits can have, and more.
SIZES_OF_SCORES = [0.0, 1e-30, 1e-8, 1e-3, 1.0, 80.0, 1e4, 6e4, 1e9]
MIXED = [None, "shared", "per query"]

every_normalizer = pytest.mark.parametrize("normalizer", NORMALIZERS)
every_impl = pytest.mark.parametrize("impl", ["reference", "blockwise", "auto"])
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
every_mixing = pytest.mark.parametrize("mixed", MIXED)


def tensors(largest, dtype, mixed=None, n_queries=NQ, n_keys=NK, heads=H, head_dim=D, batch=B):
    """Queries, keys and values, of which the largest score, with scale 1, is +-`largest`; and a mixing"""

    def random(*shape):
        return torch.randn(shape, dtype=torch.float64)

    q, k = random(batch, heads, n_queries, head_dim), random(batch, heads, n_keys, head_dim)
    if q.numel() and k.numel():
        factor = (largest / (q @ k.transpose(2, 3)).abs().max()) ** 0.5
        q, k = q * factor, k * factor
    made = {"query": q, "key": k, "value": random(batch, heads, n_keys, head_dim)}
    if mixed:
        made["mixing"] = random(*{"shared": (heads, heads), "per query": (batch, n_queries, heads, heads)}[mixed])
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def outcome(tensors, **options):
    """Output and gradients"""
    tensors = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    out = attention(**tensors, **{"scale": 1.0, **options})
    grads = torch.autograd.grad(out.sum(), list(tensors.values()))
    return {"out": out.detach(), **dict(zip(tensors, grads))}


def in_float64(tensors, **options):
    return outcome({name: tensor.double() for name, tensor in tensors.items()}, **{**options, "impl": "reference"})


def fits(value, dtype):
    """Whether exact values are numbers of the type; NaN is none."""
    return value.numel() == 0 or bool(value.abs().max() < 0.99 * torch.finfo(dtype).max)


@every_impl
@every_mixing
@every_normalizer
@every_dtype
def test_scores_of_every_size_give_what_is_right_or_seen_to_be_too_large(dtype, normalizer, mixed, impl):
    for size in [*SIZES_OF_SCORES, *([] if dtype == torch.float16 else [1e18, 1e30])]:
        made = tensors(size, dtype, mixed)
        found = outcome(made, normalizer=normalizer, causal=True, impl=impl)
        expected = in_float64(made, normalizer=normalizer, causal=True)
        for name, value in expected.items():
            assert bool(found[name].isfinite().all()) == fits(value, dtype), (size, name)
        value = expected["out"]
        if fits(value, dtype):  # the scores have the rounding of float32, which a large one makes as much of
            tolerance = min(2.0, 4 * torch.finfo(dtype).eps + 40 * size * torch.finfo(torch.float32).eps)
            error = (found["out"].double() - value).abs().max()
            assert error <= tolerance * value.abs().max() + torch.finfo(dtype).tiny, size


def test_what_is_too_large_is_so_by_definition_alone():
    """exp(s) of unnormalized, s^2 of relu2, and the slope of swish-l2 where all scores are nearly 0, 1 / |s|."""
    found = set()
    for normalizer in NORMALIZERS:
        for dtype in (torch.float32, torch.float16):
            for size in (1e-8, 1.0, 1e4):
                outcomes = outcome(tensors(size, dtype), normalizer=normalizer)
                if not all(value.isfinite().all() for value in outcomes.values()):
                    found.add((normalizer, dtype, size))
    float16, float32 = torch.float16, torch.float32
    assert found == {
        ("unnormalized", float32, 1e4),
        ("unnormalized", float16, 1e4),
        ("relu2", float16, 1e4),
        ("swish-l2", float16, 1e-8),
    }


HIDDEN = {
    "padding": {"key_padding_mask": torch.tensor([[True] * NK, [False] * NK])},
    "a row": {"attn_mask": torch.zeros(NQ, NK).index_fill(0, torch.tensor([1]), -INF)},
    "all": {"attn_mask": torch.full((NQ, NK), -INF)},
    "a head": {"attn_mask": torch.zeros(H, 1, NK).index_fill(0, torch.tensor([2]), -INF)},
}


@every_impl
@every_mixing
@every_normalizer
@pytest.mark.parametrize("hidden", HIDDEN)
def test_rows_that_see_nothing_are_zero_whatever_their_scores(hidden, normalizer, mixed, impl):
    for size, dtype in ((1.0, torch.float32), (6e4, torch.float16), (1e18, torch.bfloat16)):
        made = tensors(size, dtype, mixed)
        if hidden == "padding":  # the sentence that is seen has small scores
            made["query"] = made["query"].clone()
            made["query"][1] /= max(1.0, size)
        elif hidden in ("a row", "a head"):
            scale = torch.full((B, H, NQ, 1), 1 / max(1.0, size))
            scale[:, :, 1] = 1.0 if hidden == "a row" else scale[:, :, 1]
            scale[:, 2] = 1.0 if hidden == "a head" else scale[:, 2]
            made["query"] = (made["query"].float() * scale).to(dtype)
        found = outcome(made, normalizer=normalizer, impl=impl, **HIDDEN[hidden])
        assert all(value.isfinite().all() for value in found.values()), size
        row = {
            "padding": (0,),
            "a row": (slice(None), slice(None), 1),
            "all": (),
            "a head": (slice(None), 2),
        }[hidden]
        assert (found["query"][row] == 0).all()
        if hidden != "a head" or mixed is None:
            assert (found["out"][row] == 0).all()


@every_impl
@every_mixing
@every_normalizer
def test_the_smallest_shapes(normalizer, mixed, impl):
    ones = dict(n_queries=1, n_keys=1, heads=1, head_dim=1, batch=1)
    for name in ones:
        for some in ({name: 1}, {**ones, name: 3}, ones):
            made = tensors(3.0, torch.float32, mixed, **some)
            found = outcome(made, normalizer=normalizer, causal=True, impl=impl)
            for what, value in in_float64(made, normalizer=normalizer, causal=True).items():
                torch.testing.assert_close(found[what].double(), value, rtol=1e-4, atol=1e-4)
    for name in ("n_queries", "n_keys", "heads", "batch"):
        found = outcome(tensors(3.0, torch.float32, mixed, **{name: 0}), normalizer=normalizer, impl=impl)
        assert all((value == 0).all() for value in found.values())


@every_impl
@every_normalizer
@every_dtype
@pytest.mark.parametrize("mixed", ["shared", "per query"])
def test_mixing_matrices_of_every_kind(dtype, mixed, normalizer, impl):
    made = tensors(3.0, dtype, mixed)
    noise = made["mixing"]
    huge = 1e30 if dtype != torch.float16 else 3e4
    matrices = {"0": 0 * noise, "-1": torch.full_like(noise, -1), "huge": huge * noise.sign(), "tiny": 1e-7 * noise}
    for name, matrix in matrices.items():
        found = outcome({**made, "mixing": matrix}, normalizer=normalizer, impl=impl)
        for what, value in in_float64({**made, "mixing": matrix}, normalizer=normalizer).items():
            assert bool(found[what].isfinite().all()) == fits(value, dtype), (name, what)
        if name == "0":
            assert all((found[what] == 0).all() for what in ("out", "query", "key", "value"))


@pytest.mark.parametrize("mixing", HEAD_MIXINGS)
@every_normalizer
def test_a_model_of_huge_scores_and_a_sentence_of_padding_alone(normalizer, mixing):
    stock = "label_smoothed_cross_entropy"
    for heads in (1, 4):
        if heads == 1 and mixing in ("random", "average"):
            continue  # refused: of no effect
        flags = {"encoder_attention_heads": heads, "decoder_attention_heads": heads, "head_mixing": mixing}
        made, sample = model(stock, attention_normalizer=normalizer, **flags), CASES[stock].batch()
        sample["net_input"]["src_tokens"][1] = PAD
        for module in made.modules():
            if isinstance(module, MixheadAttention):
                module.q_proj.weight.data *= 100
                module.k_proj.weight.data *= 100
        loss = criterion(stock)(made, sample)[0]
        loss.backward()
        finite = [loss, *(parameter.grad for parameter in made.parameters())]
        assert all(value.isfinite().all() for value in finite) == (normalizer != "unnormalized")


# The kernels are interpreted if they were defined so, which is for a process of its own.
INTERPRETED = """
import torch
from mixhead_plugin.ops import triton
from tests.robustness import test_numbers as here

for normalizer in triton.NORMALIZERS:
    for mixed in here.MIXED:
        for size in (0.0, 1e-30, 1.0, 1e4, 1e9):
            made = here.tensors(size, torch.float32, mixed)
            found = here.outcome(made, normalizer=normalizer, causal=True, impl="triton")
            expected = here.in_float64(made, normalizer=normalizer, causal=True)
            for name, value in found.items():
                assert value.isfinite().all(), (normalizer, mixed, size, name)
            if size < 1e4:
                torch.testing.assert_close(found["out"].double(), expected["out"], rtol=1e-2, atol=1e-3)
        for mask in here.HIDDEN.values():
            found = here.outcome(here.tensors(1e4, torch.float32, mixed), normalizer=normalizer, impl="triton", **mask)
            assert all(value.isfinite().all() for value in found.values())
print("all is finite")
"""


@pytest.mark.slow
def test_interpreted_kernels_give_finite_numbers():
    pytest.importorskip("triton")
    result = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        capture_output=True,
        text=True,
        cwd=Path(PLUGIN).parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert result.stdout == "all is finite\n", result.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["auto", "triton", "blockwise", "reference"])
@pytest.mark.parametrize("normalizer", ["softmax", "sigsoftmax", "l2"])
@every_dtype
def test_a_gpu_gives_finite_numbers(dtype, normalizer, impl):
    for mixed, size in itertools.product(MIXED, SIZES_OF_SCORES):
        made = {name: tensor.cuda() for name, tensor in tensors(size, dtype, mixed).items()}
        found = outcome(made, normalizer=normalizer, causal=True, impl=impl)
        assert all(value.isfinite().all() for value in found.values()), (mixed, size)


# ---- training --------------------------------------------------------------------------------------------------------

LM = ["--task", "language_modeling", "--arch", "mixhead_transformer_lm", "--tokens-per-sample", "16", *LM_SIZES]
LM += [*TRAINING, "--user-dir", PLUGIN, "--dropout", "0"]


def checkpoints(folder):
    """What a training would go on from, or be used"""
    return {path.name: torch.load(path, weights_only=True) for path in Path(folder).glob("checkpoint*.pt")}


def assert_finite(state):
    bad = [name for name, value in state["model"].items() if not value.isfinite().all()]
    assert not bad, bad


def ends_well_or_says_so(found, save):
    """A training that came to its end, or one that says that its numbers are too large; nothing else is saved."""
    saved = checkpoints(save)
    for state in saved.values():
        assert_finite(state)
    if found.status == 0:
        assert "checkpoint_last.pt" in saved
        return "trained"
    last = found.err.strip().splitlines()[-1]
    if last.startswith("fairseq-train: error: the model has NaN or infinite parameters after update "):
        assert "Traceback" not in found.err
        return "not saved"
    assert last == "FloatingPointError: gradients are Nan/Inf", found.err[-2000:]
    return "gradients"


def test_a_model_that_a_step_has_broken_is_not_saved(text_data, tmp_path):
    flags = [*LM, "--optimizer", "sgd", "--save-interval-updates", "1", "--keep-interval-updates", "2"]
    fine = seen("fairseq-train", text_data, *flags, "--max-update", "2", "--save-dir", tmp_path)
    assert fine.status == 0, fine.err
    before = set(checkpoints(tmp_path))
    flags += ["--lr", "3e38", "--weight-decay", "100", "--max-update", "3", "--reset-optimizer"]
    line = refusal("fairseq-train", text_data, *flags, "--save-dir", tmp_path)
    assert line.startswith("fairseq-train: error: the model has NaN or infinite parameters after update ")
    assert f"smaller --lr or --clip-norm may help; {tmp_path}/checkpoint" in line and line.endswith("is whole")
    assert set(checkpoints(tmp_path)) == before
    for state in checkpoints(tmp_path).values():
        assert_finite(state)


def test_a_validation_that_is_nan_is_not_the_best(tmp_path, monkeypatch):
    for maximize, losses, best in ((False, [NAN, 3.0, NAN, 2.0], 2.0), (True, [NAN, 3.0, NAN, 4.0], 4.0)):
        monkeypatch.delattr(checkpoint_utils.save_checkpoint, "best", raising=False)
        flags = {"save_dir": str(tmp_path), "maximize_best_checkpoint_metric": maximize, "no_save": True}
        cfg = SimpleNamespace(**flags, best_checkpoint_metric="loss")
        for loss in losses:
            checkpoint_utils.save_checkpoint(cfg, SimpleNamespace(data_parallel_rank=0), None, loss)
        assert checkpoint_utils.save_checkpoint.best == best


DEFAULT = [("unnormalized", "position-wise"), ("softmax", "none")]


@pytest.mark.parametrize(
    "normalizer, mixing",
    [
        pytest.param(normalizer, mixing, marks=[] if (normalizer, mixing) in DEFAULT else pytest.mark.slow)
        for normalizer in NORMALIZERS
        for mixing in HEAD_MIXINGS
    ],
)
def test_a_training_that_diverges_saves_nothing_that_is_no_number(normalizer, mixing, text_data, tmp_path):
    flags = [*LM, "--attention-normalizer", normalizer, "--head-mixing", mixing, "--max-update", "4"]
    flags += ["--save-interval-updates", "1"]
    for lr in ("30", "1e18"):
        found = seen("fairseq-train", text_data, *flags, "--lr", lr, "--save-dir", tmp_path / lr)
        how = ends_well_or_says_so(found, tmp_path / lr)
        if normalizer == "unnormalized":  # exp of scores of thousands
            assert how == "gradients"


@pytest.mark.slow
def test_a_translation_that_diverges_says_why(translation_data, tmp_path):
    flags = [translation_data, "--user-dir", PLUGIN, "--arch", "mixhead_transformer", *SIZES, *TRAINING, "--lr", "1e18"]
    flags += ["--criterion", "orthogonal_label_smoothed_cross_entropy", "--max-update", "4"]
    result = run("fairseq-train", *flags, "--save-dir", tmp_path, check=False)  # as itself: what is logged, too
    found = Seen(result.returncode, result.stdout, result.stderr)
    assert ends_well_or_says_so(found, tmp_path) == "gradients"
    assert "detected in output of" in found.out + found.err  # by fairseq's NanDetector


@pytest.mark.parametrize("stock", CASES)
def test_the_module_of_the_first_nan_is_found(stock, caplog):
    """fairseq computes the batch again to find it, after it has seen that a gradient is NaN or infinite."""
    made, sample = model(stock), CASES[stock].batch()
    judge = criterion(f"orthogonal_{stock}", rank_weight=0.01)
    judge(made, sample)[0].sum().backward()
    made.zero_grad()
    layer = next(name for name, module in made.named_modules() if name.endswith("layers.1.fc2"))
    made.get_submodule(layer).bias.data[0] = INF
    with caplog.at_level(logging.WARNING), NanDetector(made):
        judge(made, sample)[0].sum().backward()
    said = [record.message for record in caplog.records]
    forward, backward = ([text for text in said if f", {way}" in text] for way in ("forward", "backward"))
    assert len(forward) == 1 and forward[0].startswith(f"Inf detected in output of {layer}, shape")
    assert len(backward) == 1 and "NaN detected in output of" in backward[0]


@pytest.mark.gpu
@pytest.mark.parametrize("normalizer", ["unnormalized", "relu2", "softmax"])
def test_overflow_of_float16_is_fairseqs_to_handle(normalizer, text_data, tmp_path):
    flags = [flag for flag in LM if flag != "--cpu"] + ["--fp16", "--attention-normalizer", normalizer, "--lr", "1"]
    result = run("fairseq-train", text_data, *flags, "--max-update", "20", "--save-dir", tmp_path, check=False)
    assert result.returncode == 0 or "FloatingPointError: Minimum loss scale reached" in result.stderr
    for state in checkpoints(tmp_path).values():
        assert_finite(state)
