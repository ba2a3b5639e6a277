"""A command in a fork behaves like one in a process of its own."""

import os
import subprocess
import sys

import pytest

from tests.launcher import Launcher

PROGRAM = """
import os, signal, sys
sys.stderr.write("to stderr\\n")
what, *rest = sys.argv[1:]
if what == "echo":
    print(__name__, sys.argv[0], rest, os.getcwd(), os.environ["GREETING"], sys.stdin.read())
elif what == "exit":
    sys.exit(3)
elif what == "fault":
    raise ValueError("a fault")
else:
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.fixture
def launcher():
    found = Launcher("json")
    yield found
    found.stop()


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize("what", ["echo", "exit", "fault", "signal"])
def test_it_behaves_like_a_process(what, launcher, program, tmp_path):
    env = {**os.environ, "GREETING": "hello"}
    (tmp_path / "folder").mkdir()
    settings = {"env": env, "cwd": tmp_path / "folder"}
    expected = subprocess.run(
        [sys.executable, program, what, "a b", "--c"], input="typed\n", capture_output=True, text=True, **settings
    )
    for _ in range(2):
        found = launcher.run(program, what, "a b", "--c", stdin="typed\n", **settings)
        assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
        assert found.stderr.splitlines()[-1] == expected.stderr.splitlines()[-1]
