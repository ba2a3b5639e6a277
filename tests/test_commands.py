"""Run fairseq's commands as a user types them, on a tiny corpus."""

import re
from pathlib import Path

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task

from tests.commands import (
    PLUGIN,
    ROBERTA_SIZES,
    SIZES,
    WHOLE_SETS,
    losses,
    refusal,
    run,
    train,
)

EXAMPLES = Path(PLUGIN).parent / "examples"


def test_generate_translates(translation_data, translator):
    use = [
        translation_data,
        f"--user-dir={PLUGIN}",
        f"--path={translator}",
        "--beam=2",
        "--print-alignment=hard",
    ]
    output = run("fairseq-generate", *use, *WHOLE_SETS).stdout
    hypotheses = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", output, re.M))
    references = dict(re.findall(r"^T-(\d+)\t(.*)$", output, re.M))
    assert len(hypotheses) == len(references) == 15
    assert sum(hypotheses[i] == references[i] for i in references) >= 12
    assert re.search(r"^A-0\t\d+-\d+", output, re.M)


def test_interactive_translates_what_is_typed(translation_data, translator):
    arguments = [translation_data, "--user-dir", PLUGIN, "--path", translator, "--beam", "2"]
    output = run(
        "fairseq-interactive", *arguments, stdin="hund katze sieht\nfrau kind hört\n"
    ).stdout
    assert re.findall(r"^H-\d+\t\S+\t(.*)$", output, re.M) == ["dog sees cat", "woman hears child"]


def test_validate_gives_the_loss_of_training(translation_data, translator):
    arguments = [
        translation_data,
        f"--user-dir={PLUGIN}",
        f"--path={translator}",
        "--task=translation",
    ]
    output = run(
        "fairseq-validate", *arguments, "--max-tokens", "400", "--log-format", "json", *WHOLE_SETS
    )
    logged = re.findall(r'"valid_loss": "([\d.]+)"', output.stdout + output.stderr)
    state = torch.load(translator, weights_only=True)
    assert float(logged[-1]) == pytest.approx(state["extra_state"]["val_loss"], abs=2e-3)


def test_eval_lm_gives_the_perplexity_of_the_validation(text_data, text_checkpoint):
    use = [
        text_data,
        f"--user-dir={PLUGIN}",
        f"--path={text_checkpoint}",
        "--sample-break-mode=eos",
        *WHOLE_SETS,
    ]
    use += ["--task", "language_modeling", "--tokens-per-sample", "16", "--max-tokens", "400"]
    result = run("fairseq-eval-lm", *use, "--gen-subset", "valid")
    perplexity = float(re.search(r"Perplexity: ([\d.]+)", result.stdout + result.stderr)[1])
    output = run("fairseq-validate", *use, "--log-format", "json")
    loss = float(re.findall(r'"valid_loss": "([\d.]+)"', output.stdout + output.stderr)[-1])
    assert perplexity == pytest.approx(2**loss, rel=2e-3)


def test_roberta_trains_as_a_masked_language_model(text_data, tmp_path):
    flags = [
        "--task=masked_lm",
        "--criterion=masked_lm",
        "--tokens-per-sample=32",
        "--mask-prob=0.3",
    ]
    result = train(text_data, "mixhead_roberta_base", tmp_path, *ROBERTA_SIZES, *flags)
    assert len(losses(result)) == 3


@pytest.mark.parametrize("name", ["lm", pytest.param("translation", marks=pytest.mark.slow)])
def test_hydra_train_takes_the_yaml_files(name, translation_data, text_data, tmp_path):
    data = translation_data if name == "translation" else text_data
    overrides = [
        f"common.user_dir={PLUGIN}",
        f"task.data={data}",
        f"checkpoint.save_dir={tmp_path}/save",
    ]
    overrides += [
        "common.cpu=true",
        "optimization.max_update=1",
        "dataset.max_tokens=400",
        "dataset.num_workers=0",
    ]
    overrides += ["dataset.disable_validation=true"]
    if name == "lm":
        overrides += [
            "criterion._name=orthogonal_cross_entropy",
            "+criterion.orthogonal_weight=0.5",
        ]
    arguments = [
        f"--config-dir={EXAMPLES / 'demo'}",
        f"--config-name={name}",
        f"hydra.run.dir={tmp_path}/out",
    ]
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "dummy").write_text("the user's")
    run("fairseq-hydra-train", *arguments, *overrides)
    assert (tmp_path / "save" / "dummy").read_text() == "the user's"  # so fairseq is repaired
    (model,), cfg, _ = load_model_ensemble_and_task([str(tmp_path / "save" / "checkpoint_last.pt")])
    assert any(".head_mixing." in key for key in model.state_dict())
    assert name != "lm" or cfg.criterion.orthogonal_weight == 0.5


