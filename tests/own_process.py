"""Run a test in a process of its own, which runs no thread: its DataLoader forks workers."""

import functools
import json
import runpy
import sys

from tests.commands import TRAIN


def in_own_process(test):
    """Let `test` run in a fork of the launcher's server; its fixtures arrive as text."""

    @functools.wraps(test)  # pytest finds the fixtures
    def run(**fixtures):
        words = [test.__code__.co_filename, test.__name__, json.dumps(fixtures, default=str)]
        ended = TRAIN.run(
            "-m tests.own_process", *words, before=f"import sys; sys.path += {sys.path}"
        )
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]

    return run


if __name__ == "__main__":
    file, name, fixtures = sys.argv[1:]
    runpy.run_path(file)[name].__wrapped__(**json.loads(fixtures))
