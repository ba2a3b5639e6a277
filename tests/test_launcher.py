"""A command in a fork behaves like one in a process of its own."""

import os
import signal
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
elif what == "random":
    import random
    print(random.random())
elif what == "open":
    os.execv(sys.executable, [sys.executable, "-c", "import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))"])
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


def test_no_two_draw_the_same_numbers(launcher, program):
    assert launcher.run(program, "random").stdout != launcher.run(program, "random").stdout


def test_a_child_of_a_command_inherits_three_files(launcher, program):
    assert launcher.run(program, "open").stdout in ("[0, 1, 2, 3]\n", "[0, 1, 2]\n")  # 3: the folder that is listed


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


def test_an_interruption_ends_it(asleep, launcher, program, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            asleep.wait()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    assert ended(tmp_path / "pid")
    assert launcher.run(program, "exit").returncode == 3


def test_two_run_beside_each_other(launcher, program, tmp_path):
    first, second = (launcher.start(program, "sleep", tmp_path / name) for name in "ab")
    second.kill()
    assert second.wait().returncode == -signal.SIGKILL
    assert is_running(first.pid)
    first.kill()
    assert first.wait().returncode == -signal.SIGKILL


def test_a_command_is_reaped_once(launcher, program, monkeypatch):
    started = launcher.start(program, "exit")
    assert started.wait().returncode == started.wait().returncode == 3
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("the pid may be another process's"))
    started.kill()
    assert launcher.run(program, "exit").returncode == 3


def test_code_can_run_before_it(launcher, program):
    found = launcher.run(program, "echo", env={"GREETING": "hello"}, before="import sys; sys.argv.append('more')")
    assert "['more']" in found.stdout


def test_a_failed_import_is_reported(program):
    launcher = Launcher("no_such_module")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="No module named 'no_such_module'"):
            launcher.run(program, "exit")
    assert launcher.server is None