HYDRA_WRONG = {
    "a flag that does not fit": (
        ["common.fp16=true", "+model.mixing_lr_scale=2"],
        "--mixing-lr-scale 2.0: with --fp16 needs --fp16-no-flatten-grads, which keeps the "
        "parameters apart",
    ),
    "an unknown name": (
        ["model._name=mixhead_transfomer_lm"],
        "--arch mixhead_transfomer_lm: unknown; did you mean mixhead_transformer_lm or ",
    ),
    "an unknown field": (
        ["+model.head_mixng=none"],
        "model.head_mixng: unknown; did you mean head_mixing or ",
    ),
    "a value of another type": (
        ["+model.head_dim=small"],
        "model.head_dim: Value 'small' of type 'str' could not be converted to Integer",
    ),
}


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind == "an unknown field" else pytest.param(kind, marks=pytest.mark.slow)
        for kind in HYDRA_WRONG
    ],
)
def test_hydra_train_refuses_in_one_line_what_the_command_line_refuses(kind, text_data, tmp_path):
    changes, line = HYDRA_WRONG[kind]
    overrides = [
        f"common.user_dir={PLUGIN}",
        f"task.data={text_data}",
        f"hydra.run.dir={tmp_path}/out",
    ]
    arguments = [
        f"--config-dir={EXAMPLES / 'demo'}",
        "--config-name=lm",
        *overrides,
        "common.cpu=true",
        *changes,
    ]
    assert f"fairseq-hydra-train: error: {line}" in refusal("fairseq-hydra-train", *arguments)


@pytest.mark.parametrize(
    "how", ["--finetune-from-model", pytest.param("--restore-file", marks=pytest.mark.slow)]
)
def test_a_fairseq_checkpoint_is_fine_tuned(how, translation_data, fairseq_translator, tmp_path):
    flags = [*SIZES, "--share-all-embeddings", "--no-save", how, fairseq_translator]
    if how == "--restore-file":
        flags += [
            "--reset-optimizer",
            "--reset-dataloader",
            "--reset-meters",
            "--reset-lr-scheduler",
        ]
    updates = 1 if how == "--finetune-from-model" else 5
    logged = losses(
        train(translation_data, "mixhead_transformer", tmp_path / "ours", *flags, updates=updates)
    )
    expected = losses(
        train(translation_data, "transformer", tmp_path / "fairseq", *flags, updates=updates)
    )
    assert logged[0] == expected[0]  # mixing starts as the identity: the first loss is fairseq's


def test_a_checkpoint_that_does_not_fit_is_refused(
    translation_data, translation_checkpoint, tmp_path
):
    flags = [*SIZES, "--finetune-from-model", translation_checkpoint]
    result = train(translation_data, "sigsoftmax_transformer", tmp_path, *flags, check=False)
    line = f"fairseq-train: error: {translation_checkpoint}: checkpoint does not fit: its "
    assert result.returncode == 1 and result.stderr.splitlines()[-1].startswith(line)
    assert "Traceback" not in result.stderr


def test_a_wrong_flag_ends_the_command_with_one_line(translation_data, tmp_path):
    flags = ["--head-mixing", "best"]
    result = train(translation_data, "mixhead_transformer", tmp_path / "save", *flags, check=False)
    assert result.returncode != 0
    assert result.stderr.startswith(
        "fairseq-train: error: --head-mixing best: must be one of none, position-independ"
    )
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "save").exists()
