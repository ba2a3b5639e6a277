"""What must not matter to the model that comes out: how an update is shared among workers, and the compiler."""

from typing import Any, Dict, List, NamedTuple

import pytest
import torch
from fairseq.criterions import CRITERION_REGISTRY

from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.ops import NORMALIZERS
from tests.commands import BERT as BERT_DIR
from tests.commands import LM_SIZES, ROBERTA_SIZES, SIZES, logged, run, train_in_workers
from tests.criterions.cases import CASES, criterion, lm_batch, model
from tests.helpers import build, shake
from tests.xl import build_xl

COMMON = "--cpu --seed 1 --num-workers 0 --log-format json --log-interval 1 --required-batch-size-multiple 1".split()
COMMON += "--no-epoch-checkpoints --disable-validation --ddp-backend legacy_ddp --max-epoch 2".split()
# Dropout draws its zeros in each worker, for other sentences than in another one's batch.
COMMON += "--dropout 0 --attention-dropout 0 --activation-dropout 0".split()
PENALTIES = "--orthogonal-weight 0.5 --rank-weight 0.01".split()


class Task(NamedTuple):
    """How a criterion is trained, in batches that are no multiple of 4: in the last update of an epoch workers idle."""

    data: str  # a fixture
    flags: List[str]


LM = "--task language_modeling --arch mixhead_transformer_lm --tokens-per-sample 16 --batch-size 4".split()
LM += ["--max-target-positions", "32", *LM_SIZES]
TRANSLATION = ["--arch", "mixhead_transformer", *SIZES, "--label-smoothing", "0.1", "--batch-size", "16"]
ENCODER = ["--pooler-dropout", "0", "--max-positions", "64", *ROBERTA_SIZES]
ROBERTA, BERT = (["--arch", f"mixhead_{name}_base", *ENCODER] for name in ("roberta", "bert"))
WORDS = "--task masked_lm --tokens-per-sample 16 --batch-size 4".split()
SENTENCES = "--task sentence_prediction --num-classes 2 --init-token 0 --separator-token 2 --batch-size 16".split()
PAIRS = "--task bert_pretraining --tokens-per-sample 24 --batch-size 4".split()
QUESTIONS = "--task squad --max-seq-length 48 --doc-stride 16 --max-query-length 24 --batch-size 7".split()
TASKS: Dict[str, Task] = {
    "cross_entropy": Task("text_data", LM),
    "label_smoothed_cross_entropy": Task("translation_data", TRANSLATION),
    "adaptive_loss": Task("text_data", [*LM, "--adaptive-softmax-cutoff", "5,10"]),
    "masked_lm": Task("text_data", [*WORDS, *ROBERTA]),
    "sentence_prediction": Task("labelled_data", [*SENTENCES, *ROBERTA]),
    "bert_pretraining": Task("document_data", [*PAIRS, *BERT]),
    "squad": Task("question_data", [*QUESTIONS, *BERT]),
}


def served():
    """The plugin's criteria, and those of fairseq that it derives from."""
    own = [name for name, kind in CRITERION_REGISTRY.items() if kind.__module__.startswith("mixhead_plugin")]
    return sorted({*own, *(name.removeprefix("orthogonal_") for name in own)})


def parameters(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=True)["model"]


def slow(*case: Any):
    return pytest.param(*case, marks=pytest.mark.slow)


def flags_of(criterion, request):
    task = TASKS[criterion.removeprefix("orthogonal_")]
    penalties = PENALTIES if criterion.startswith("orthogonal_") else []
    return [request.getfixturevalue(task.data), *task.flags, *COMMON, "--criterion", criterion, *penalties]


