"""What the tests of the recipes share: scripts run as users run them, and fairseq's own parsers."""

import fcntl
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from fairseq import checkpoint_utils, options
from fairseq_cli.train import cli_main as fairseq_train

import mixhead_plugin

mixhead_plugin.register()

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PLUGIN = ROOT / "mixhead_plugin"
PARSERS = {
    "fairseq-train": options.get_training_parser,
    "fairseq-eval-lm": options.get_eval_lm_parser,
    "fairseq-generate": options.get_generation_parser,
    "fairseq-interactive": lambda: options.get_generation_parser(interactive=True),
    "fairseq-validate": options.get_validation_parser,
}


def script(line, check=True, cwd=ROOT, timeout=300, **environment):
    """Run a line of shell with more variables in its environment; the finished process, its output as text."""
    environment = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    result = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, cwd=cwd, env=environment, timeout=timeout
    )
    assert not check or result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result


def wait_until_unlocked(path, timeout=20):
    """Until nobody holds the lock on a file; what was killed does so for a moment after its pipes have ended."""
    deadline = time.monotonic() + timeout
    with path.open() as file:
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                assert time.monotonic() < deadline, path
                time.sleep(0.02)


def dry_run(line, **environment):
    """fairseq's commands, each a list of words, that a line of shell would run."""
    output = script(line, DRY_RUN=1, **environment).stdout
    commands = [shlex.split(command) for command in output.splitlines() if command.startswith("fairseq-")]
    assert commands, line
    return commands


def train_here(command, monkeypatch):
    """Run train.sh's command in this process, which has imported everything."""
    # fairseq remembers the best checkpoint of a process, and would write none that is worse than another training's
    monkeypatch.delattr(checkpoint_utils.save_checkpoint, "best", raising=False)
    monkeypatch.setattr(sys, "argv", command)
    fairseq_train()


def parse(command):
    """The namespace that fairseq makes of a command; a flag or value that it does not know ends in SystemExit."""
    parser = PARSERS[Path(command[0]).name]()
    return options.parse_args_and_arch(parser, input_args=command[1:])


def refusal(result):
    """The one line in which a script refused what the user wants."""
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    (line,) = (line for line in result.stderr.splitlines() if ": error: " in line)
    return line
