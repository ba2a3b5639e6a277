"""The table of repairs, and the variable that chooses among them."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from mixhead_plugin.__main__ import main
from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq import repairs
from mixhead_plugin.fairseq.repairs import GROUPS, REPAIRS, chosen
from tests.commands import PLUGIN, SIZES, TRAINING, WHOLE_SETS, refusal, run

REQUIRED = {
    "safe_globals",
    "numpy_long",
    "numpy_float",
    "truncated_bptt",
    "hydra_help",
    "batch_buckets",
    "broadcast_metadata",
}
TRAPS = {
    "restore_file",
    "wrong_names",
    "unknown_fields",
    "overrides",
    "dropped_scales",
    "no_worker",
    "torchrun_workers",
    "longer_inputs",
}


def test_moving_a_repair_to_another_group_is_noticed():
    """Somebody may have switched off a group in MIXHEAD_REPAIRS."""
    assert {name for name, repair in REPAIRS.items() if repair.group == "required"} == REQUIRED
    assert {name for name, repair in REPAIRS.items() if repair.group == "trap"} == TRAPS


CHOSEN = {
    "all": set(REPAIRS),
    "required": REQUIRED,
    "required, trap": REQUIRED | TRAPS,
    "required,save_dir": REQUIRED | {"save_dir"},
    "save_dir": REQUIRED | {"save_dir"},
    "-save_dir": set(REPAIRS) - {"save_dir"},
    "all, -save_dir, -trap": set(REPAIRS) - {"save_dir"} - TRAPS,
    "trap, -restore_file": REQUIRED | TRAPS - {"restore_file"},
}


@pytest.mark.parametrize("words", CHOSEN)
def test_a_list_of_names_and_groups_chooses(words, monkeypatch):
    monkeypatch.setenv("MIXHEAD_REPAIRS", words)
    assert set(chosen()) == CHOSEN[words]


@pytest.mark.parametrize(
    "words",
    [
        "al",
        "required,savedir",
        "required,,trap",
        "-savedir",
        "-required",
        "-safe_globals",
        # a hook of the plugin, which is always on
        "printed_alignments",
    ],
)
def test_an_unknown_name_is_refused(words, monkeypatch):
    monkeypatch.setenv("MIXHEAD_REPAIRS", words)
    with pytest.raises(OptionError, match=r"^MIXHEAD_REPAIRS "):
        chosen()


def test_a_command_refuses_an_unknown_name(text_data):
    command = ["fairseq-train", text_data, "--user-dir", PLUGIN]
    assert "MIXHEAD_REPAIRS 'savedir': must be" in refusal(
        *command, env={"MIXHEAD_REPAIRS": "savedir"}
    )


PRINTS = "from mixhead_plugin.errors import end_in_one_line; end_in_one_line(); print(flush=True)"


@pytest.mark.parametrize(
    "program", [["-m", "mixhead_plugin", "path"], ["-c", PRINTS]], ids=["mixhead", "fairseq"]
)
def test_a_broken_pipe_is_silent(program):
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, *program], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert ended.returncode in (-signal.SIGPIPE, 128 + signal.SIGPIPE) and ended.stderr == b""


def test_the_command_prints_every_repair(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["mixhead_plugin", "repairs"])
    monkeypatch.setenv("MIXHEAD_REPAIRS", "required,trap")
    main()
    printed = capsys.readouterr().out
    assert printed.rstrip() == repairs.table()
    assert set(re.findall(r"^  (\w+)$", printed, re.M)) == REQUIRED | TRAPS
    assert set(re.findall(r"^  (\w+) \(off\)$", printed, re.M)) == REPAIRS.keys() - REQUIRED - TRAPS
    assert re.findall(r"^(\w+): ", printed, re.M) == list(GROUPS)
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.parametrize("command", [[], ["path"]])
def test_the_command_prints_the_folder(command, tmp_path):
    program = [sys.executable, "-m", "mixhead_plugin", *command]
    assert (
        subprocess.run(program, capture_output=True, text=True, cwd=tmp_path).stdout
        == PLUGIN + "\n"
    )


def test_required_repairs_are_enough_to_resume_train_and_decode(
    translation_data, translation_checkpoint, tmp_path
):
    settings = {"env": {"MIXHEAD_REPAIRS": "required"}}
    shutil.copy(translation_checkpoint, tmp_path / "checkpoint_last.pt")
    words = [
        translation_data,
        f"--user-dir={PLUGIN}",
        "--arch=mixhead_transformer",
        *SIZES,
        *TRAINING,
    ]
    run("fairseq-train", *words, "--max-update", "2", "--save-dir", tmp_path, **settings)
    last = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    assert last["optimizer_history"][-1]["num_updates"] == 2
    use = [
        translation_data,
        f"--user-dir={PLUGIN}",
        f"--path={tmp_path / 'checkpoint_last.pt'}",
        *WHOLE_SETS,
    ]
    assert (
        "Generate test with beam="
        in run("fairseq-generate", *use, "--cpu", "--beam", "2", **settings).stdout
    )
