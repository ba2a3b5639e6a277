"""A name that does not exist, or does not fit, is refused in one line."""

import shutil
import subprocess
import sys
from functools import partial

import pytest
from fairseq import criterions, models, optim, options, tasks
from fairseq.optim import lr_scheduler
from omegaconf import OmegaConf

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.repairs import wrong_names
from tests.commands import LM_SIZES, PLUGIN, SIZES, TRAINING, free_port, refusal
from tests.helpers import run_here
from tests.robustness.test_faults import SPAWN


@pytest.mark.parametrize(
    "arch, line",
    [
        (
            "mixhead_transfomer",
            "--arch mixhead_transfomer: unknown; did you mean mixhead_transformer or ",
        ),
        ("zzz", "--arch zzz: unknown; did you mean mixhead_transformer?"),
        # fairseq's own BART, which has no families, is no answer to who asked for one
        ("mixhead_bart_base", "--arch mixhead_bart_base: unknown; did you mean mixhead_"),
    ],
)
def test_an_unknown_architecture_is_one_line_with_near_names(arch, line, tmp_path):
    parser = options.get_training_parser()
    with pytest.raises(OptionError) as error:
        options.parse_args_and_arch(parser, [str(tmp_path), "--arch", arch])
    assert str(error.value).startswith(line) and len(str(error.value)) < 200
    assert (
        options.parse_args_and_arch(parser, [str(tmp_path), "--arch", "transformer"]).arch
        == "transformer"
    )


BUILT = {
    "--arch": lambda cfg: models.build_model(cfg, None),
    "--task": tasks.setup_task,
    "--criterion": lambda cfg: criterions.build_criterion(cfg, None),
    "--optimizer": lambda cfg: optim.build_optimizer(cfg, []),
    "--lr-scheduler": lambda cfg: lr_scheduler.build_lr_scheduler(cfg, None),
}


@pytest.mark.parametrize("flag", BUILT)
def test_an_unknown_name_in_a_config_is_one_line_that_asks_for_the_user_dir(flag):
    with pytest.raises(OptionError) as error:
        BUILT[flag](OmegaConf.create({"_name": "xyzzy"}))
    assert (
        str(error.value)
        == f"{flag} xyzzy: unknown; must be a known name; does it need another --user-dir?"
    )


def test_a_model_without_a_name_in_a_config_is_one_line():
    for fields in ({"head_mixing": "none", "dropout": 0.1}, {"_name": None, "dropout": 0.1}):
        with pytest.raises(OptionError) as error:
            models.build_model(OmegaConf.create(fields), None)
        message = "model._name: missing; must be an architecture like mixhead_transformer"
        assert str(error.value) == message


def test_a_model_of_a_family_that_it_lacks_is_suggested_in_those_that_it_has():
    with pytest.raises(OptionError) as error:
        models.build_model(OmegaConf.create({"_name": "mixhead_gau_roberta"}), None)
    assert str(error.value) == (
        "--arch mixhead_gau_roberta: unknown; did you mean gau_roberta or sigsoftmax_gau_roberta "
        "or l2_gau_roberta, or does it need another --user-dir?"
    )


def test_a_model_of_fairseqs_examples_is_not_unknown_but_needs_them(monkeypatch, tmp_path):
    monkeypatch.setattr(wrong_names, "TruncatedBPTTLMTask", None)
    arch = "l2_transformer_xl_of_the_examples"
    message = f"--arch {arch}: needs a fairseq with its examples"
    with pytest.raises(OptionError) as typed:
        options.parse_args_and_arch(options.get_training_parser(), [str(tmp_path), "--arch", arch])
    with pytest.raises(OptionError) as built:
        models.build_model(OmegaConf.create({"_name": arch}), None)
    assert str(typed.value) == str(built.value) == message


def test_a_name_that_is_nearly_right_is_suggested():
    with pytest.raises(
        OptionError, match=r"^--criterion cross_entrpy: unknown; did you mean cross_entropy or "
    ):
        criterions.build_criterion(OmegaConf.create({"_name": "cross_entrpy"}), None)


MODEL = "is of another model; --arch and sizes must be the same:"
OTHER = {
    "width": (["--encoder-ffn-embed-dim=40"], f"{MODEL} size mismatch"),
    "optimizer": (
        ["--optimizer", "nag"],
        "its optimizer is another one: Optimizer does not match; please reset",
    ),
    "criterion": (
        ["--criterion", "label_smoothed_cross_entropy"],
        "its criterion is another one: Criterion does not match; please reset",
    ),
    "fairseq's": (["--arch", "transformer"], f"{MODEL} Unexpected key"),
    "depth": (["--decoder-layers", "3"], f"{MODEL} Missing key"),
}


@pytest.mark.parametrize(
    "kind", ["width", *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(OTHER)[1:])]
)
def test_a_checkpoint_of_another_training_is_one_line(
    kind, translation_data, translation_checkpoint, tmp_path
):
    flags, line = OTHER[kind]
    command = [
        "fairseq-train",
        translation_data,
        f"--user-dir={PLUGIN}",
        "--arch=mixhead_transformer",
        *SIZES,
    ]
    restored = [
        *TRAINING,
        f"--save-dir={tmp_path}",
        f"--restore-file={translation_checkpoint}",
        "--max-update=2",
    ]
    with pytest.raises(OptionError) as error:
        run_here(*command, *restored, *flags)
    assert str(error.value).startswith(f"{translation_checkpoint}: {line}")


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "name, said",
    [
        ("dict.de.txt", "No such file or directory: "),
        slow("valid.de-en.de.idx", "Dataset not found: valid"),
        slow("dict.txt", "No such file or directory: "),
        slow("valid.idx", "Dataset not found: valid"),
    ],
)
def test_a_missing_file_is_one_line(name, said, translation_data, text_data, tmp_path):
    arch, sizes = (
        ("mixhead_transformer", SIZES) if "de" in name else ("mixhead_transformer_lm", LM_SIZES)
    )
    data = shutil.copytree(translation_data if "de" in name else text_data, tmp_path / "data")
    for path in (data / name, (data / name).with_suffix(".bin")):
        path.unlink(missing_ok=True)
    command = ["fairseq-train", data, "--user-dir", PLUGIN, "--arch", arch, *sizes, *TRAINING]
    command += [] if "de" in name else ["--task", "language_modeling"]
    line = refusal(*command, "--save-dir", tmp_path / "save").replace("[Errno 2] ", "")
    assert f"fairseq-train: error: {said}" in line


@pytest.mark.slow
def test_a_missing_file_is_one_line_where_fairseq_starts_the_workers(translation_data, tmp_path):
    (tmp_path / "train.py").write_text(SPAWN)
    data = shutil.copytree(translation_data, tmp_path / "data")
    (data / "dict.de.txt").unlink()
    flags = [
        "--distributed-world-size=2",
        "--distributed-backend=gloo",
        "--ddp-backend=legacy_ddp",
    ]
    flags += [
        f"--distributed-init-method=tcp://localhost:{free_port()}",
        f"--save-dir={tmp_path / 'save'}",
    ]
    words = [data, "--user-dir", PLUGIN, "--arch", "mixhead_transformer", *SIZES, *TRAINING, *flags]
    command = [str(word) for word in (sys.executable, tmp_path / "train.py", *words)]
    ended = subprocess.run(command, capture_output=True, text=True)
    said = [line for line in ended.stderr.splitlines() if ": error: " in line]
    assert said == [
        f"fairseq-train: error: [Errno 2] No such file or directory: '{data}/dict.de.txt'"
    ]
    assert "Traceback" not in ended.stderr
