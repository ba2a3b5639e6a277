"""Transformer-XL in fairseq's real commands."""

import math
import re

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, data_utils

from tests.commands import PLUGIN, logged, run, several, two_workers
from tests.xl import XL_SIZES

TASK = ["--task", "truncated_bptt_lm", "--batch-size", "3", "--cpu", "--num-workers", "0"]
TRAINING = [*TASK, "--tokens-per-sample", "8", "--arch", "mixhead_transformer_xl", "--user-dir", PLUGIN, *XL_SIZES]
TRAINING += ["--mem-len", "6", "--optimizer", "adam", "--lr", "0.01", "--seed", "1"]
TRAINING += ["--log-format", "json", "--log-interval", "1", "--no-epoch-checkpoints", "--ddp-backend", "legacy_ddp"]
WORDS = 8  # in a window


def losses(output):
    return [log["loss"] for log in logged(output)]


@pytest.fixture(scope="module")
def outputs(text_data, tmp_path_factory):
    """What every command says of a model with dropout that learns for more than one epoch, once in two parts."""
    folder = tmp_path_factory.mktemp("xl")
    flags = [text_data, *TRAINING, "--criterion", "adaptive_loss", "--dropout", "0.1", "--dropatt", "0.1"]
    of_model = [text_data, "--user-dir", PLUGIN, *TASK, "--path", folder / "parts" / "checkpoint_last.pt"]
    (folder / "typed").write_text("dog sees\n" + "man hears cat " * 5 + "\n")
    search = ["--beam", "2", "--batch-size", "1", "--input", folder / "typed"]
    commands = {
        "whole": ["fairseq-train", *flags, "--save-dir", folder / "whole", "--max-update", "22"],
        "first": ["fairseq-train", *flags, "--save-dir", folder / "parts", "--max-update", "7"],
        "second": ["fairseq-train", *flags, "--save-dir", folder / "parts", "--max-update", "22"],
        "validate": ["fairseq-validate", *of_model, "--log-format", "json"],
        "eval-lm": ["fairseq-eval-lm", *of_model, "--tokens-per-sample", WORDS, "--softmax-batch", "5"],
        "generate": ["fairseq-generate", *of_model, "--tokens-per-sample", "4", "--beam", "2", "--max-len-b", "7"],
        "interactive": ["fairseq-interactive", *of_model, *search],
    }
    return {"checkpoint": of_model[-1], **dict(zip(commands, several(*commands.values()), strict=True))}


def test_training_resumed_within_an_epoch_goes_on_where_it_stopped(outputs):
    """Validation and the saving of checkpoints in between included."""
    assert losses(outputs["first"]) + losses(outputs["second"]) == losses(outputs["whole"])
    found = [float(loss) for loss in losses(outputs["whole"])]
    assert len(found) == 22 and sum(found[-5:]) < 0.8 * sum(found[:5])  # it learns


def test_a_checkpoint_has_memory_and_validates_as_in_training(outputs):
    state = torch.load(outputs["checkpoint"], weights_only=True)
    assert state["model"]["decoder.memory.version_1.states"].shape == (2, 6, 3, 12)
    for output in ("validate", "whole"):
        found = float(logged(outputs[output], "valid")[-1]["valid_loss"])
        assert found == pytest.approx(state["extra_state"]["val_loss"], abs=2e-3)


def test_eval_lm_gives_the_perplexity_of_the_text(outputs, text_data):
    """Each row of windows is one text here; fairseq's task scores all words of a window but the first."""
    (model,), _ = checkpoint_utils.load_model_ensemble([str(outputs["checkpoint"])])
    model.eval()
    lines = data_utils.load_indexed_dataset(f"{text_data}/test", Dictionary.load(f"{text_data}/dict.txt"))
    words = torch.cat([lines[i] for i in range(len(lines))]).long()
    windows = math.ceil(len(words) / WORDS) // 3
    total, count = 0.0, 0
    for row in words[: 3 * windows * WORDS].split(windows * WORDS):
        for window, part in enumerate(row.split(WORDS)):
            found = model.get_normalized_probs(model(part[None], window=window), log_probs=True)[0, :-1]
            total += found.gather(1, part[1:, None]).sum().item()
            count += len(part) - 1
    found = re.search(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)", outputs["eval-lm"])
    assert float(found[1]) == pytest.approx(-total / count / math.log(2), abs=1e-4)


