"""Kill trainings, fill their disk and end their workers.

Nothing is lost, and every error is reported.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.commands import ROOT, free_port, in_workers, logged, start
from tests.robustness import faults

# A loss that does not halve in an epoch counts as no progress. Two such epochs in a row lower the
# learning rate.
PLATEAU = ["--lr-scheduler", "reduce_lr_on_plateau", "--lr-threshold", "0.5", "--lr-patience", "1"]
THREE_EPOCHS = ["--max-epoch", "3"]
# Five updates make an epoch, so the mean of four losses goes on in the next one.
FOUR_EPOCHS = ["--log-interval", "4", *PLATEAU, "--max-epoch", "4"]
# the metric is the loss, which falls
NO_PROGRESS = ["--maximize-best-checkpoint-metric", "--max-update", "40"]


def lines(output):
    """Return what was logged, without times and speeds, by kind and number of updates."""
    found = {}
    for kind, prefix in (("train_inner", ""), ("train", "train_"), ("valid", "valid_")):
        for line in logged(output, kind):
            values = {k: v for k, v in line.items() if not re.search(r"(wps|ups|wall)$", k)}
            found[kind, int(line[f"{prefix}num_updates"])] = values
    return found


def state(save, name="checkpoint_last.pt"):
    """Return what a training resumes from, without its times."""
    saved = torch.load(save / name, weights_only=True)
    extra = {
        k: v
        for k, v in saved["extra_state"].items()
        if k in ("train_iterator", "val_loss", "best", "early_stop")
    }
    kept = {k: saved[k] for k in ("model", "last_optimizer_state")}
    # fairseq adds an entry to the history each time it resumes
    return {"extra": extra, "history": saved["optimizer_history"][-1], **kept}


def assert_same(found, expected, where=""):
    """Compare bit for bit."""
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected)):
            assert_same(one, other, f"{where}.{i}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    else:
        assert found == expected, where


def assert_whole(save):
    """Load every checkpoint of a folder: none may be partial."""
    for path in save.glob("*.pt"):
        torch.load(path, weights_only=True)


def assert_as_undisturbed(outputs, save, expected):
    """Compare a training in parts with an undisturbed one.

    Both the logs of the parts and the checkpoints count.

    The mean of an epoch may be missing: fairseq logs it after it has saved the checkpoint, and a
    kill may come between.
    """
    whole = lines((expected / "log").read_text())
    parts = {}
    for output in outputs:
        for site, values in lines(output).items():
            assert values == whole[site], site
            parts[site] = values
    assert {site for site in whole if site[0] != "train"} <= parts.keys()
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        assert_same(state(save, name), state(expected / "save", name), name)


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Killed:
    """A training that is killed and started again, until it ends by itself."""

    def __init__(self, arguments, folder):
        self.save = folder / "save"
        self.arguments = [*arguments, "--save-dir", self.save]
        self.outputs = []

    def go(self, fault=None):
        """Start the training; return how it ended. A fault is one of tests/robustness/faults.py."""
        before = faults.before(folder=self.save, **fault) if fault else ""
        end = start("fairseq-train", *self.arguments, before=before).wait()
        self.outputs.append(end.stdout + end.stderr)
        if self.save.exists():
            assert_whole(self.save)
        return end


# The events of a save, in order: checkpoint_<epoch>_<update>.pt is opened and renamed, then
# checkpoint_best.pt, then checkpoint_last.pt. Three events come before the first save: the test of
# --save-dir, and its lock.
BEGIN = 3
IN_THE_FIRST_LAST = dict(at=7, how="cut", bytes=5000)
IN_THE_SECOND = dict(at=11, how="cut", bytes=5000)  # checkpoint_best.pt or checkpoint_last.pt
IN_THE_NEXT = dict(at=3, how="cut", bytes=5000)
BEFORE_A_NAME = dict(at=6, how="kill")
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "recipe, moments, flags",
    [
        slow(
            "transformer",
            [IN_THE_FIRST_LAST, IN_THE_SECOND, IN_THE_NEXT],
            THREE_EPOCHS,
            id="transformer, cut in three saves",
        ),
        slow("transformer_lm", [BEFORE_A_NAME], FOUR_EPOCHS, id="transformer_lm, before a rename"),
        slow(
            "transformer_xl",
            [IN_THE_SECOND, BEFORE_A_NAME],
            THREE_EPOCHS,
            id="transformer_xl, cut in a save, then before a rename",
        ),
        pytest.param(
            "transformer_lm", [IN_THE_SECOND], FOUR_EPOCHS, id="transformer_lm, cut in a save"
        ),
    ],
)
def test_a_training_killed_while_it_saves_ends_undisturbed(
    recipe, moments, flags, recipes, undisturbed, tmp_path
):
    expected = undisturbed(recipe, *flags)
    killed = Killed([*recipes[recipe], *flags], tmp_path)
    for moment in moments:
        assert killed.go(moment).returncode in (-signal.SIGKILL, -signal.SIGXFSZ), killed.outputs[
            -1
        ][-3000:]
    assert killed.go().returncode == 0, killed.outputs[-1][-3000:]
    assert_as_undisturbed(killed.outputs, killed.save, expected)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["masked_lm", "sentence_prediction"])
def test_data_drawn_anew_in_each_epoch_are_those_of_an_undisturbed_training(
    recipe, recipes, undisturbed, tmp_path
):
    """Kill in the middle of the second epoch and at its end, when data workers have read ahead."""
    expected = undisturbed(recipe, *THREE_EPOCHS)
    names = [(event, name.split(".")[0]) for event, name in faults.events(expected / "events")]
    # of saves
    ends = [i + 1 for i, what in enumerate(names) if what == ("os.rename", "checkpoint_last")]
    began = {
        epoch: next(i for i, what in enumerate(names) if f"_{epoch}_" in what[1])
        for epoch in (2, 3)
    }
    midst = next(end for end in ends if end > began[2])
    end = max(end for end in ends if end <= began[3])
    assert midst < end
    killed = Killed([*recipes[recipe], *THREE_EPOCHS], tmp_path)
    for at in (midst, BEGIN + end - midst):
        assert killed.go(dict(at=at)).returncode == -signal.SIGKILL
    site = torch.load(killed.save / "checkpoint_last.pt", weights_only=True)["extra_state"][
        "train_iterator"
    ]
    assert (site["epoch"], site["iterations_in_epoch"]) == (3, 0)
    assert killed.go().returncode == 0
    assert_as_undisturbed(killed.outputs, killed.save, expected)


@pytest.mark.slow  # by default a signal ends a training in the middle of an epoch
@pytest.mark.parametrize("ends", [["3"], ["1", "2", "3"]])
def test_an_end_of_an_epoch_changes_nothing(ends, recipes, undisturbed, tmp_path):
    """The resumed training keeps what belongs to the epoch.

    That is the batches, the schedule's count of bad epochs and the mean of losses.
    """
    expected = undisturbed("transformer_lm", *FOUR_EPOCHS)
    killed = Killed([*recipes["transformer_lm"], *FOUR_EPOCHS], tmp_path)
    for epochs in (*ends, "4"):
        killed.arguments += ["--max-epoch", epochs]
        assert killed.go().returncode == 0, killed.outputs[-1][-3000:]
    rates = [line["lr"] for line in logged((expected / "log").read_text())]
    assert rates[0] == "0.01" and rates[-1] == "0.001"
    assert_as_undisturbed(killed.outputs, killed.save, expected)


@pytest.mark.parametrize(
    "limit, reason",
    [
        (["--max-update", "3"], "--max-update 3 is reached"),
        slow(["--patience", "2", *NO_PROGRESS], "--patience 2 is used up"),
    ],
    ids=["max-update", "patience"],
)
def test_a_training_that_has_ended_makes_no_more_updates(
    limit, reason, recipes, undisturbed, tmp_path
):
    """A cluster may start a training again after it has ended."""
    expected = undisturbed("transformer", *limit)
    shutil.copytree(expected / "save", tmp_path / "save")
    again = Killed([*recipes["transformer"], *limit], tmp_path)
    assert again.go().returncode == 0
    assert f"nothing to train: {reason}" in again.outputs[0]
    assert lines(again.outputs[0]) == {}
    assert_same(state(again.save), state(expected / "save"))


@pytest.mark.parametrize(
    "at", [9, pytest.param(11, marks=pytest.mark.slow), pytest.param(13, marks=pytest.mark.slow)]
)
def test_a_full_disk_ends_the_training_in_one_line_and_leaves_the_last_checkpoint(
    at, recipes, undisturbed, tmp_path
):
    training = Killed([*recipes["transformer"], *THREE_EPOCHS], tmp_path)
    end = training.go(dict(at=at, how="full", bytes=100_000))
    assert end.returncode == 1
    said = (
        rf"fairseq-train: error: checkpoint {training.save}/\S+: cannot be written: File too large"
    )
    output = training.outputs[-1]
    assert "Traceback" not in output and re.fullmatch(said, output.splitlines()[-1]), output[-3000:]
    assert not list(training.save.glob("*.tmp"))
    if at != 9:
        assert training.go().returncode == 0
        assert_as_undisturbed(
            training.outputs, training.save, undisturbed("transformer", *THREE_EPOCHS)
        )


NOTICES = 60  # seconds in which the other worker must end
ENDS = """
import os, signal, sys
from fairseq.tasks.fairseq_task import FairseqTask
from mixhead_plugin.errors import OptionError
original = FairseqTask.train_step
def train_step(*args, **settings):
    if settings.get("update_num") == 4 and sys.argv[-2:] == ["--distributed-rank", "{rank}"]:
        {how}
    return original(*args, **settings)
