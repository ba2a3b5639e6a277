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
from tests.transformer_xl import build_xl

COMMON = [
    f"--user-dir={PLUGIN}",
    "--cpu",
    "--seed=1",
    "--num-workers=0",
    "--required-batch-size-multiple=1",
    "--ddp-backend=legacy_ddp",
    "--max-epoch=2",
    "--optimizer=adam",
    "--lr=0.01",
    # Dropout draws its zeros in each worker, for other sentences than in another one's batch.
    "--dropout=0",
    "--attention-dropout=0",
    "--activation-dropout=0",
    "--no-epoch-checkpoints",
    "--disable-validation",
    "--log-format=json",
    "--log-interval=1",
]
PENALTIES = ["--orthogonal-weight=0.5", "--rank-weight=0.01"]


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
    flags = [request.getfixturevalue(data), *flags, *COMMON, f"--criterion={prefix}{name}"]
    if prefix:
        flags += PENALTIES
    one = run("fairseq-train", *flags, "--update-freq=2", "--save-dir", tmp_path / "alone")
    two = two_workers(*flags, "--save-dir", tmp_path / "together")

    alone = parameters(tmp_path / "alone")
    together = parameters(tmp_path / "together")
    assert all(torch.equal(together[name], value) for name, value in alone.items())

    logs = losses_and_sizes(one.stdout + one.stderr)
    assert losses_and_sizes(two) == logs
    assert len({size for _, size in logs}) > 1  # the last update of an epoch lacks a batch


def losses_and_sizes(output):
    """Return the loss and the number of sentences of each update."""
    return [(log["loss"], log["bsz"]) for log in logged(output)]


# ---- precision ---------------------------------------------------------------------------------


def trained_in(precision, device, data, folder):
    """Return the log of a training, and its parameters."""
    flags = [data, *TRANSLATION, *COMMON, "--criterion=label_smoothed_cross_entropy"]
    flags += ["--lr=0.003", "--max-epoch=6", f"--save-dir={folder}", *precision]
    # On an overflow fairseq's Trainer asks for a GPU, and so does its flat copy of the parameters.
    flags += ["--fp16-init-scale=1", "--fp16-no-flatten-grads"]
    if device != "cpu":
        flags.remove("--cpu")
    result = run("fairseq-train", *flags)
    return logged(result.stdout + result.stderr), parameters(folder)


def assert_nearly(found, expected, dtype):
    """Compare losses within 2%: 8 or 11 bits allow no more. Parameters must be finite."""
    logs, state = found
    expected_logs, _ = expected
    losses = [float(log["loss"]) for log in logs]
    right = [float(log["loss"]) for log in expected_logs]
    assert losses == pytest.approx(right, rel=0.02)
    assert right[-1] < 0.8 * right[0]  # something was learned
    for value in state.values():
        assert value.isfinite().all()
        # fairseq saves half-precision parameters as float32
        assert torch.equal(value.to(dtype).to(value), value)


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
        made = model(which, **flags)
        sample = CASES[which].batch()
        return made, lambda compiled: criterion(which)(compiled, sample)[0].sum()

    options = {}
    if which == "transformer_xl":
        made = build_xl(**flags)
        options["window"] = 0
    else:
        made = shake(build(f"mixhead_{which}", **flags))
    batch = lm_batch()
    source = batch["net_input"]["src_tokens"]
    target = batch["target"]

    def loss(compiled):
        output = compiled(source, **options)
        probabilities = made.get_normalized_probs(output, log_probs=True)
        return torch.nn.functional.nll_loss(probabilities.flatten(0, 1), target.flatten())

    return made.train(), loss


def slow_cases():
    """Yield every model, value of a table and implementation, with the compiler's backend."""
    for which in (*TASKS, "synthesizer_lm", "transformer_xl"):
        yield which, {}, "inductor"
    for option, table in {"attention_normalizer": NORMALIZERS, **PARTS}.items():
        for name in table:
            yield "cross_entropy", {option: name}, "aot_eager"
    for impl in ("reference", "blockwise"):
        yield "cross_entropy", {"attention_impl": impl}, "inductor"


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in slow_cases()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "which, flags, backend",
    [("cross_entropy", {"attention_normalizer": "l2"}, "eager"), *SLOW],
)
def test_a_compiled_model_has_the_same_loss_and_gradients(which, flags, backend):
    """Allow the differences of sums in another order."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layers = {} if which == "transformer_xl" else {"encoder_layers": 1, "decoder_layers": 1}
    made, loss = losses_of(which, **layers, **flags)
    parameters = dict(made.named_parameters())

    def outcome(callable_model):
        value = loss(callable_model)
        grads = torch.autograd.grad(
            value, list(parameters.values()), allow_unused=True, materialize_grads=True
        )
        return value.detach(), dict(zip(parameters, grads))

    expected, wanted = outcome(made)
    value, grads = outcome(torch.compile(made, backend=backend))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # something was compiled
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in wanted.items():
        close = 1e-5 + 1e-5 * float(gradient.abs().max())
        torch.testing.assert_close(grads[name], gradient, rtol=1e-4, atol=close, msg=name)
