"""A command in a fork behaves like one in a process of its own."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launcher import Launcher

PROGRAM = """
import os, signal, sys, time
sys.stderr.write("to stderr\\n")
what, *rest = sys.argv[1:]
if what == "echo":
    print(__name__, sys.argv[0], rest, os.getcwd(), os.environ["GREETING"], sys.stdin.read())
elif what == "exit":
    sys.exit(3)
elif what == "fault":
    raise ValueError("a fault")
elif what == "signal":
    os.kill(os.getpid(), signal.SIGTERM)
else:
    open(rest[0], "w").write(str(os.getpid()))
    time.sleep(60)
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


def is_running(pid):
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # a zombie has ended


def ended(path):
    deadline = time.monotonic() + 10
    while is_running(int(path.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(int(path.read_text()))


@pytest.fixture
def asleep(launcher, program, tmp_path):
    """Return a command that has written its number to `pid` and sleeps."""
    command, path = launcher.start(program, "sleep", tmp_path / "pid"), tmp_path / "pid"
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, command.output()
        time.sleep(0.01)
    return command


def test_a_time_out_ends_it(asleep, launcher, program, tmp_path):
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        asleep.wait(timeout=0.1)
    assert raised.value.stderr == "to stderr\n" and ended(tmp_path / "pid")
    assert launcher.run(program, "exit").returncode == 3