FairseqTask.train_step = train_step
"""
# fairseq's pytorch_ddp is for GPUs alone
GLOO = ["--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp"]
OPTION = "--flag 1: wrong"
ALLOCATOR = "DefaultCPUAllocator: cannot allocate memory"


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "how, status, last",
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        pytest.param(f"raise OptionError({OPTION!r})", 1, OPTION, marks=pytest.mark.slow),
        pytest.param(f"raise RuntimeError({ALLOCATOR!r})", 1, ALLOCATOR, marks=pytest.mark.slow),
    ],
    ids=["killed", "option", "allocator"],
)
def test_the_other_worker_ends_with_an_error_when_one_ends(
    how, status, last, rank, recipes, tmp_path
):
    flags = [*GLOO, "--max-update", "100000", "--save-dir", tmp_path / "save"]
    workers = in_workers(2, *recipes["transformer"], *flags, before=ENDS.format(how=how, rank=rank))
    ended, other = (workers[number].wait(NOTICES) for number in (rank, 1 - rank))
    assert (ended.returncode, other.returncode) == (status, 1), (
        ended.stderr[-2000:] + other.stderr[-2000:]
    )
    assert ended.stderr.rstrip().endswith(last) and re.search("[Cc]onnection", other.stderr)
    assert_whole(tmp_path / "save")
    assert (tmp_path / "save" / "checkpoint_last.pt").is_file()


SPAWN = """
import signal, sys, torch
torch.cuda.device_count = lambda: 2  # fairseq starts a worker for each
sys.argv[0] = "fairseq-train"
from fairseq_cli.train import cli_main
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for `&`; workers inherit it
    cli_main()
