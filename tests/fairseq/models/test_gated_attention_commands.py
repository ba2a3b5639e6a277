"""Gated attention units in fairseq's commands."""

import re

import pytest
import torch

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.fold import fold
from tests.commands import PLUGIN, TRAINING, WHOLE_SETS, as_flags, logged, preprocess
from tests.helpers import OWN, run_here

TEXT = ["--task", "language_modeling", "--tokens-per-sample", "16", "--sample-break-mode", "eos"]


@pytest.fixture(scope="module")
def checkpoint(text_data, tmp_path_factory):
    """Return a trained language model."""
    save = tmp_path_factory.mktemp("gau")
    sizes = as_flags(OWN["gau_lm"], "decoder") + as_flags(OWN["gau_lm"], "gau")
    flags = ["--user-dir", PLUGIN, "--arch", "l2_gau_lm", "--max-update", "3", *TRAINING]
    run_here("fairseq-train", text_data, *flags, *sizes, *TEXT, "--save-dir", save)
    return save / "checkpoint_last.pt"


def test_eval_lm_gives_the_loss_of_the_validation(text_data, checkpoint):
    flags = ["--user-dir", PLUGIN, "--path", checkpoint, "--max-tokens", "400", "--cpu"]
    log = run_here(
        "fairseq-eval-lm", text_data, *flags, *TEXT, *WHOLE_SETS, "--gen-subset", "valid"
    )
    loss = float(re.search(r"Loss \(base 2\): ([\d.]+)", log)[1])
    state = torch.load(checkpoint, weights_only=True)
    assert loss == pytest.approx(state["extra_state"]["val_loss"], abs=2e-3)


def test_eval_lm_reads_longer_texts_than_in_training(text_data, corpus, checkpoint):
    longer = ["--tokens-per-sample", "64", "--sample-break-mode", "none"]
    longer += ["--model-overrides", "{'max_target_positions': 64}"]
    flags = ["--user-dir", PLUGIN, "--path", checkpoint, "--max-tokens", "400", "--cpu"]
    log = run_here(
        "fairseq-eval-lm", text_data, *flags, *TEXT, *longer, *WHOLE_SETS, "--gen-subset", "valid"
    )
    lines = (corpus / "valid.en").read_text().splitlines()
    words = sum(len([*line.split(), "</s>"]) for line in lines)
    assert f"Evaluated {words:,} tokens" in log  # fairseq leaves out what is too long


def test_generate_goes_on_from_a_prefix(text_data, checkpoint, capsys):
    flags = ["--user-dir", PLUGIN, "--path", checkpoint, "--beam", 2, "--cpu", "--batch-size", 15]
    short = ["--prefix-size", 1, "--max-len-b", 3]
    run_here("fairseq-generate", text_data, *flags, *TEXT, *WHOLE_SETS, *short)
    printed = capsys.readouterr().out
    sources = dict(re.findall(r"^S-(\d+)\t(.*)$", printed, re.M))
    hypotheses = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", printed, re.M))
    assert len(hypotheses) == len(sources) > 5
    assert all(hypotheses[i].split()[0] == sources[i].split()[0] for i in sources)


def test_a_masked_language_model_trains_and_becomes_a_classifier(text_data, corpus, tmp_path):
    sizes = as_flags(OWN["gau_roberta"], "encoder") + as_flags(OWN["gau_roberta"], "gau")
    flags = ["--user-dir", PLUGIN, "--arch", "gau_roberta", "--max-update", "1", *TRAINING, *sizes]
    flags += ["--disable-validation"]
    masked = ["--task", "masked_lm", "--criterion", "masked_lm", "--tokens-per-sample", "32"]
    log = run_here("fairseq-train", text_data, *flags, *masked, "--save-dir", tmp_path / "masked")
    assert len(logged(log)) == 1

    # fairseq's layout: sentences in input0, their classes in label
    data = tmp_path / "data"
    data.mkdir()
    (data / "input0").symlink_to(text_data)
    labels = {}
    for split in ("train", "valid"):
        sentences = (corpus / f"{split}.en").read_text().splitlines()
        labels[split] = tmp_path / split
        labels[split].write_text("".join(f"{i % 2}\n" for i in range(len(sentences))))
    preprocess(labels, data / "label", "--only-source")

    task = ["--task", "sentence_prediction", "--criterion", "sentence_prediction"]
    task += ["--num-classes", "2", "--init-token", "0", "--max-positions", "64"]
    trained = tmp_path / "masked" / "checkpoint_last.pt"
    restored = ["--restore-file", trained, "--reset-optimizer", "--reset-dataloader"]
    log = run_here(
        "fairseq-train", data, *flags, *task, *restored, "--save-dir", tmp_path / "classes"
    )
    assert f"Loaded checkpoint {trained}" in log
    assert len(logged(log)) == 1


def test_a_model_that_fairseq_lacks_cannot_be_folded(checkpoint, tmp_path):
    with pytest.raises(
        OptionError, match="--arch l2_gau_lm cannot be folded, must be the plugin's"
    ):
        fold(str(checkpoint), str(tmp_path / "folded.pt"))
