"""Write checkpoints of tiny models as fairseq-train would, and run the commands in this process."""

import json
import sys
from pathlib import Path

import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.analysis.command import main
from mixhead_plugin.heads import figures
from tests.commands import LM_SIZES, PLUGIN, SIZES, TRAINING
from tests.helpers import shake


@pytest.fixture(scope="session")
def write_checkpoint(tmp_path_factory):
    """Return write(name, data, arch, *flags) -> path.

    Parameters are random, and mixing is not the identity.
    """

    def write(name, data, arch, *flags):
        file = tmp_path_factory.mktemp("checkpoints") / name / "checkpoint_best.pt"
        arguments = [data, "--user-dir", PLUGIN, "--arch", arch, *TRAINING, *flags]
        parser = options.get_training_parser()
        cfg = convert_namespace_to_omegaconf(
            options.parse_args_and_arch(parser, list(map(str, arguments)))
        )
        task = tasks.setup_task(cfg.task)
        torch.manual_seed(1)
        model = shake(task.build_model(cfg.model))
        state = {  # what Trainer.state_dict gives
            "args": None,
            "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
            "model": model.state_dict(),
            "criterion": {},
            "optimizer_history": [
                {
                    "criterion_name": "CrossEntropyCriterion",
                    "optimizer_name": "FairseqAdam",
                    "lr_scheduler_state": {},
                    "num_updates": 0,
                }
            ],
            "task_state": {},
            "extra_state": {
                "train_iterator": {"epoch": 1},
                "metrics": {},
                "previous_training_time": 0,
            },
            "last_optimizer_state": None,
        }
        file.parent.mkdir()
        torch.save(state, file)
        return str(file)

    return write


@pytest.fixture(scope="session")
def lm_checkpoint(write_checkpoint, text_data):
    """Write a model with position-wise mixing.

    It has two layers of four heads and windows of 16 tokens.
    """
    flags = ["--task", "language_modeling", "--tokens-per-sample", 16, *LM_SIZES]
    return write_checkpoint("mixhead_lm", text_data, "mixhead_transformer_lm", *flags)


@pytest.fixture(scope="session")
def fairseq_lm_checkpoint(write_checkpoint, text_data):
    flags = ["--task", "language_modeling", "--tokens-per-sample", 16, *LM_SIZES]
    return write_checkpoint("fairseq_lm", text_data, "transformer_lm_gpt", *flags)


@pytest.fixture(scope="session")
def translation_checkpoint(write_checkpoint, translation_data):
    """Write a model whose decoder has position-independent mixing.

    The encoder's attention is fairseq's own.
    """
    flags = ["--head-mixing", "position-independent", "--attention-scope", "decoder", *SIZES]
    return write_checkpoint("mixhead_translation", translation_data, "mixhead_transformer", *flags)


@pytest.fixture(scope="session")
def fairseq_translation_checkpoint(write_checkpoint, translation_data):
    return write_checkpoint("fairseq_translation", translation_data, "transformer", *SIZES)


@pytest.fixture
def numbers_alone(monkeypatch):
    """Draw no figures, because they take most of a command's time.

    Return the names of those that were left out.
    """
    names = []

    def save(figure, folder, name):
        names.append(name)
        return []

    monkeypatch.setattr(figures, "save", save)
    return names


@pytest.fixture
def analysis(capsys):
    """Return analysis(*arguments) -> exit status, output, errors.

    It runs in this process, because a start takes seconds.
    """

    def run(*arguments):
        capsys.readouterr()
        status = 0
        try:
            main(list(map(str, arguments)))
        except SystemExit as end:
            status = end.code
        except OptionError as error:
            status = f"{Path(sys.argv[0]).name}: error: {error}"
        printed = capsys.readouterr()
        errors = printed.err
        if isinstance(status, str):  # Python prints the line, and ends with status 1
            status, errors = 1, f"{errors}{status}\n"
        return status, printed.out, errors

    return run


@pytest.fixture
def numbers(analysis, numbers_alone, tmp_path):
    """Return numbers(command, *arguments) -> its JSON file's content, and what it printed.

    No figures are drawn.
    """

    def run(command, *arguments):
        status, printed, errors = analysis(command, *arguments, "--output", tmp_path)
        assert status == 0, errors
        return json.loads((tmp_path / f"{command}.json").read_text()), printed

    return run
