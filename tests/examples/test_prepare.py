"""A preparation works alone in its folder and leaves nothing there after a signal."""

import os
import subprocess
import sys
import time

import pytest
from common.files import written_whole
from common.prepare import ENDINGS, LOCK, data_folder, preprocess
from recipes import EXAMPLES, refused_here

pytestmark = pytest.mark.usefixtures("plain_environment")

# A fairseq-preprocess at work, with a child process
WORKER = """#!/bin/sh
while [ "$1" != --destdir ]; do shift; done
mkdir "$2"
sleep 100 &
echo $$ > "$2/number" && mv "$2/number" "$2/dict.txt"
wait
"""
PROGRAM = """
import signal
from common.files import written_whole
from common.prepare import ENDINGS, data_folder, preprocess, start

def main():
    with data_folder() as data, written_whole(data / "lines") as unfinished:
        preprocess(unfinished, 1, [])

for number in ENDINGS:  # a script's background process ignores them
    signal.signal(number, signal.SIG_DFL)
start(main)
"""


@pytest.fixture
def data(tmp_path, plain_environment):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "fairseq-preprocess").write_text(WORKER)
    (tmp_path / "bin" / "fairseq-preprocess").chmod(0o755)
    plain_environment.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    plain_environment.setenv("PYTHONPATH", str(EXAMPLES))
    plain_environment.setenv("DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def enter():
    with data_folder() as folder:
        return folder


@pytest.mark.parametrize("number", ENDINGS)
def test_a_signal_ends_a_preparation_and_all_that_it_started(number, data):
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    try:
        while not (data / "lines.unfinished" / "dict.txt").exists():
            assert program.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        program.send_signal(number)
        # Its children write to the same pipe, and sleep for 100 seconds.
        _, log = program.communicate(timeout=20)
    finally:
        program.kill()
    assert program.returncode == 128 + number
    assert log.splitlines()[1:] == [f"prepare: interrupted by {number.name}; run again to go on"]
    assert list(data.iterdir()) == [data / LOCK]


def test_a_folder_is_prepared_by_one_at_a_time(data, capsys):
    with data_folder() as folder:
        assert folder == data
        assert f"DATA={data}: another prepare.sh uses it (process {os.getpid()} " in refused_here(
            capsys, enter
        )
    enter()
    assert list(data.iterdir()) == [data / LOCK]


def test_fairseq_preprocess_that_fails_leaves_nothing(data, capfd):
    program = data.parent / "bin" / "fairseq-preprocess"
    program.write_text("#!/bin/sh\necho its words >&2\nexit 3\n")
    with pytest.raises(SystemExit), written_whole(data / "lines") as unfinished:
        preprocess(unfinished, 2, [])
    assert "fairseq-preprocess ended with status 3" in capfd.readouterr().err
    assert list(data.iterdir()) == []
