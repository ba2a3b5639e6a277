"""The steps of a report run in processes of their own.

Whatever one does, the others run to their end.
"""

import os
import time

import pytest
from benchmarks import steps


def act(step):
    yield {"begun": step}
    if step == "fails":
        raise ValueError("a reason\nand more")
    if step == "dies":
        os._exit(7)
    if step == "hangs":
        time.sleep(60)
    yield {"done": step}


def ends(names, tmp_path, **limits):
    """Return the rows, and the fault of each step."""
    limits = {"workers": 1, "seconds": 100.0, "limit": 50.0, **limits}
    events = list(steps.run(act, names, tmp_path / "log", **limits))
    return [event.row for event in events if event.row], {
        e.step: e.fault for e in events if e.row is None
    }


@pytest.mark.parametrize("workers", [1, 2])
def test_a_step_that_fails_or_dies_leaves_its_rows_and_the_other_steps(workers, tmp_path):
    rows, faults = ends(["fails", "dies", "works"], tmp_path, workers=workers)
    assert faults == {
        "fails": "ValueError: a reason",
        "dies": "its process ended with exit status 7",
        "works": "",
    }
    assert {"begun": "fails"} in rows and {"begun": "dies"} in rows and {"done": "works"} in rows
    assert "and more" in (tmp_path / "log").read_text()  # the whole error


class DiesWhenItIsRead:
    """A function whose process dies when it unpickles it, before it reads a step."""

    def __reduce__(self):
        return os._exit, (7,)


@pytest.mark.parametrize("is_dead", [False, True], ids=["before it is read", "before it is sent"])
def test_a_process_that_dies_before_its_step_has_a_fault(is_dead, tmp_path):
    worker = steps.Worker(DiesWhenItIsRead(), tmp_path / "log")
    if is_dead:
        worker.process.join()
    worker.begin("a step", limit=50.0)
    event = steps.received(worker)
    worker.end()
    assert (event.step, event.row) == ("a step", None)
    assert event.fault == "its process ended with exit status 7"


def test_a_step_that_hangs_is_ended(tmp_path):
    # The first step of a process gets the seconds of its start, too; so "hangs" is not the first.
    rows, faults = ends(["begins", "hangs", "works"], tmp_path, limit=1.0)
    assert faults == {"begins": "", "hangs": "did not end within 1 s", "works": ""}
    assert {"begun": "hangs"} in rows
    assert {"done": "works"} in rows


def test_steps_beyond_the_time_are_named(tmp_path):
    _, faults = ends(["hangs", "works"], tmp_path, seconds=0.5)
    over = "the time of this part was over"
    assert faults == {"hangs": over, "works": f"not begun: {over}"}


def test_a_fault_is_the_first_line_that_says_something():
    assert steps.one_line(ValueError("\n  a reason\nand more")) == "ValueError: a reason"
