"""A name that does not exist, or does not fit, is refused in one line."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.configs import DistributedTrainingConfig
from fairseq.distributed import utils

from mixhead_plugin.errors import OptionError
from tests.commands import LM_SIZES, PLUGIN, SIZES, TRAINING, refusal


@pytest.mark.parametrize(
    "arch, line",
    [
        ("mixhead_transfomer", "--arch mixhead_transfomer: unknown; did you mean mixhead_transformer or "),
        ("zzz", "--arch zzz: unknown; did you mean mixhead_transformer?"),
    ],
)
def test_an_unknown_architecture_is_one_line_with_near_names(arch, line, tmp_path):
    parser = options.get_training_parser()
    with pytest.raises(OptionError) as error:
        options.parse_args_and_arch(parser, [str(tmp_path), "--arch", arch])
    assert str(error.value).startswith(line) and len(str(error.value)) < 200
    assert options.parse_args_and_arch(parser, [str(tmp_path), "--arch", "transformer"]).arch == "transformer"


def missing_set():
    raise FileNotFoundError("Dataset not found: valid (data)")  # as fairseq's tasks do


@pytest.mark.parametrize(
    "fault, line",
    [
        (lambda: Dictionary.load("data/dict.de.txt"), "data/dict.de.txt: no such file"),
        (missing_set, "Dataset not found: valid"),
    ],
    ids=["dictionary", "set"],
)
def test_a_missing_file_is_one_line(fault, line):
    workers = DistributedTrainingConfig(tpu=False, distributed_world_size=1)
    cfg = SimpleNamespace(distributed_training=workers, common=SimpleNamespace(tpu=False))
    cfg.common_eval = SimpleNamespace(path="model.pt")
    cfg.checkpoint = SimpleNamespace(write_checkpoints_asynchronously=False)
    with pytest.raises(OptionError, match=f"^{line}"):
        utils.call_main(cfg, lambda cfg: fault())
    with pytest.raises(FileNotFoundError, match="mine"):
        utils.call_main(cfg, lambda cfg: Path("mine").read_text())


MODEL = "is of another model; --arch and sizes must be the same:"
OTHER = {
    "width": (["--encoder-ffn-embed-dim=40"], f"{MODEL} size mismatch"),
    "optimizer": (["--optimizer", "nag"], "its optimizer is another one: Optimizer does not match; please reset"),
    "fairseq's": (["--arch", "transformer"], f"{MODEL} Unexpected key"),
    "depth": (["--decoder-layers", "3"], f"{MODEL} Missing key"),
}


@pytest.mark.parametrize("kind", ["width", *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(OTHER)[1:])])
def test_a_checkpoint_of_another_training_is_one_line(kind, translation_data, translation_checkpoint, tmp_path):
    flags, line = OTHER[kind]
    command = ["fairseq-train", translation_data, "--user-dir", PLUGIN, "--arch", "mixhead_transformer", *SIZES]
    restored = [*TRAINING, "--save-dir", tmp_path, "--restore-file", translation_checkpoint, "--max-update", "2"]
    assert f"error: {translation_checkpoint}: {line}" in refusal(*command, *restored, *flags)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["valid.idx", "dict.txt"])
def test_a_language_model_without_a_file_is_one_line(name, text_data, tmp_path):
    data = shutil.copytree(text_data, tmp_path / "data")
    for path in (data / name, (data / name).with_suffix(".bin")):
        path.unlink(missing_ok=True)
    command = ["fairseq-train", data, "--user-dir", PLUGIN, "--arch", "mixhead_transformer_lm", *LM_SIZES]
    line = refusal(*command, *TRAINING, "--task", "language_modeling", "--save-dir", tmp_path / "save")
    assert "no such file; must be as fairseq-preprocess wrote it" in line
