"""Test the criteria in fairseq's real commands."""

from pathlib import Path

import pytest
import torch

from tests.commands import LM_SIZES, PLUGIN, TRAINING, logged, refusal, run, train, two_workers

LM = ["--task", "language_modeling", "--tokens-per-sample", "16", *LM_SIZES, "--dropout", "0"]
ORTHOGONAL = ["--criterion", "orthogonal_cross_entropy", "--orthogonal-weight", "0.5", "--rank-weight", "0.001"]
LEGACY = ["--ddp-backend", "legacy_ddp"]


def parameters(folder):
    return torch.load(folder / "checkpoint_last.pt", weights_only=True)["model"]


@pytest.fixture(scope="module")
def one_worker(text_data, tmp_path_factory):
    """Train on batches of 64 tokens, two to an update."""
    save = tmp_path_factory.mktemp("one")
    flags = [*LM, *ORTHOGONAL, *LEGACY, "--max-tokens", "64", "--update-freq", "2"]
    return save, train(text_data, "mixhead_transformer_lm", save, *flags, updates=4)


def test_penalties_are_in_the_json_logs_and_only_in_those_of_training(one_worker):
    output = one_worker[1].stdout + one_worker[1].stderr
    first, *others = logged(output)
    assert float(first["orthogonal_loss"]) == 0 < float(first["rank_loss"])  # mixing starts as the identity
    assert all(float(log["orthogonal_loss"]) > 0 for log in others)
    assert all("ppl" in log for log in others)
    assert all(float(epoch["train_orthogonal_loss"]) > 0 for epoch in logged(output, "train"))
    validations = logged(output, "valid")
    assert validations and not any("orthogonal" in key or "rank" in key for log in validations for key in log)


@pytest.mark.slow
def test_two_workers_end_with_the_parameters_of_one_with_twice_the_update_freq(one_worker, text_data, tmp_path):
    command = [text_data, "--user-dir", PLUGIN, "--arch", "mixhead_transformer_lm", "--max-update", "4"]
    command += [*TRAINING, *LM, *ORTHOGONAL, *LEGACY, "--max-tokens", "64", "--save-dir", tmp_path]
    two_workers(*command)
    expected = parameters(one_worker[0])
    found = parameters(tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    mixing = [name for name in expected if "head_mixing.bias" in name]
    assert not any(torch.equal(expected[name], torch.eye(4)) for name in mixing)


def test_what_cannot_be_regularized_ends_the_command_with_one_line(text_data, tmp_path):
    flags = ["--arch", "sigsoftmax_transformer_lm", "--save-dir", tmp_path / "save", *TRAINING, *LM]
    line = refusal("fairseq-train", text_data, "--user-dir", PLUGIN, *flags, "--criterion", "orthogonal_cross_entropy")
    assert line.startswith("fairseq-train: error: --orthogonal-weight 0.0001: ")
    assert not list(tmp_path.glob("save/*.pt"))


@pytest.mark.slow
def test_hydra_takes_the_criterion_by_name(text_data, tmp_path):
    examples = Path(PLUGIN).parent / "examples"
    overrides = [f"common.user_dir={PLUGIN}", f"task.data={text_data}", f"checkpoint.save_dir={tmp_path}/save"]
    overrides += ["common.cpu=true", "optimization.max_update=2", "dataset.max_tokens=400", "dataset.num_workers=0"]
    overrides += ["criterion._name=orthogonal_cross_entropy", "+criterion.orthogonal_weight=0.5"]
    overrides += ["common.log_format=json", "common.log_interval=1", f"hydra.run.dir={tmp_path}/out"]
    arguments = ["--config-dir", examples / "demo", "--config-name", "lm", *overrides]
    result = run("fairseq-hydra-train", *arguments)
    log = result.stdout + result.stderr + "".join(p.read_text() for p in (tmp_path / "out").glob("*.log"))
    assert '"orthogonal_loss"' in log
    state = torch.load(tmp_path / "save" / "checkpoint_last.pt", weights_only=True)
    assert state["cfg"]["criterion"]["orthogonal_weight"] == 0.5
