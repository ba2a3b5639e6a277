"""Train the same model in other ways: with more workers, in half precision, and compiled."""

from pathlib import Path

import pytest
import torch

from mixhead_plugin.ops import NORMALIZERS
from mixhead_plugin.parts import PARTS
from tests.commands import PLUGIN, logged, run, two_workers
from tests.fairseq.criterions.cases import CASES, criterion, lm_batch, model
from tests.helpers import build, shake
from tests.launcher import locate
from tests.robustness.tasks import TASKS, TRANSLATION
from tests.xl import build_xl

COMMON = (
    "--cpu --seed 1 --num-workers 0 --log-format json --log-interval 1 "
    "--required-batch-size-multiple 1"
).split()
COMMON += (
    "--no-epoch-checkpoints --disable-validation --ddp-backend legacy_ddp --max-epoch 2".split()
)
COMMON += ["--optimizer", "adam", "--lr", "0.01", "--user-dir", PLUGIN]
# Dropout draws its zeros in each worker, for other sentences than in another one's batch.
COMMON += "--dropout 0 --attention-dropout 0 --activation-dropout 0".split()
PENALTIES = "--orthogonal-weight 0.5 --rank-weight 0.01".split()


def parameters(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=True)["model"]


# by default tests/fairseq/criterions/test_data_parallel.py compares the gradients of two workers
@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "orthogonal_"])
@pytest.mark.parametrize("name", TASKS)
def test_two_workers_are_one_with_twice_the_update_freq_bit_for_bit(
    name, prefix, request, tmp_path
):
    """The sum of two gradients has no order."""
    data, flags = TASKS[name]
    flags = [request.getfixturevalue(data), *flags, *COMMON, "--criterion", f"{prefix}{name}"]
    flags += PENALTIES if prefix else []
    result = run("fairseq-train", *flags, "--update-freq", "2", "--save-dir", tmp_path / "alone")
    outputs = (
        result.stdout + result.stderr,
        two_workers(*flags, "--save-dir", tmp_path / "together"),
    )
    alone, together = (parameters(tmp_path / name) for name in ("alone", "together"))
    assert all(torch.equal(together[name], value) for name, value in alone.items())
    logs = [[(log["loss"], log["bsz"]) for log in logged(output)] for output in outputs]
    # the last update of an epoch lacks a batch
    assert logs[0] == logs[1] and len({size for _, size in logs[0]}) > 1


# ---- precision ---------------------------------------------------------------------------------


def trained_in(precision, device, data, folder):
    flags = [data, *TRANSLATION, *COMMON, "--criterion", "label_smoothed_cross_entropy"]
    flags += ["--lr", "0.003", "--max-epoch", "6", "--save-dir", folder]
    flags = [flag for flag in flags if flag != "--cpu" or device == "cpu"]
    # On an overflow fairseq's Trainer asks for a GPU, and so does its flat copy of the parameters.
    result = run(
        "fairseq-train", *flags, *precision, "--fp16-init-scale", "1", "--fp16-no-flatten-grads"
    )
    return logged(result.stdout + result.stderr), parameters(folder)


def assert_nearly(found, expected, dtype):
    """Compare losses within 2%: 8 or 11 bits allow no more. Parameters must be finite."""
    losses, right = ([float(log["loss"]) for log in logs] for logs in (found[0], expected[0]))
    assert losses == pytest.approx(right, rel=0.02)
    assert right[-1] < 0.8 * right[0]  # something was learned
    assert all(value.isfinite().all() for value in found[1].values())
    # fairseq saves half-precision parameters as float32
    assert all(torch.equal(value.to(dtype).to(value), value) for value in found[1].values())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["--bf16", "--fp16", "--memory-efficient-fp16"])
def test_half_precision_trains_nearly_as_float32(precision, translation_data, tmp_path):
    expected = trained_in([], "cpu", translation_data, tmp_path / "float32")
    found = trained_in([precision], "cpu", translation_data, tmp_path / "half")
    assert_nearly(found, expected, torch.bfloat16 if precision == "--bf16" else torch.float16)


@pytest.mark.gpu
@pytest.mark.skipif(
    not Path(locate("fairseq-train")).exists(), reason="no command fairseq-train beside this Python"
)
@pytest.mark.parametrize(
    "precision, dtype", [("--fp16", torch.float16), ("--bf16", torch.bfloat16)]
)
def test_half_precision_on_a_gpu_trains_nearly_as_float32(
    precision, dtype, translation_data, tmp_path
):
    expected = trained_in([], "cuda", translation_data, tmp_path / "float32")
    assert_nearly(
        trained_in([precision], "cuda", translation_data, tmp_path / "half"), expected, dtype
    )


# ---- the compiler ------------------------------------------------------------------------------


def losses_of(which, **flags):
    """Return a model, and a function from its compiled form to the loss of a batch."""
    if which in CASES:
        made, sample = model(which, **flags), CASES[which].batch()
        return made, lambda compiled: criterion(which)(compiled, sample)[0].sum()
    made = (
        build_xl(**flags)
        if which == "transformer_xl"
        else shake(build(f"mixhead_{which}", **flags))
    )
    batch = lm_batch()
    source, target = batch["net_input"]["src_tokens"], batch["target"]

    def loss(compiled):
        output = compiled(source, window=0) if which == "transformer_xl" else compiled(source)
        probabilities = made.get_normalized_probs(output, log_probs=True)
        return torch.nn.functional.nll_loss(probabilities.flatten(0, 1), target.flatten())

    return made.train(), loss


SLOW = [
    *((which, {}, "inductor") for which in (*TASKS, "synthesizer_lm", "transformer_xl")),
    *(("cross_entropy", {"attention_normalizer": name}, "aot_eager") for name in NORMALIZERS),
    *(
        ("cross_entropy", {option: name}, "aot_eager")
        for option, table in PARTS.items()
        for name in table
    ),
    *(
        ("cross_entropy", {"attention_impl": impl}, "inductor")
        for impl in ("reference", "blockwise")
    ),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "which, flags, backend",
    [
        ("cross_entropy", {"attention_normalizer": "l2"}, "eager"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_a_compiled_model_has_the_same_loss_and_gradients(which, flags, backend):
    """Allow the differences of sums in another order."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layers = {} if which == "transformer_xl" else {"encoder_layers": 1, "decoder_layers": 1}
    made, loss = losses_of(which, **layers, **flags)
    results = []
    for one in (made, torch.compile(made, backend=backend)):
        made.zero_grad()
        value = loss(one)
        value.backward()
        grads = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in made.named_parameters()
        }
        results.append((value.detach(), grads))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # something was compiled
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-5)
    for name, gradient in results[0][1].items():
        size = float(gradient.abs().max())
        torch.testing.assert_close(
            results[1][1][name], gradient, rtol=1e-4, atol=1e-5 + 1e-5 * size, msg=name
        )
