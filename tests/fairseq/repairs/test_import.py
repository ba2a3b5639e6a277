"""Import the package: outside fairseq nothing changes.

As --user-dir it registers and repairs, in any order.
"""

import shutil
import subprocess
import sys

import pytest

from tests.commands import LM_SIZES, OTHERS, PLUGIN, ROOT, TRAINING, run
from tests.torch_programs import run_program

# What a program may do, one step after the other. It runs in a process that has imported fairseq:
# `alone` and `ops` hide this from the package.
HIDDEN = """
import sys
names = [name for name in sys.modules if name.split(".")[0] == "fairseq"]
fairseq = {name: sys.modules.pop(name) for name in names}
import MODULE
assert not any(name.split(".")[0] == "fairseq" for name in sys.modules)
sys.modules.update(fairseq)
"""
USER_DIR = f"""
from argparse import Namespace
from fairseq.utils import import_user_module
import_user_module(Namespace(user_dir={PLUGIN!r}))
"""
STEPS = {
    "alone": HIDDEN.replace("MODULE", "mixhead_plugin"),
    "ops alone": HIDDEN.replace("MODULE", "mixhead_plugin.ops"),
    "beside fairseq": "import fairseq, mixhead_plugin",
    "ops beside fairseq": "import fairseq, mixhead_plugin.ops",
    "register": "import mixhead_plugin\nmixhead_plugin.register()\n",
    "user dir": USER_DIR,
    "link": USER_DIR.replace(repr(PLUGIN), "'link/mixhead_plugin'"),
    "forgotten": "import sys; del sys.modules['mixhead_plugin']",
    "reloaded": "import importlib, mixhead_plugin; importlib.reload(mixhead_plugin)",
}
# What it prints after a step: whether the architectures are registered, and repairs of each kind
# are applied.
REPORT = """
import numpy, fairseq.models, fairseq.checkpoint_utils, fairseq.nan_detector
named = "mixhead_transformer" in fairseq.models.ARCH_MODEL_REGISTRY
repaired = hasattr(fairseq.checkpoint_utils.load_checkpoint_to_cpu, "__wrapped__")
once = getattr(fairseq.nan_detector.NanDetector.add_hooks, "__wrapped__", None)
twice = hasattr(once, "__wrapped__")
required = hasattr(numpy, "compat")
print("named" * named, "required" * required, "repaired" * repaired, "twice" * twice)
"""
NOTHING = ""
ALL = "named required repaired"
PROGRAMS = [
    {"alone": NOTHING, "register": ALL, "user dir": ALL, "reloaded": ALL},
    {"ops alone": NOTHING, "user dir": ALL, "register": ALL, "link": ALL},
    {"beside fairseq": NOTHING, "ops beside fairseq": NOTHING, "user dir": ALL},
    {"user dir": ALL, "forgotten": ALL, "beside fairseq": ALL, "link": ALL},
]


@pytest.mark.parametrize("program", PROGRAMS, ids=", ".join)
def test_importing_repairs_once_in_any_order(program, tmp_path):
    (tmp_path / "link").symlink_to(ROOT)
    (tmp_path / "program.py").write_text("".join(STEPS[step] + REPORT for step in program))
    printed = run(tmp_path / "program.py", cwd=tmp_path).stdout.splitlines()
    assert [" ".join(line.split()) for line in printed] == list(program.values())


@pytest.mark.parametrize("how", ["link", "copy"])
def test_a_user_dir_of_another_name_is_refused_in_one_line(how, tmp_path):
    """Its modules import each other as mixhead_plugin, which would be another package."""
    folder = tmp_path / "mine"
    if how == "link":
        folder.symlink_to(PLUGIN)
    else:
        shutil.copytree(PLUGIN, folder)
    remedy = f"must be {PLUGIN}" if how == "link" else "must have this name"
    (tmp_path / "program.py").write_text(USER_DIR.replace(repr(PLUGIN), repr(str(folder))))
    ended = run(tmp_path / "program.py", cwd=tmp_path, check=False)
    assert ended.returncode == 1
    assert ended.stderr == (
        f"program.py: error: --user-dir {folder}: is a folder of another name than mixhead_plugin; "
        f"{remedy}\n"
    )


def test_a_process_without_fairseq_is_left_as_it_is(tmp_path):
    """`mixhead_plugin.nn` and what it imports need no fairseq.

    Importing fairseq would raise here.
    """
    program = """
import builtins, sys
sys.modules["fairseq"] = None
import torch
hook, names = sys.excepthook, set(vars(builtins))
from mixhead_plugin.nn import MixedAttention
assert sys.excepthook is hook and set(vars(builtins)) == names
assert "mixhead_plugin.heads.figures" not in sys.modules  # needs numpy
assert not hasattr(__import__("numpy"), "compat")
print(MixedAttention(4, 2, head_mixing="position-wise")(*torch.randn(3, 1, 3, 4))[0].shape)
"""
    result = run_program(program, tmp_path)
    assert result.stdout == "torch.Size([1, 3, 4])\n", result.stderr


@pytest.mark.parametrize("command", ["fairseq-train", "a program"])
def test_a_training_registers_and_repairs(command, text_data, tmp_path):
    """A user's file `dummy` in --save-dir shows the repair.

    tests/test_commands.py does so with fairseq-hydra-train.
    """
    save = tmp_path / "save"
    save.mkdir()
    (save / "dummy").write_text("the user's")
    arguments = [
        "fairseq-train",
        text_data,
        f"--user-dir={PLUGIN}",
        "--arch=mixhead_transformer_lm",
        *LM_SIZES,
    ]
    arguments += ["--task", "language_modeling", *TRAINING, "--max-update", 1, "--save-dir", save]
    if command == "a program":
        words = [str(argument) for argument in arguments]
        train = f"sys.argv = {words}\nfrom fairseq_cli.train import cli_main\ncli_main()\n"
        (tmp_path / "program.py").write_text(STEPS["alone"] + train)
        arguments = [tmp_path / "program.py"]
    OTHERS.run(*arguments)  # it has not imported the plugin
    assert (save / "checkpoint_last.pt").is_file() and (save / "dummy").read_text() == "the user's"


# What argparse does since Python 3.14: it reads the help of a flag when the flag is added.
READS_HELP_AT_ONCE = """
from argparse import _ActionsContainer as Container

def check(container, action):
    if hasattr(container, "_get_formatter") and action.help:
        try:
            "%" not in action.help or container._get_formatter()._expand_help(action)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError("badly formed help string") from error

def add(container, *names, _add=Container.add_argument, **settings):
    action = _add(container, *names, **settings)
    container._check_help(action)
    return action

Container._check_help = check
Container.add_argument = add
"""


def test_hydra_starts_where_argparse_reads_help_at_once(tmp_path):
    """Hydra prints the config that its words make."""
    words = ["--cfg", "job", "task=language_modeling", f"task.data={tmp_path}"]
    ended = OTHERS.run("mixhead", "hydra-train", *words, before=READS_HELP_AT_ONCE, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert f"data: {tmp_path}" in ended.stdout


def test_an_older_python_is_refused_in_words():
    program = "import sys; sys.version_info = (3, 10, 13); import mixhead_plugin"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert (
        "ImportError: mixhead_plugin needs Python 3.11 or newer" in result.stderr.splitlines()[-1]
    )