@pytest.mark.slow  # by default tests/criterions/test_commands.py compares two workers with one
@pytest.mark.parametrize("criterion", served())
def test_workers_and_update_freq_give_the_same_model(criterion, request, tmp_path):
    """Four batches to an update. Without Adam, which makes steps of what rounding has left of a gradient of 0."""
    workers = (1, 2, 4)
    flags = [*flags_of(criterion, request), "--optimizer", "sgd", "--lr", "0.1"]
    runs = {str(n): (n, [*flags, "--update-freq", 4 // n]) for n in workers}
    runs["untrained"] = (1, [*flags, "--max-update", 1, "--lr", 0])
    logs = {name: logged(text) for name, text in train_in_workers(tmp_path, runs).items()}
    trained = {name: parameters(tmp_path / name) for name in runs}

    sizes = [int(log["bsz"]) for log in logs["1"]]
    assert len(sizes) >= 4 and len(set(sizes)) > 1, sizes  # the last update of an epoch lacks batches
    moved = {name: (value - trained["untrained"][name]).abs().max() for name, value in trained["1"].items()}
    least = 1e-6 * max(moved.values())
    assert sum(value > 100 * least for value in moved.values()) > len(moved) / 2
    for n in map(str, workers[1:]):
        assert [int(log["bsz"]) for log in logs[n]] == sizes
        for measure in (key for key in logs[n][0] if key.endswith("loss")):
            found, expected = ([float(log[measure]) for log in logs[which]] for which in (n, "1"))
            assert found == pytest.approx(expected, abs=2e-3), (n, measure)  # the logs have three digits
        # Sums of four gradients end in other bits in another order, and later updates carry on what the first one has
        # rounded: a ten-thousandth of what training did to a parameter, where that is more than rounding itself (it is
        # not for the bias of k_proj, of which softmax knows nothing).
        for name, value in trained["1"].items():
            distance = (trained[n][name] - value).abs().max()
            assert distance <= 1e-4 * moved[name] + least, (n, name, float(distance), float(moved[name]))


@pytest.mark.slow
@pytest.mark.parametrize("criterion", served())
def test_two_workers_are_one_with_twice_the_update_freq_bit_for_bit(criterion, request, tmp_path):
    """Two gradients have one sum."""
    flags = [*flags_of(criterion, request), "--optimizer", "adam", "--lr", "0.01"]
    runs = {str(n): (n, [*flags, "--update-freq", 2 // n]) for n in (1, 2)}
    logs = {name: logged(text) for name, text in train_in_workers(tmp_path, runs).items()}
    alone, together = (parameters(tmp_path / name) for name in runs)
    assert all(torch.equal(together[name], value) for name, value in alone.items())
    assert [log["loss"] for log in logs["2"]] == [log["loss"] for log in logs["1"]]


# ---- precision -------------------------------------------------------------------------------------------------------


def trained_in(precision, device, data, folder):
    flags = [data, *TASKS["label_smoothed_cross_entropy"].flags, *COMMON, "--criterion", "label_smoothed_cross_entropy"]
    flags += ["--optimizer", "adam", "--lr", "0.003", "--max-epoch", "6", "--user-dir", BERT_DIR, "--save-dir", folder]
    flags = [flag for flag in flags if flag != "--cpu" or device == "cpu"]
    result = run("fairseq-train", *flags, *precision)
    return [float(log["loss"]) for log in logged(result.stdout + result.stderr)], parameters(folder)


def assert_nearly(found, expected, dtype):
    """Losses within 2%; and the parameters stay numbers. More cannot be had of 8 or 11 bits."""
    assert found[0] == pytest.approx(expected[0], rel=0.02)
    assert expected[0][-1] < 0.8 * expected[0][0]  # something was learned
    assert all(value.isfinite().all() for value in found[1].values())
    # fairseq saves as float32 what it has trained in half of it
    assert all(torch.equal(value.to(dtype).to(value), value) for value in found[1].values())


@pytest.mark.slow
def test_bf16_trains_nearly_as_float32(translation_data, tmp_path):
    expected = trained_in([], "cpu", translation_data, tmp_path / "float32")
    assert_nearly(trained_in(["--bf16"], "cpu", translation_data, tmp_path / "bf16"), expected, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("precision, dtype", [("--fp16", torch.float16), ("--bf16", torch.bfloat16)])
def test_half_precision_on_a_gpu_trains_nearly_as_float32(precision, dtype, translation_data, tmp_path):
    expected = trained_in([], "cuda", translation_data, tmp_path / "float32")
    assert_nearly(trained_in([precision], "cuda", translation_data, tmp_path / "half"), expected, dtype)


# ---- the compiler ----------------------------------------------------------------------------------------------------


def losses_of(which: str, **flags: Any):
    """A model, and the function from it, or what the compiler made of it, to the loss of a batch."""
    if which in CASES:
        made, sample = model(which, **flags), CASES[which].batch()
        return made, lambda compiled: criterion(which)(compiled, sample)[0].sum()
    made = build_xl(**flags) if which == "transformer_xl" else shake(build(f"mixhead_{which}", **flags))
    batch = lm_batch()
    source, target = batch["net_input"]["src_tokens"], batch["target"]

    def loss(compiled):
        output = compiled(source, window=0) if which == "transformer_xl" else compiled(source)
        probabilities = made.get_normalized_probs(output, log_probs=True)
        return torch.nn.functional.nll_loss(probabilities.flatten(0, 1), target.flatten())

    return made.train(), loss


# Each entry of the tables once: a mixing and a normalizer are graphs one after the other.
VARIANTS = [
    *({"attention_normalizer": name} for name in NORMALIZERS),
    *({"head_mixing": name} for name in HEAD_MIXINGS),
]
ONE_LAYER = {"encoder_layers": 1, "decoder_layers": 1}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "which, flags, backend",
    [
        ("cross_entropy", {"attention_normalizer": "l2"}, "aot_eager"),
        *(slow(which, {}, "inductor") for which in (*CASES, "synthesizer_lm", "transformer_xl")),
        *(slow("cross_entropy", flags, "aot_eager") for flags in VARIANTS),
        *(slow("cross_entropy", {"attention_impl": impl}, "inductor") for impl in ("reference", "blockwise")),
    ],
)
def test_a_compiled_model_has_the_same_loss_and_gradients(which, flags, backend):
    """Outputs and gradients differ as sums in another order do."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    made, loss = losses_of(which, **({} if which == "transformer_xl" else ONE_LAYER), **flags)
    results = []
    for one in (made, torch.compile(made, backend=backend)):
        made.zero_grad()
        value = loss(one)
        value.backward()
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in made.named_parameters()}
        results.append((value.detach(), grads))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # something was compiled
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-5)
    for name, gradient in results[0][1].items():
        size = float(gradient.abs().max())
        torch.testing.assert_close(results[1][1][name], gradient, rtol=1e-4, atol=1e-5 + 1e-5 * size, msg=name)