"""


def children(process):
    return [
        int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()
    ]


@contextmanager
def spawned(arguments, folder):
    """Start a training whose two workers fairseq starts.

    Yield its process and its log once it has saved.
    """
    (folder / "train.py").write_text(SPAWN)
    flags = [
        "--distributed-world-size=2",
        "--max-update=100000",
        f"--save-dir={folder / 'save'}",
        *GLOO,
    ]
    flags += ["--distributed-init-method", f"tcp://localhost:{free_port()}"]
    command = [str(word) for word in (sys.executable, folder / "train.py", *arguments, *flags)]
    with (folder / "log").open("w") as log:
        parent = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
    try:
        deadline = time.monotonic() + 180
        while not (folder / "save" / "checkpoint_last.pt").exists():
            assert parent.poll() is None and time.monotonic() < deadline, (
                folder / "log"
            ).read_text()[-3000:]
            time.sleep(0.1)
        yield parent, folder / "log"
    finally:
        parent.kill()
    assert_whole(folder / "save")


@pytest.mark.slow
def test_workers_that_fairseq_has_started_end_with_it(recipes, tmp_path):
    with spawned(recipes["transformer"], tmp_path) as (parent, _):
        workers = [
            c
            for c in children(parent.pid)
            if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()
        ]
        assert len(workers) == 2
        parent.kill()
        parent.wait()
        try:
            deadline = time.monotonic() + NOTICES
            while any(is_alive(worker) for worker in workers):
                assert time.monotonic() < deadline, "a worker is left"
                time.sleep(0.1)
        finally:
            for worker in filter(is_alive, workers):
                os.kill(worker, signal.SIGKILL)
