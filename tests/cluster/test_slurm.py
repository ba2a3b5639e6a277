"""Trainings under a real SLURM with two tasks.

They are requeued, meet their time limit, lose a task, and share one lock for a folder.
"""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

from tests.cluster.slurm import Cluster, Job, missing
from tests.commands import PLUGIN, SIZES, TRAINING
from tests.robustness.test_faults import assert_same, state

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]
UPDATES = 120


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def command(translation_data):
    program = Path(sys.executable).parent / "fairseq-train"
    sizes = [
        "--arch=mixhead_transformer",
        *SIZES,
        "--max-tokens=30",
        "--validate-interval=1000",
    ]
    return [
        sys.executable,
        program,
        translation_data,
        f"--user-dir={PLUGIN}",
        *TRAINING,
        *sizes,
        "--dropout=0.2",
    ]


@pytest.fixture(scope="module")
def undisturbed(cluster, command, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    job = Job(cluster, folder, *command, "--max-update", UPDATES, "--save-dir", folder / "save")
    assert job.until_ended() == "COMPLETED 0:0", job.text()[-3000:]
    return folder / "save"


def updates(job):
    return [int(number) for number in re.findall(r'"num_updates": "(\d+)"', job.text())]


def test_a_requeued_job_keeps_its_log_and_ends_as_an_undisturbed_one(
    cluster, command, undisturbed, tmp_path
):
    """Preempted twice: by USR1, which the time limit sends, and by SLURM's own requeue."""
    job = Job(cluster, tmp_path, *command, "--max-update", UPDATES, "--save-dir", tmp_path / "save")
    for number, words in enumerate(
        (["scancel", "--signal=USR1", job.number], ["scontrol", "requeue", job.number])
    ):
        seen = len(updates(job))
        job.until(lambda seen=seen: len(updates(job)) >= seen + 5)
        cluster.ask(*words)
        job.starts_again(number + 1)
    assert job.text().count("ended by a signal after update") == 2
    assert job.until_ended() == "COMPLETED 0:0", job.text()[-3000:]
    made = updates(job)
    assert sorted(set(made)) == list(range(1, UPDATES + 1)) and made[0] == 1
    assert_same(state(tmp_path / "save"), state(undisturbed))


def test_the_time_limit_saves_and_requeues(cluster, command, tmp_path):
    """SLURM sends the signal up to a minute early."""
    flags = ("--time=3", "--signal=USR1@60")
    job = Job(
        cluster,
        tmp_path,
        *command,
        "--max-update",
        10**6,
        f"--save-dir={tmp_path / 'save'}",
        flags=flags,
    )
    job.until(lambda: int(job.fact("Restarts")) == 1)
    cluster.ask("scancel", job.number)
    assert "ended by a signal after update" in job.text() and "Traceback" not in job.text()
    saved = torch.load(tmp_path / "save" / "checkpoint_last.pt", weights_only=True)
    assert saved["optimizer_history"][-1]["num_updates"] == updates(job)[-1]


@pytest.mark.parametrize(
    "status, ends", [(75, "COMPLETED 0:0"), (138, "COMPLETED 0:0"), (1, "FAILED 1:0")]
)
def test_the_status_says_whether_a_job_is_requeued(status, ends, cluster, tmp_path):
    first = f'test "${{SLURM_RESTART_COUNT:-0}}" != 0 || exit {status}'
    (tmp_path / "train.sh").write_text(
        f"#!/bin/bash\necho task $SLURM_PROCID of $4: ${{*: -2}}\n{first}\n"
    )
    (tmp_path / "train.sh").chmod(0o755)
    job = Job(cluster, tmp_path, tmp_path / "train.sh", "data")
    if status != 1:
        job.starts_again(1)
    assert job.until_ended() == ends
    found = re.findall(r"task (\d) of (\d): --distributed-rank (\d)", job.text())
    assert sorted(found) == sorted([("0", "2", "0"), ("1", "2", "1")] * (1 if status == 1 else 2))


def test_a_cancelled_job_is_not_requeued(cluster, command, tmp_path):
    job = Job(cluster, tmp_path, *command, "--max-update", 10**6, "--save-dir", tmp_path / "save")
    job.until(lambda: len(updates(job)) >= 3)
    cluster.ask("scancel", job.number)
    assert job.until_ended().startswith("CANCELLED")
    job.until(lambda: not job.processes())
    assert job.fact("Restarts") == "0" and job.fact("JobState") == "CANCELLED"


def test_a_dead_task_ends_the_job_and_a_second_job_in_its_folder_is_refused(
    cluster, command, tmp_path
):
    flags = [*command, "--save-interval-updates", 5, "--save-dir", tmp_path / "save"]
    job = Job(cluster, tmp_path, *flags, "--max-update", 10**6)
    job.until(lambda: len(updates(job)) >= 6)
    first = job.processes()
    (tmp_path / "second").mkdir()
    second = Job(cluster, tmp_path / "second", *flags, "--max-update", 1)
    assert second.until_ended().startswith("FAILED")
    line = (
        f"fairseq-train: error: --save-dir {tmp_path}/save: process {first[0]} on "
        f"{os.uname().nodename} trains in it"
    )
    assert line in second.text()
    os.kill(first[1], signal.SIGKILL)
    assert job.until_ended().startswith("FAILED")
    job.until(lambda: not job.processes())
    after = Job(cluster, tmp_path, *flags, "--max-update", updates(job)[-1] + 3)
    assert after.until_ended() == "COMPLETED 0:0", after.text()[-3000:]
