"""Helpers of the recipes' tests: run scripts as users do, parse commands with fairseq's parsers."""

import fcntl
import io
import os
import re
import shlex
import subprocess
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from fairseq import options

import mixhead_plugin

mixhead_plugin.register()

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PLUGIN = ROOT / "mixhead_plugin"
READMES = [
    *sorted(EXAMPLES.rglob("README.md")),
    *ROOT.glob("*.md"),
    *sorted(ROOT.glob("docs/*.md")),
]
SCRIPT = re.compile(
    r"(?:examples/(?:(?:\w+/)+(?:prepare|train|evaluate)\.sh|slurm\.sbatch)|scripts/sweep\.py)\b(?!/)"
)
PARSERS = {
    "fairseq-train": options.get_training_parser,
    "fairseq-eval-lm": options.get_eval_lm_parser,
    "fairseq-generate": options.get_generation_parser,
    "fairseq-interactive": lambda: options.get_generation_parser(interactive=True),
    "fairseq-validate": options.get_validation_parser,
}


def script(line, check=True, cwd=ROOT, timeout=300, **environment):
    """Run a line of shell with more variables in its environment; return the finished process."""
    environment = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    settings = {
        "capture_output": True,
        "text": True,
        "cwd": cwd,
        "env": environment,
        "timeout": timeout,
    }
    result = subprocess.run(["bash", "-c", line], **settings)
    assert not check or result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result


def zip_of(path, files):
    """Write an archive of the contents, by name; return its path."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def tar_of(path, files, extra=()):
    """Write an archive of the contents, by name, with the members `extra`; return its path."""
    mode = {"tgz": "w:gz", "gz": "w:gz", "bz2": "w:bz2", "xz": "w:xz"}[path.name.rpartition(".")[2]]
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for member in extra:
            archive.addfile(member)
    return path


def wait_until_unlocked(path, timeout=20):
    """Wait until nobody holds the lock on a file.

    A killed process holds it for a moment longer than its pipes.
    """
    deadline = time.monotonic() + timeout
    with path.open() as file:
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                assert time.monotonic() < deadline, path
                time.sleep(0.02)


def dry_run(line, **environment):
    """Return the fairseq commands that a line of shell would run, each as a list of words."""
    output = script(line, DRY_RUN=1, **environment).stdout
    commands = [
        shlex.split(command) for command in output.splitlines() if command.startswith("fairseq-")
    ]
    assert commands, line
    return commands


def commands_of(text):
    """Return the commands that contain a recipe's script.

    They are indented, fenced, or code in a table or a sentence.
    """
    fenced = r"(?ms)^```\w*\n(.*?)^```$"
    indented = r"(?m)(?:^    .*\n)+"
    blocks = [*re.findall(fenced, text), *re.findall(indented, re.sub(fenced, "", text))]
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(indented, "", re.sub(fenced, "", text))
    lines += [code.replace("\\|", "|") for code in re.findall(r"`([^`\n]+)`", prose)]
    return [line for line in lines if SCRIPT.search(line) and line != "scripts/sweep.py"]


def parse(command):
    """Return fairseq's namespace for a command; an unknown flag or value raises SystemExit."""
    parser = PARSERS[Path(command[0]).name]()
    return options.parse_args_and_arch(parser, input_args=command[1:])


def refusal(result):
    """Return the one line in which a script refused its input."""
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    (line,) = (line for line in result.stderr.splitlines() if ": error: " in line)
    return line


def refused_here(capsys, function, *arguments):
    """Return the one line with which a function of prepare.py ends the program."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        function(*arguments)
    assert ended.value.code == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("prepare: error: ")
    return line.removeprefix("prepare: error: ")
