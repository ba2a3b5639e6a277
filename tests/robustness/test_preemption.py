"""Signals, locks and other numbers of workers: what a cluster does to a training."""

import os
import signal
import time

import pytest
import torch

from mixhead_plugin.fairseq.repairs import one_training
from tests.commands import in_workers, logged, refusal, start
from tests.robustness.test_faults import FOUR_EPOCHS, assert_as_undisturbed, assert_whole, spawned

DDP = ["--ddp-backend", "legacy_ddp"]


@pytest.mark.slow  # by default tests/fairseq/repairs/test_shared_epoch.py counts the sentences
@pytest.mark.parametrize("numbers", [(2, 1), (1, 2), (2, 3)], ids=str)
def test_an_epoch_goes_on_in_another_number_of_workers(numbers, recipes, tmp_path):
    flags = [
        *DDP,
        "--max-tokens=30",
        f"--save-dir={tmp_path / 'save'}",
        "--disable-validation",
        "--max-epoch=1",
    ]
    seen = 0
    for number, end in zip(numbers, (["--max-update", "3"], [])):
        arguments = [*recipes["transformer"], *flags, *end]
        workers = (
            [start("fairseq-train", *arguments)] if number == 1 else in_workers(number, *arguments)
        )
        ends = [worker.wait() for worker in workers]
        assert not any(end.returncode for end in ends), [end.stderr[-3000:] for end in ends]
        seen += sum(int(line["bsz"]) for line in logged(ends[0].stdout + ends[0].stderr))
    assert seen == 90
    assert "batches, the others are shared anew" in ends[0].stdout + ends[0].stderr


SIGNAL = """
import os, signal, sys
from fairseq.tasks.fairseq_task import FairseqTask
original = FairseqTask.train_step
def train_step(*args, **settings):
    sends = "--distributed-rank" not in sys.argv or sys.argv[-1] == "1"
    if settings.get("update_num") == {update} and sends:
        os.kill(os.getpid(), signal.{name})
    return original(*args, **settings)
FairseqTask.train_step = train_step
"""


@pytest.mark.parametrize(
    "name, update",
    [
        ("SIGUSR1", 6),
        *(pytest.param("SIGTERM", update, marks=pytest.mark.slow) for update in (5, 9)),
    ],
)  # in the middle of an epoch, where it also saves regularly, and at its end
def test_a_signal_saves_and_the_same_command_goes_on(name, update, recipes, undisturbed, tmp_path):
    arguments = [*recipes["transformer_lm"], *FOUR_EPOCHS, "--save-dir", tmp_path / "save"]
    ended = start(
        "fairseq-train", *arguments, before=SIGNAL.format(name=name, update=update)
    ).wait()
    assert ended.returncode == os.EX_TEMPFAIL, ended.stderr[-3000:]
    output = ended.stdout + ended.stderr
    assert (
        "Traceback" not in output
        and f"ended by a signal after update {update + 1}, with a checkpoint" in output
    )
    assert_whole(tmp_path / "save")
    again = start("fairseq-train", *arguments).wait()
    assert again.returncode == 0
    parts = [output, again.stdout + again.stderr]
    assert_as_undisturbed(parts, tmp_path / "save", undisturbed("transformer_lm", *FOUR_EPOCHS))


@pytest.mark.parametrize(
    "flags", [[], pytest.param(["--no-save"], marks=pytest.mark.slow)], ids=["saves", "not"]
)
def test_a_signal_to_the_whole_group_ends_a_training_with_data_workers(flags, recipes, tmp_path):
    """So do sweep.py and SLURM: the data workers get the signal, too."""
    # The group is that of the launcher's fork.
    before = SIGNAL.format(name="SIGTERM", update=6).replace("os.kill(os.getpid(),", "os.killpg(0,")
    assert "killpg" in before
    flags = [*FOUR_EPOCHS, "--num-workers", "1", "--save-dir", tmp_path / "save", *flags]
    ended = start("fairseq-train", *recipes["transformer_lm"], *flags, before=before).wait()
    if "--no-save" in flags:
        assert ended.returncode == -signal.SIGTERM
    else:
        assert ended.returncode == os.EX_TEMPFAIL, ended.stderr[-3000:]
        assert_whole(tmp_path / "save")


def test_workers_stop_after_the_same_update(recipes, tmp_path):
    """Only the second worker gets the signal."""
    flags = [
        *DDP,
        "--max-update=1000",
        f"--save-dir={tmp_path / 'save'}",
        "--save-interval-updates=0",
    ]
    workers = in_workers(
        2, *recipes["transformer"], *flags, before=SIGNAL.format(name="SIGTERM", update=4)
    )
    ends = [worker.wait(60) for worker in workers]
    assert [end.returncode for end in ends] == [os.EX_TEMPFAIL] * 2, [
        end.stderr[-3000:] for end in ends
    ]
    saved = torch.load(tmp_path / "save" / "checkpoint_last.pt", weights_only=True)
    assert saved["optimizer_history"][-1]["num_updates"] == 5


@pytest.mark.slow
def test_workers_that_fairseq_has_started_get_the_signal(recipes, tmp_path):
    with spawned(recipes["transformer"], tmp_path) as (parent, log):
        deadline = time.monotonic() + 120
        # srun sends it again when one task has ended
        while parent.poll() is None and time.monotonic() < deadline:
            parent.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        status = parent.poll()
    text = log.read_text()
    assert status == os.EX_TEMPFAIL and "ended by a signal after update" in text, text[-3000:]
    assert "Traceback" not in text


def test_a_second_training_in_a_folder_is_refused(recipes, tmp_path):
    """This process is the first one."""
    save = tmp_path / "save"
    save.mkdir()
    one_training.lock(str(save))
    command = ["fairseq-train", *recipes["transformer"], "--max-update", "1", "--save-dir"]
    now = "from mixhead_plugin.fairseq.repairs import one_training; one_training.WAIT = 0"
    line = refusal(*command, save, before=now)
    assert (
        f"error: --save-dir {save}: process {os.getpid()} on {os.uname().nodename} trains in it"
        in line
    )
    assert [path.name for path in save.iterdir()] == [one_training.LOCK_FILE]
    assert not start(*command, save, "--no-save", before=now).wait().returncode


@pytest.mark.parametrize("number", [37, 95])
def test_a_folder_that_cannot_be_locked_is_used_with_a_warning(
    number, tmp_path, monkeypatch, caplog
):
    """ENOLCK and ENOTSUP: a network file system without locks."""

    def lockf(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(one_training.fcntl, "lockf", lockf)
    one_training.lock(str(tmp_path))
    said = f"--save-dir {tmp_path}: cannot be locked ({os.strerror(number)}); train only once in it"
    assert [record.message for record in caplog.records] == [said]
