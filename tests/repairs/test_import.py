"""Importing the package changes nothing outside fairseq; as --user-dir it registers and repairs, in any order."""

import os
import subprocess
import sys

import pytest

from tests.commands import LM_SIZES, PLUGIN, TRAINING, run

# What a program prints of its process: its imports, architectures, repairs of each kind.
REPORT = """
import sys, numpy, fairseq.models, fairseq.checkpoint_utils
print("named" if "mixhead_transformer" in fairseq.models.ARCH_MODEL_REGISTRY else "not named", end=", ")
print("required" if hasattr(numpy, "compat") else "not required", end=", ")
print("repaired" if hasattr(fairseq.checkpoint_utils.load_checkpoint_to_cpu, "__wrapped__") else "not repaired")
"""
# A program that runs in a process that has imported fairseq imports the package as if it had not.
HIDDEN = """
import sys
fairseq = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "fairseq"}
def show():
    assert not any(name.split(".")[0] == "fairseq" for name in sys.modules)
    sys.modules.update(fairseq)
"""
ALONE = f"{HIDDEN}import mixhead_plugin\nshow()\n"
OPS = f"{HIDDEN}import mixhead_plugin.ops\nshow()\n"
PROGRAM = "import fairseq, mixhead_plugin\n"
USER_DIR = f"""
from argparse import Namespace
from fairseq.utils import import_user_module
import_user_module(Namespace(user_dir={PLUGIN!r}))
"""
NOTHING = "not named, not required, not repaired"
NAMES = "named, required, not repaired"
ALL = "named, required, repaired"
CASES = {
    "alone": (ALONE, NOTHING),
    "ops": (OPS, NOTHING),
    "in a program that uses fairseq": (PROGRAM, NAMES),
    "ops in such a program": ("import fairseq, mixhead_plugin.ops", NAMES),
    "registered": (f"{ALONE}mixhead_plugin.register(); mixhead_plugin.register()", ALL),
    "user dir": (USER_DIR, ALL),
    "user dir twice": (USER_DIR + USER_DIR, ALL),
    "alone, then user dir": (ALONE + USER_DIR, ALL),
    "ops, then user dir": (OPS + USER_DIR, ALL),
    "program, then user dir": (PROGRAM + USER_DIR, ALL),
    "user dir, then program": (USER_DIR + PROGRAM, ALL),
    "again under the same name": (f"{USER_DIR}import sys; del sys.modules['mixhead_plugin']\n{PROGRAM}{USER_DIR}", ALL),
    "reloaded": (f"{USER_DIR}import importlib, mixhead_plugin\nimportlib.reload(mixhead_plugin)", ALL),
}


def after(program, folder):
    """Return what REPORT prints after `program`, in a process that has imported fairseq."""
    path = folder / "program.py"
    path.write_text(program + REPORT)
    return run(path).stdout.splitlines()[-1]


@pytest.mark.parametrize("case", CASES)
def test_importing(case, tmp_path):
    program, expected = CASES[case]
    assert after(program, tmp_path) == expected


def test_a_link_to_the_folder_is_the_folder(tmp_path):
    (tmp_path / "link").symlink_to(os.path.dirname(PLUGIN))
    assert after(USER_DIR + USER_DIR.replace(PLUGIN, f"{tmp_path}/link/mixhead_plugin"), tmp_path) == ALL


def test_a_repair_is_applied_once(tmp_path):
    count = """
from fairseq.nan_detector import NanDetector
assert not hasattr(NanDetector.add_hooks.__wrapped__, "__wrapped__")
"""
    assert after(ALONE + 3 * "mixhead_plugin.register()\n" + USER_DIR + count, tmp_path) == ALL


def test_a_process_without_fairseq_is_left_as_it_is():
    """Nor does `mixhead_plugin.ops` need fairseq: to import it raises here."""
    program = """
import builtins, sys
sys.modules["fairseq"] = None
import torch
hook, names = sys.excepthook, set(vars(builtins))
from mixhead_plugin.ops import attention
assert sys.excepthook is hook and set(vars(builtins)) == names
assert not hasattr(__import__("numpy"), "compat")
print(attention(*torch.randn(3, 1, 2, 3, 4)).shape)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "torch.Size([1, 2, 3, 4])\n", result.stderr


def test_a_hydra_job_registers_and_repairs(text_data, tmp_path):
    """--user-dir is `common.user_dir` there; a user's file `dummy` in --save-dir shows the repair."""
    save = tmp_path / "save"
    save.mkdir()
    (save / "dummy").write_text("the user's")
    flags = [flag.removeprefix("--").replace("-", "_") for flag in LM_SIZES]
    words = [f"common.user_dir={PLUGIN}", f"task.data={text_data}", f"checkpoint.save_dir={save}", "common.cpu=true"]
    words += ["task=language_modeling", "task.tokens_per_sample=16", "criterion=cross_entropy", "optimizer=adam"]
    words += ["lr_scheduler=fixed", "optimization.lr=[0.01]", "optimization.max_update=1", "dataset.max_tokens=400"]
    words += ["dataset.num_workers=0", "dataset.disable_validation=true", f"hydra.run.dir={tmp_path}/out"]
    words += ["+model._name=mixhead_transformer_lm"]
    words += [f"+model.{flag}" for flag in flags if not flag.startswith("tokens")]
    run("fairseq-hydra-train", *words)
    assert (save / "checkpoint_last.pt").is_file() and (save / "dummy").read_text() == "the user's"


def test_a_program_may_run_a_command_after_it_has_imported_the_plugin(text_data, tmp_path):
    (tmp_path / "dummy").write_text("the user's")
    arguments = [
        str(text_data),
        "--user-dir",
        PLUGIN,
        "--task",
        "language_modeling",
        "--arch",
        "mixhead_transformer_lm",
    ]
    arguments += [*LM_SIZES, "--tokens-per-sample", "16", *TRAINING, "--max-update", "1", "--save-dir", str(tmp_path)]
    command = f"""
from fairseq_cli.train import cli_main
sys.argv = ["fairseq-train", *{arguments!r}]
cli_main()
"""
    (tmp_path / "program.py").write_text(ALONE + command)
    run(tmp_path / "program.py")
    assert (tmp_path / "checkpoint_last.pt").is_file() and (tmp_path / "dummy").read_text() == "the user's"
