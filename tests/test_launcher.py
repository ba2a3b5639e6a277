"""The workers of pytest share a server, and each ends what it has started alone."""

import os
import signal
import time

import pytest

from tests.launcher import Launcher


@pytest.fixture
def program(tmp_path):
    """A program that prints which process has forked it, and then sleeps the seconds it is told."""
    path = tmp_path / "program.py"
    path.write_text(
        "import os, sys, time\nprint(os.getppid(), flush=True)\ntime.sleep(int(sys.argv[1]))\n"
    )
    return path


@pytest.fixture
def client(monkeypatch, tmp_path):
    """Return client() -> a launcher, as another worker of the same run has it."""
    monkeypatch.setattr("tests.launcher.SOCKETS", tmp_path)
    made = []

    def connect():
        made.append(Launcher("tiny", "json"))
        return made[-1]

    yield connect
    for each in made:
        each.close()
    for each in made:
        if each.server is not None:
            each.server.wait(timeout=60)


def test_all_clients_share_one_server(client, program):
    servers = {client().run(program, 0).stdout for _ in range(3)}
    assert len(servers) == 1


def test_a_client_that_ends_takes_its_commands_along_and_leaves_those_of_others(client, program):
    one, other = client(), client()
    of_one, of_other = one.start(program, 600), other.start(program, 600)
    one.close()

    deadline = time.monotonic() + 60
    while runs(of_one.pid) and time.monotonic() < deadline:
        time.sleep(0.01)

    assert not runs(of_one.pid)
    assert runs(of_other.pid)
    assert other.run(program, 0).returncode == 0


def test_the_server_ends_with_its_last_client(client, program):
    only = client()
    only.run(program, 0)
    only.close()
    assert only.server.wait(timeout=60) == 0


def test_a_client_that_comes_while_the_server_ends_is_served(client, program):
    for _ in range(20):
        each = client()
        assert each.run(program, 0).returncode == 0
        each.close()


@pytest.fixture
def ended_by_a_broken_pipe():
    """What a command does to the process that calls it: SIGPIPE ends it."""
    former = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGPIPE, former)


@pytest.mark.usefixtures("ended_by_a_broken_pipe")
def test_a_server_that_was_killed_says_so_and_the_next_client_starts_another(client, program):
    one = client()
    one.run(program, 0)
    one.server.kill()
    one.server.wait()
    with pytest.raises(RuntimeError, match=r"the process that imports \('json',\) ended"):
        one.run(program, 0)
    assert client().run(program, 0).returncode == 0


def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