def test_generate_and_interactive_continue_a_text(outputs):
    sources = dict(re.findall(r"^S-(\d+)\t(.*)$", outputs["generate"], re.M))
    hypotheses = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", outputs["generate"], re.M))
    assert len(hypotheses) == len(sources) >= 4
    first, second = re.findall(r"^H-\d+\t\S+\t(.*)$", outputs["interactive"], re.M)
    assert first.startswith("dog sees ") and second.startswith("man hears cat " * 5)  # longer than a window


@pytest.mark.slow
def test_two_workers_share_a_text_as_one_worker_has_it_and_resume(text_data, tmp_path):
    """Twice two rows and once four are the same text: parameters agree if every worker's memory is its own text's."""
    flags = [text_data, *TRAINING, "--criterion", "cross_entropy", "--lr", "0.001"]
    shared = [*flags, "--batch-size", "2", "--save-dir", tmp_path / "two"]
    with_two = two_workers(*shared, "--max-update", "12")
    alone = run("fairseq-train", *flags, "--batch-size", "4", "--save-dir", tmp_path / "one", "--max-update", "12")
    expected = [float(x) for x in losses(alone.stdout + alone.stderr)]
    assert [float(x) for x in losses(with_two)] == pytest.approx(expected, abs=2e-3)
    models = [torch.load(tmp_path / n / "checkpoint_last.pt", weights_only=True)["model"] for n in ("one", "two")]
    one, two = ({k: v for k, v in model.items() if ".memory." not in k} for model in models)
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-5, msg=name)
    memory = [model["decoder.memory.version_1.states"] for model in models]
    torch.testing.assert_close(memory[1], memory[0][:, :, :2], rtol=1e-3, atol=1e-4)  # the first worker's rows
    resumed = two_workers(*shared, "--max-update", "14")
    assert "memory: of the first worker" in resumed and len(losses(resumed)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--criterion", "orthogonal_adaptive_loss", "--rank-weight", "0.001", "--checkpoint-activations"],
        ["--criterion", "cross_entropy", "--update-freq", "2", "--same-length", "--clamp-len", "4", "--div-val", "2"],
        ["--criterion", "cross_entropy", "--mem-len", "0", "--task", "language_modeling", "--max-tokens", "32"],
    ],
    ids=" ".join,
)
def test_it_trains_with(flags, text_data, tmp_path):
    (output,) = several(["fairseq-train", text_data, *TRAINING, *flags, "--save-dir", tmp_path, "--max-update", "9"])
    found = [float(loss) for loss in losses(output)]
    assert len(found) == 9 and found[-1] < found[0]
    if "orthogonal" in flags[1]:
        first, *_, last = (float(log["orthogonal_loss"]) for log in logged(output))
        assert first == 0 < last


@pytest.mark.slow
def test_a_wrong_flag_ends_the_command_with_one_line_and_writes_nothing(text_data, tmp_path):
    flags = [*TRAINING, "--task", "language_modeling", "--save-dir", tmp_path / "save"]
    result = run("fairseq-train", text_data, *flags, check=False)
    assert result.returncode == 1 and not (tmp_path / "save").exists()
    assert result.stderr.startswith("fairseq-train: error: --mem-len 6: ") and len(result.stderr.splitlines()) == 1


YAML = """
common: {{user_dir: {plugin}, cpu: true, log_format: json, log_interval: 1}}
task: {{_name: truncated_bptt_lm, data: {data}, tokens_per_sample: 8}}
model: {{_name: l2_transformer_xl_wiki2, n_layer: 2, d_model: 12, d_inner: 10, cutoffs: [7, 10], mem_len: 4}}
criterion: {{_name: adaptive_loss}}
distributed_training: {{ddp_backend: legacy_ddp}}
optimizer: {{_name: adam}}
lr_scheduler: {{_name: fixed}}
optimization: {{lr: [0.01], max_update: 3}}
dataset: {{batch_size: 3, num_workers: 0}}
checkpoint: {{save_dir: {save}}}
"""


@pytest.mark.slow
def test_hydra_train_takes_yaml(text_data, tmp_path):
    (tmp_path / "xl.yaml").write_text(YAML.format(plugin=PLUGIN, data=text_data, save=tmp_path / "save"))
    run("fairseq-hydra-train", "--config-dir", tmp_path, "--config-name", "xl", f"hydra.run.dir={tmp_path}/out")
    checkpoint = tmp_path / "save" / "checkpoint_last.pt"
    state = torch.load(checkpoint, weights_only=True)
    assert state["model"]["decoder.content_bias"].shape == (10, 41)
    assert state["model"]["decoder.memory.version_1.states"].shape[:2] == (2, 4)
    several(["fairseq-eval-lm", text_data, "--user-dir", PLUGIN, *TASK, "--path", checkpoint])
