"""The command line: what can be asked for, what is explained, how it ends."""

import importlib
import logging
import runpy
import sys

import pytest
import torch
from sacrebleu.metrics import BLEU

from mixhead_plugin.analysis.__main__ import COMMANDS
from mixhead_plugin.errors import OptionError


@pytest.mark.parametrize("arguments, status", [([], 2), (["--help"], 0), (["-h"], 0)])
def test_the_overview_names_every_command(arguments, status, analysis):
    found, printed, _ = analysis(*arguments)
    assert found == status
    words = " ".join(printed.split())
    for name, command in COMMANDS.items():
        assert f" {name} {command.summary} ({command.source})" in words


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, analysis):
    status, printed, _ = analysis(name, "--help")
    assert status == 0
    assert COMMANDS[name].example in printed and COMMANDS[name].source in printed
    module = importlib.import_module(f"mixhead_plugin.analysis.{COMMANDS[name].module}")
    assert module.__doc__.strip() in printed
    assert COMMANDS[name].example.startswith(f"{name} ")


def test_an_unknown_command_is_refused(analysis):
    status, _, errors = analysis("spektrum")
    assert status == 2
    assert errors == f"analysis: error: spektrum: no such command; must be one of {', '.join(COMMANDS)}\n"


@pytest.mark.parametrize(
    "arguments, status, message",
    [
        (["spectrum"], 2, "the following arguments are required: CHECKPOINT"),
        (["spectrum", "x.pt", "--lenght", "3"], 2, "unrecognized arguments: --lenght 3"),
        (["mixing", "x.pt", "--max-tokens", "0"], 2, "argument --max-tokens: 0: must be a whole number of at least 1"),
        (
            ["mixing", "x.pt", "--batch-size", "2", "--max-tokens", "9"],
            2,
            "argument --max-tokens: not allowed with argument --batch-size",
        ),
        (["spectrum", "x.pt"], 1, "x.pt: no such file"),
        (["prune", "x.pt", "--beam", "0"], 2, "argument --beam: 0: must be a whole number of at least 1"),
        (
            ["prune", "x.pt", "--bleu-tokenize", "foo"],
            2,
            f"argument --bleu-tokenize: foo: must be one of {', '.join(BLEU.TOKENIZERS)}",
        ),
        (["mixing", "x.pt", "--user-dir", "nowhere"], 1, "--user-dir nowhere: no such folder"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, status, message, analysis):
    found, _, errors = analysis(*arguments)
    assert (found, errors) == (status, f"analysis {arguments[0]}: error: {message}\n")


@pytest.mark.parametrize(
    "raised, status, message",
    [
        (OptionError("--x 3: must be 4"), 1, "analysis curves: error: --x 3: must be 4\n"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB. GPU 0"), 1, "try a smaller --max-tokens"),
        (KeyboardInterrupt(), 130, "analysis curves: interrupted\n"),
    ],
)
def test_the_end_of_a_command_is_its_status(raised, status, message, analysis, monkeypatch, tmp_path):
    def run(args):
        raise raised

    monkeypatch.setattr("mixhead_plugin.analysis.curves.run", run)
    found, _, errors = analysis("curves", tmp_path / "log")
    assert found == status
    assert message in errors and errors.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_computed(name, analysis, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(f"mixhead_plugin.analysis.{COMMANDS[name].module}.run", lambda args: pytest.fail("has begun"))
    for folder in (tmp_path / "file", tmp_path / "file" / "sub"):
        status, _, errors = analysis(name, "x", "--output", folder)
        assert status == 1
        message = f"--output {folder}: cannot be written: {tmp_path / 'file'}: Not a directory"
        assert errors == f"analysis {name}: error: {message}\n"


def test_the_folder_is_not_made_for_a_command_that_fails(analysis, tmp_path):
    status, _, _ = analysis("spectrum", "x.pt", "--output", tmp_path / "new" / "sub")
    assert status == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command, message",
    [
        (["importance"], "the importance of the heads of decoder.layers.0.self_attn is not finite"),
        (["ablate"], "its loss is not finite"),
        (["prune"], "the importance of the heads of decoder.layers.0.self_attn is not finite"),
        (["spectrum"], "the weights of decoder.layers.0.self_attn are not finite"),
    ],
)
def test_a_damaged_model_has_no_results(command, message, stock_lm_checkpoint, analysis, tmp_path):
    state = torch.load(stock_lm_checkpoint, weights_only=True)
    state["model"]["decoder.layers.0.self_attn.q_proj.weight"].fill_(3e38)  # finite, but not what comes of it
    file = tmp_path / "damaged.pt"
    torch.save(state, file)
    status, _, errors = analysis(*command, file, "--output", tmp_path / "found")
    assert status == 1
    assert errors == f"analysis {command[0]}: error: {file}: {message}; are its parameters damaged?\n"
    assert not (tmp_path / "found").exists()


def test_an_error_of_the_program_keeps_its_traceback(analysis, monkeypatch):
    def run(args):
        raise ZeroDivisionError

    monkeypatch.setattr("mixhead_plugin.analysis.curves.run", run)
    with pytest.raises(ZeroDivisionError):
        analysis("curves", "log")


def test_loggers_are_left_as_they_were(analysis):
    before = logging.getLogger("fairseq").level
    analysis("spectrum", "x.pt")
    assert logging.getLogger("fairseq").level == before


def test_it_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["analysis", "mixing", "x.pt"])
    monkeypatch.delitem(sys.modules, "mixhead_plugin.analysis.__main__")
    with pytest.raises(SystemExit) as end:
        runpy.run_module("mixhead_plugin.analysis", run_name="__main__")
    assert end.value.code == 1
    assert capsys.readouterr().err == "analysis mixing: error: x.pt: no such file\n"
