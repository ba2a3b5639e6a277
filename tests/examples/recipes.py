"""What the tests of the recipes share: scripts run as users run them, and fairseq's own parsers."""

import os
import shlex
import subprocess
from pathlib import Path

import hydra
from fairseq import options
from fairseq.dataclass.initialize import add_defaults, hydra_init

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


def dry_run(line, **environment):
    """fairseq's commands, each a list of words, that a line of shell would run."""
    output = script(line, DRY_RUN=1, **environment).stdout
    commands = [shlex.split(command) for command in output.splitlines() if command.startswith("fairseq-")]
    assert commands, line
    return commands


def parse(command):
    """The namespace that fairseq makes of a command; a flag or value that it does not know ends in SystemExit."""
    parser = PARSERS[Path(command[0]).name]()
    return options.parse_args_and_arch(parser, input_args=command[1:])


def from_yaml(path, *overrides):
    """What fairseq-hydra-train makes of a file."""
    hydra_init(path.stem)
    with hydra.initialize_config_dir(config_dir=str(path.parent), version_base="1.1"):
        cfg = hydra.compose(path.stem, overrides=[f"common.user_dir={PLUGIN}", *overrides])
    add_defaults(cfg)
    return cfg


def refusal(result):
    """The one line in which a script refused what the user wants."""
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    (line,) = (line for line in result.stderr.splitlines() if ": error: " in line)
    return line
