"""What every training of a BERT has in common: it resumes, two workers are as good as one, half precision learns."""

from argparse import Namespace
from types import SimpleNamespace
from typing import List, NamedTuple

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import build_model

from tests import squad
from tests.commands import PLUGIN, ROBERTA_SIZES, WHOLE_SETS, as_flags, logged, several, two_workers
from tests.helpers import TINY
from tests.topics import write_documents, write_kinds

COMMON = ["--user-dir", PLUGIN, *ROBERTA_SIZES, *WHOLE_SETS, "--seed", "1", "--log-format", "json"]
COMMON += "--log-interval 1 --no-epoch-checkpoints --ddp-backend legacy_ddp --optimizer adam --lr 0.003".split()
ALONE = ["--cpu", "--num-workers=0", "--disable-validation", "--save-interval=100"]
NO_DROPOUT = as_flags(squad.DROPOUT)


class Training(NamedTuple):
    """By a task and the criterion of its name."""

    flags: List[str]
    scores: List[str]  # in validation


TRAININGS = {
    "bert_pretraining": Training(
        ["--tokens-per-sample=24", "--max-positions=64", "--batch-size=16"],
        ["loss", "mlm_loss", "nsp_loss", "nsp_accuracy"],
    ),
    "sentence_prediction": Training(
        ["--num-classes=2", "--init-token=0", "--max-positions=64", "--batch-size=16"], ["loss", "accuracy"]
    ),
    # five batches an epoch: one of two workers has but two of them
    "squad": Training([*as_flags(squad.WINDOWS), "--batch-size=7"], ["loss", "exact_match", "f1"]),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """By task a folder."""
    folder = tmp_path_factory.mktemp("trainings")
    documents = write_documents(folder)
    return {
        "bert_pretraining": documents,
        "sentence_prediction": write_kinds(folder / "kinds", documents / "dict.txt"),
        "squad": squad.write_data(folder / "questions"),
    }


def training(data, task, save, *flags, arch="mixhead_bert_base"):
    flags = ["--task", task, "--criterion", task, "--arch", arch, *COMMON, *TRAININGS[task].flags, *flags]
    return ["fairseq-train", data[task], *flags, "--save-dir", data["squad"].parent / save]


def saved(data, name):
    return torch.load(data["squad"].parent / name / "checkpoint_last.pt", weights_only=True)["model"]


def as_published(state):
    """The parameters of fairseq's RoBERTa as its published checkpoints name them, with one projection for all three."""
    published = {}
    for name, tensor in state.items():
        name = name.replace("encoder.", "decoder.", 1).replace("layernorm_embedding", "emb_layer_norm")
        published[name] = tensor
    for name in [name for name in published if "q_proj" in name]:
        parts = [published.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        published[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
    return published


@pytest.fixture(scope="module")
def roberta(data):
    """A checkpoint of fairseq's RoBERTa in the published layout, and its parameters in the present one."""
    words = Dictionary.load(str(data["bert_pretraining"] / "dict.txt"))
    words.add_symbol("<mask>")
    args = Namespace(arch="roberta_base", task="masked_lm", criterion="masked_lm", **TINY["roberta_base"])
    torch.manual_seed(5)
    state = build_model(args, SimpleNamespace(source_dictionary=words)).state_dict()
    history = [{"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}]
    iterator = {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}
    checkpoint = {"args": args, "model": as_published(state), "optimizer_history": history}
    path = data["squad"].parent / "roberta.pt"
    torch.save({**checkpoint, "extra_state": {"train_iterator": iterator}}, path)
    return path, state


@pytest.fixture(scope="module")
def outputs(data, roberta):
    """What fairseq-train says, by task and what was asked of it."""
    commands = {}
    for task in TRAININGS:
        # dropout on, and the mixing at a rate of its own
        resumed = [*ALONE, "--dropout=0.2", "--attention-dropout=0.2", "--mixing-lr-scale=4"]
        parts = training(data, task, f"{task}.parts", *resumed)
        if task == "squad":  # a process of its own that reads must change nothing
            parts += ["--num-workers=1"]
        commands[task, "whole"] = training(data, task, f"{task}.whole", *resumed, "--max-update=8")
        commands[task, "first"] = [*parts, "--max-update=4"]
        commands[task, "second"] = [*parts, "--max-update=8"]
        half = [*ALONE, "--bf16", "--fp16-no-flatten-grads", "--mixing-lr-scale=4", "--lr=0.01", *NO_DROPOUT]
        commands[task, "bf16"] = training(data, task, f"{task}.bf16", *half, "--max-update=16")
    for arch in ("roberta_base", "mixhead_roberta_base"):
        flags = [*ALONE, "--finetune-from-model", roberta[0], "--optimizer=sgd", "--max-update=1"]
        flags += ["--separator-token=2", "--lr=0.1", *NO_DROPOUT]
        commands["sentence_prediction", arch] = training(data, "sentence_prediction", arch, *flags, arch=arch)
    return dict(zip(commands, several(*commands.values()), strict=True))


def losses(output):
    return [float(log["loss"]) for log in logged(output)]


@pytest.mark.parametrize("task", TRAININGS)
def test_training_resumed_goes_on_where_it_stopped(task, outputs):
    whole = losses(outputs[task, "whole"])
    assert len(whole) == 8
    assert losses(outputs[task, "first"]) + losses(outputs[task, "second"]) == whole


def check_half_precision(output, state, dtype):
    found = losses(output)
    assert len(found) == 16 and sum(found[-4:]) < 0.9 * sum(found[:4])
    for name, value in state.items():
        assert value.isfinite().all(), name
        assert torch.equal(value, value.to(dtype).to(value.dtype)), name  # what was trained had no more digits


@pytest.mark.parametrize("task", TRAININGS)
def test_bf16_learns(task, outputs, data):
    check_half_precision(outputs[task, "bf16"], saved(data, f"{task}.bf16"), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "amp"])
@pytest.mark.parametrize("task", TRAININGS)
def test_half_precision_learns_on_a_gpu(task, precision, data):
    flags = [f"--{precision}", "--fp16-no-flatten-grads", "--fp16-init-scale=4", "--mixing-lr-scale=4", "--lr=0.01"]
    flags += [*NO_DROPOUT, "--num-workers=0", "--max-update=16", "--distributed-world-size=1"]
    (output,) = several(training(data, task, f"{task}.{precision}", *flags))
    # with amp the parameters stay in float32
    kept = torch.float16 if precision == "fp16" else torch.float32
    check_half_precision(output, saved(data, f"{task}.{precision}"), kept)


@pytest.mark.slow
@pytest.mark.parametrize("task", TRAININGS)
def test_two_workers_train_as_one(task, data):
    # without Adam, which makes much of the rounding of gradients near 0
    flags = ["--cpu", "--optimizer=sgd", "--lr=0.1", "--max-update=6", "--num-workers=0", *NO_DROPOUT]
    one, two = f"{task}.one", f"{task}.two"
    (alone,) = several(training(data, task, one, *flags, "--update-freq=2"))
    both = two_workers(*training(data, task, two, *flags)[1:])
    assert losses(both) == pytest.approx(losses(alone), abs=2e-3)
    assert losses(alone)[-1] < losses(alone)[0]
    expected, found = (logged(output, "valid")[-1] for output in (alone, both))
    for score in TRAININGS[task].scores:
        assert float(found[f"valid_{score}"]) == pytest.approx(float(expected[f"valid_{score}"]), abs=2e-3), score
    ours = saved(data, two)
    for name, value in saved(data, one).items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_a_published_roberta_goes_in_as_it_is(outputs, roberta, data):
    """Its first loss, and the parameters after the first step, are those of fairseq's own architecture."""
    logs = [outputs["sentence_prediction", arch] for arch in ("roberta_base", "mixhead_roberta_base")]
    assert all("Loaded pretrained" in log or "loading pretrained model" in log.lower() for log in logs)
    stock, mixed = map(losses, logs)
    assert len(stock) == 1 and mixed == stock
    stock, mixed = (saved(data, arch) for arch in ("roberta_base", "mixhead_roberta_base"))
    for name, value in stock.items():
        torch.testing.assert_close(mixed[name], value, rtol=1e-4, atol=1e-6, msg=name)
    mixing = [name for name in mixed if ".head_mixing." in name]
    assert len(mixing) == 4 and mixed.keys() - mixing == stock.keys()
    published = roberta[1]
    for name in (name for name in published if "proj" in name):
        step = (mixed[name] - published[name]).norm()
        assert 0 < step < 0.5 * published[name].norm() or name.endswith("bias"), name
    head = "encoder.lm_head.dense.weight"  # not asked for here, so it stays
    assert torch.equal(mixed[head], published[head])
