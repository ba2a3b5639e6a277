"""Test pruning: the order of heads, the scores, and the smaller checkpoint."""

import json
import shlex
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils

from mixhead_plugin.fairseq.analysis import importance, prune, scores
from mixhead_plugin.fairseq.analysis.adapter import prunable
from mixhead_plugin.fairseq.analysis.loading import batches, load
from mixhead_plugin.fairseq.analysis.profile import worse_by
from mixhead_plugin.fairseq.analysis.smaller import write_smaller
from mixhead_plugin.heads.ablation import without
from mixhead_plugin.heads.choosing import KeptHeads, least_important
from mixhead_plugin.heads.importance import NORMALIZATIONS
from tests.commands import LM_SIZES, PLUGIN, WHOLE_SETS, run, train

CHECKPOINTS = ["lm_checkpoint", "translation_checkpoint", "fairseq_translation_checkpoint"]


def random_importance(loaded):
    generator = torch.Generator().manual_seed(5)
    return {
        attention.name: {
            stage: torch.rand(number, generator=generator)
            for stage, number in attention.heads.items()
        }
        for attention in prunable(loaded)
    }


def cut(loaded, file, fraction=0.4):
    """Write the smaller checkpoint; return the removed heads."""
    removed = least_important(random_importance(loaded), fraction)
    attentions = prunable(loaded)
    write_smaller(loaded, attentions, prune.kept_heads(attentions, removed), str(file))
    return removed


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_the_smaller_checkpoint_computes_what_the_masked_model_computes(
    checkpoint, request, tmp_path
):
    loaded = load(request.getfixturevalue(checkpoint), cpu=True)
    removed = cut(loaded, tmp_path / "pruned.pt")
    smaller = load(str(tmp_path / "pruned.pt"), cpu=True)
    (batch,) = batches(loaded, limit=1, batch_size=4)
    loaded.model.double()
    smaller.model.double()
    with torch.no_grad():
        whole = loaded.model(**batch["net_input"])[0]
        found = smaller.model(**batch["net_input"])[0]
        with without(prunable(loaded), removed):
            masked = loaded.model(**batch["net_input"])[0]
    torch.testing.assert_close(found, masked, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(masked, whole)
    parameters = [sum(p.numel() for p in m.model.parameters()) for m in (loaded, smaller)]
    assert parameters[1] < parameters[0]
    again = cut(smaller, tmp_path / "again.pt")  # of heads that are no longer as many everywhere
    with torch.no_grad(), without(prunable(smaller), again):
        masked = smaller.model(**batch["net_input"])[0]
        found = load(str(tmp_path / "again.pt"), cpu=True).model.double()(**batch["net_input"])[0]
    torch.testing.assert_close(found, masked, rtol=1e-10, atol=1e-10)


def test_the_file_is_a_checkpoint_of_fairseq_s_with_the_heads_in_its_config(
    fairseq_lm_checkpoint, tmp_path
):
    loaded = load(fairseq_lm_checkpoint)
    kept = {
        "decoder.layers.0.self_attn": KeptHeads((1,), (1,)),
        "decoder.layers.1.self_attn": KeptHeads((0, 2, 3), (0, 2, 3)),
    }
    file = str(tmp_path / "pruned.pt")
    write_smaller(loaded, prunable(loaded), kept, file)
    (model,), cfg, _ = checkpoint_utils.load_model_ensemble_and_task([file])
    assert cfg.model._name == "mixhead_transformer_lm_gpt"
    assert (cfg.model.heads_per_layer, cfg.model.head_dim) == ("decoder-self=1,3", 4)
    assert model.decoder.layers[0].self_attn.q_proj.weight.shape == (4, 16)
    assert model.decoder.layers[1].self_attn.out_proj.weight.shape == (16, 12)
    state = torch.load(file, weights_only=True)
    assert "last_optimizer_state" not in state and state["args"] is None
    record = state["model"]._metadata["decoder.layers.1.self_attn"]
    assert (record["attention_heads"], record["mixed_heads"]) == (3, 3)


def test_a_larger_loss_and_a_smaller_bleu_are_worse():
    steps = [SimpleNamespace(score=score) for score in (4.0, 5.0, 3.0)]
    assert worse_by(steps, "loss") == [0, 25, -25] and worse_by(steps, "bleu") == [0, -25, 25]


def test_each_step_leaves_out_the_least_important_heads_and_is_scored_so(numbers, lm_checkpoint):
    content, out = numbers("prune", lm_checkpoint)
    (found,) = content["checkpoints"]
    removed = [step["removed"] for step in found["steps"]]
    # of 16 heads, one of each kind stays in each of the two layers
    assert removed == [0, 2, 4, 6, 8, 10, 12]
    loaded = load(lm_checkpoint)
    weights = {
        e["name"]: {k: torch.tensor(e[k]) for k in ("source", "mixed")} for e in found["importance"]
    }
    order = least_important(NORMALIZATIONS["layer"](weights), 0.5)
    with without(prunable(loaded), order):
        expected = scores.score(loaded, list(batches(loaded)), ["loss"])["loss"]
    assert found["steps"][4]["score"] == pytest.approx(expected, rel=1e-6)
    assert f"50.0% (8)  {expected:.4f}" in out
    assert found["label"] == "mixhead_lm"  # of no updates


def test_checkpoints_of_equal_updates_are_refused_before_they_are_weighed(
    analysis, lm_checkpoint, fairseq_lm_checkpoint, monkeypatch, tmp_path
):
    paths = []
    for number, path in enumerate([lm_checkpoint, fairseq_lm_checkpoint]):
        state = torch.load(path, weights_only=False)
        state["optimizer_history"][-1]["num_updates"] = 500
        paths.append(tmp_path / f"{number}.pt")
        torch.save(state, paths[-1])
    monkeypatch.setattr(prune, "importances", None)
    status, _, errors = analysis("prune", *paths, "--output", tmp_path)
    assert status == 1
    assert "two inputs have the same name, 500 updates,500 updates; name them by" in errors


@pytest.mark.parametrize("flag", ["--subset", "--importance-subset"])
def test_a_set_that_is_not_there_is_refused_before_heads_are_weighed(
    flag, analysis, lm_checkpoint, monkeypatch, tmp_path
):
    monkeypatch.setattr(importance, "weigh", None)
    status, _, errors = analysis("prune", lm_checkpoint, flag, "tset", "--output", tmp_path)
    assert status == 1
    assert f"error: {flag} tset: Dataset not found: tset" in errors


def test_a_model_that_cannot_be_cut_is_refused_before_heads_are_weighed(
    analysis, write_checkpoint, text_data, monkeypatch, tmp_path
):
    monkeypatch.setattr(importance, "weigh", None)
    checkpoint = write_checkpoint("uncut", text_data, "mixhead_synthesizer_lm", *LM)
    save = tmp_path / "pruned.pt"
    status, _, errors = analysis("prune", checkpoint, "--fraction", 0.5, "--save", save)
    assert status == 1
    assert "belongs to SynthesizerAttention; its heads can only be masked" in errors


@pytest.mark.usefixtures("numbers_alone")
def test_a_part_is_cut_off_and_reported(analysis, lm_checkpoint, tmp_path):
    file = tmp_path / "new" / "pruned.pt"  # in a folder that does not exist yet
    status, out, err = analysis(
        "prune", lm_checkpoint, "--fraction", 0.5, "--save", file, "--output", tmp_path
    )
    assert status == 0, err
    found = json.loads((tmp_path / "prune-save.json").read_text())
    assert found["pruned"]["loss"] == pytest.approx(found["masked"]["loss"], rel=1e-5)
    assert found["pruned"]["loss"] != pytest.approx(found["whole"]["loss"], rel=1e-5)
    assert (found["whole"]["heads"], found["pruned"]["heads"], found["pruned"]["source heads"]) == (
        8,
        4,
        4,
    )
    assert found["pruned"]["parameters"] < found["whole"]["parameters"]
    assert found["pruned"]["forward_s"] > 0
    words = shlex.split(
        out.splitlines()[
            [line.startswith("to train on") for line in out.splitlines()].index(True) + 1
        ]
    )
    assert words[:2] == ["--user-dir", "$(python -m mixhead_plugin)"]
    assert words[words.index("--heads-per-layer") + 1] == found["heads_per_layer"]
    assert words[-4:] == [
        "--finetune-from-model",
        str(file),
        "--save-dir",
        str(tmp_path / "new" / "pruned-finetuned"),
    ]


XL = """
    --task truncated_bptt_lm --tokens-per-sample 8 --batch-size 2 --n-layer 2 --d-model 16 --n-head
    4 --d-head 4 --d-inner 16 --mem-len 8 --cutoffs 8
""".split()
LM = ["--task", "language_modeling", "--tokens-per-sample", "16", *LM_SIZES]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch, flags, obstacle",
    [
        ("mixhead_transformer_xl", XL, "belongs to SegmentAttention; its heads can only be masked"),
        (
            "mixhead_synthesizer_lm",
            LM,
            "belongs to SynthesizerAttention; its heads can only be masked",
        ),
        (
            "mixhead_transformer_lm",
            [*LM, "--relative-position", "t5", "--relative-gain", "3"],
            None,
        ),
        (
            "mixhead_transformer_lm",
            [*LM, "--criterion", "adaptive_loss", "--adaptive-softmax-cutoff", "8"],
            None,
        ),
        ("transformer_lm", LM, None),  # its config is a DictConfig without the plugin's flags
    ],
)
def test_other_models_are_weighed_masked_and_cut_or_refused(
    arch, flags, obstacle, analysis, write_checkpoint, text_data, tmp_path
):
    loss = ["--ddp-backend", "legacy_ddp"]
    checkpoint = write_checkpoint("other", text_data, arch, *flags, *loss)
    common = ["--output", tmp_path / "found", "--cpu", "--batch-size", 2]
    for command in ("importance", "prune"):
        status, _, err = analysis(command, checkpoint, *common)
        assert status == 0, err
    steps = json.loads((tmp_path / "found" / "prune.json").read_text())["checkpoints"][0]["steps"]
    numbers = [step["removed"] for step in steps]
    assert numbers == (
        [0, 2, 4, 6, 8, 10, 12] if arch.startswith("mixhead") else [0, 1, 2, 3, 4, 5, 6]
    )
    status, _, err = analysis(
        "prune", checkpoint, "--fraction", 0.5, "--save", tmp_path / "pruned.pt", *common
    )
    assert status == (1 if obstacle else 0), err
    assert obstacle is None or (obstacle in err and err.count("\n") == 1)
    assert (tmp_path / "pruned.pt").exists() == (obstacle is None)


@pytest.mark.slow
def test_fairseq_s_commands_take_the_smaller_checkpoint(
    lm_checkpoint, text_data, analysis, tmp_path
):
    file = tmp_path / "pruned.pt"
    status, _, err = analysis(
        "prune", lm_checkpoint, "--fraction", 0.4, "--save", file, "--output", tmp_path
    )
    assert status == 0, err
    found = json.loads((tmp_path / "prune-save.json").read_text())
    plugin = [
        text_data,
        f"--user-dir={PLUGIN}",
        f"--path={file}",
        "--cpu",
        "--gen-subset=valid",
        *WHOLE_SETS,
    ]
    result = run("fairseq-eval-lm", *plugin, "--tokens-per-sample", 16)
    assert f"Loss (base 2): {found['masked']['loss']:.4f}" in result.stdout + result.stderr
    flags = [
        *LM,
        "--heads-per-layer",
        found["heads_per_layer"],
        "--head-dim=4",
        f"--finetune-from-model={file}",
    ]
    train(text_data, "mixhead_transformer_lm", tmp_path / "save", *flags)
    trained = load(str(tmp_path / "save" / "checkpoint_last.pt"))
    assert trained.cfg.model.heads_per_layer == found["heads_per_layer"]
