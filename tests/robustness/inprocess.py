"""fairseq's commands in a forked child of this process: what a user sees, without the seconds of the imports."""

import importlib
import io
import os
import runpy
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple, Optional

from tests.commands import PLUGIN

ROOT = Path(__file__).resolve().parents[2]
FAIRSEQ = {
    name: f"fairseq_cli.{name.partition('-')[2].replace('-', '_')}"
    for name in (
        "fairseq-train",
        "fairseq-generate",
        "fairseq-eval-lm",
        "fairseq-validate",
        "fairseq-interactive",
        "fairseq-preprocess",
    )
}
LIMIT = 120  # seconds


class Seen(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def errors(self):
        """What stands in stderr beside warnings and progress bars."""
        lines = self.err.replace("\r", "\n").splitlines()
        return [line for line in lines if ": error: " in line]


def _call(command, arguments):
    sys.argv = [command, *map(str, arguments)]
    if command in FAIRSEQ:
        importlib.import_module(FAIRSEQ[command]).cli_main()
    elif command.startswith("-m "):
        runpy.run_module(command[3:], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(command).parent))
        runpy.run_path(command, run_name="__main__")


def seen(command, *arguments, stdin: bytes = b"", cwd=None, path=(), environment: Optional[dict] = None) -> Seen:
    """Run `command`: a name of FAIRSEQ, '-m module', or a script; uncaught errors meet the hook of this process."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as given:
        given.write(stdin)
        given.seek(0)
        child = os.fork()
        if child == 0:
            _be_the_command(command, arguments, (given, out, err), cwd, path, environment)
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return Seen(os.waitstatus_to_exitcode(status), *texts)


def _be_the_command(command, arguments, files, cwd, path, environment):
    status = 1
    try:
        signal.alarm(LIMIT)
        for number, file in enumerate(files):
            os.dup2(file.fileno(), number)
        # pytest has replaced them
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0)), encoding="utf-8")
        sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(n, "w"), encoding="utf-8") for n in (1, 2))
        os.environ.update(environment or {})
        if cwd is not None:
            os.chdir(cwd)
        sys.path[:0] = map(str, path)
        _call(command, arguments)
        status = 0
    except SystemExit as ending:
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
        status = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            traceback.print_exc()
            status = 99
        os._exit(status)


def refusal(*command, **settings) -> str:
    """The one line that a command ends with; it must be the only error, without a traceback."""
    found = seen(*command, **settings)
    text = found.out[-1500:] + found.err[-3000:]
    assert found.status not in (0, None) and found.status > 0, text
    assert "Traceback" not in found.err and "Traceback" not in found.out, text
    assert len(found.errors) == 1, text
    assert found.err.rstrip().splitlines()[-1] == found.errors[0], text
    return found.errors[0]


def preprocessed(corpus, data, *flags):
    """tests.commands.preprocess in a fork."""
    prefixes = [flag for split in ("train", "valid", "test") for flag in (f"--{split}pref", corpus / split)]
    found = seen("fairseq-preprocess", "--user-dir", PLUGIN, *prefixes, "--destdir", data, *flags)
    assert found.status == 0, found.out[-2000:] + found.err[-2000:]
    return data
