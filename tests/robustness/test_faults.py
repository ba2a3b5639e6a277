"""Killed, out of room, without its folder, without its colleague: what a training loses, and what it says."""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from fairseq import checkpoint_utils, distributed_utils
from fairseq.data import FairseqDataset, iterators
from fairseq.dataclass.configs import DistributedTrainingConfig
from fairseq.file_io import PathManager
from omegaconf import OmegaConf

from mixhead_plugin import saving
from mixhead_plugin.errors import OptionError
from tests.commands import BERT, LM_SIZES, SIZES, TRAINING, logged, run
from tests.robustness.faults import ROOT, Trainings, events
from tests.robustness.test_equality import TASKS
from tests.xl import XL_SIZES

COMMON = ["--user-dir", BERT, *TRAINING, "--save-interval-updates", "3"]
DROPOUT = ["--dropout", "0.2", "--attention-dropout", "0.2"]
# fairseq takes the last of a flag that comes twice
TRANSLATION = ["--arch", "mixhead_transformer", *SIZES, *COMMON, *DROPOUT, "--max-tokens", "100"]
LANGUAGE_MODEL = ["--arch", "mixhead_transformer_lm", *LM_SIZES, *COMMON, *DROPOUT, "--max-tokens", "80"]
LANGUAGE_MODEL += ["--task", "language_modeling", "--sample-break-mode", "eos"]
TRANSFORMER_XL = ["--arch", "mixhead_transformer_xl", *XL_SIZES, *COMMON, "--dropout", "0.1", "--dropatt", "0.1"]
TRANSFORMER_XL += ["--task", "truncated_bptt_lm", "--tokens-per-sample", "8", "--batch-size", "3", "--mem-len", "6"]
TRANSFORMER_XL += ["--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp"]
# Of a loss that does not halve from one epoch to the next two in a row are enough: what must be counted is counted.
PLATEAU = ["--lr-scheduler", "reduce_lr_on_plateau", "--lr-threshold", "0.5", "--lr-patience", "1"]
# Tasks whose data are drawn anew in each epoch, by workers that read ahead.
READ_AHEAD = ("masked_lm", "bert_pretraining", "squad", "sentence_prediction")
AHEAD = ["--num-workers", "2", "--save-interval-updates", "2", *DROPOUT, "--pooler-dropout", "0.2"]
THREE_EPOCHS = ["--max-epoch", "3"]
FOUR_EPOCHS = ["--log-interval", "3", *PLATEAU]  # of five updates: a mean of losses goes on in the next epoch


@pytest.fixture(scope="module")
def trainings():
    with Trainings() as server:
        yield server


@pytest.fixture(scope="module")
def recipes(translation_data, text_data, labelled_data, document_data, question_data):
    data = {"text_data": text_data, "labelled_data": labelled_data}
    data |= {"document_data": document_data, "question_data": question_data}
    ahead = {
        name: [data[TASKS[name].data], *TASKS[name].flags, *COMMON, *AHEAD, "--criterion", name] for name in READ_AHEAD
    }
    return {
        **ahead,
        "transformer": [translation_data, *TRANSLATION],
        "transformer_lm": [text_data, *LANGUAGE_MODEL],
        "transformer_xl": [text_data, *TRANSFORMER_XL],
    }


@pytest.fixture(scope="module")
def undisturbed(trainings, recipes, tmp_path_factory):
    """By recipe and flags the folder of a training that nothing happened to, with `log`, `events` and `seconds`."""
    made = {}

    def train(recipe, *flags):
        if (recipe, flags) not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            fault = {"folder": str(folder / "save"), "record": str(folder / "events")}
            arguments = [*recipes[recipe], *flags, "--save-dir", folder / "save"]
            began = time.monotonic()
            end = trainings.run(folder / "log", *arguments, fault=fault)
            (folder / "seconds").write_text(f"{time.monotonic() - began}")
            assert end.status == 0, end.output[-3000:]
            made[recipe, flags] = folder
        return made[recipe, flags]

    return train


def lines(output):
    """What was logged, but for times and speeds, by kind and number of updates."""
    found = {}
    for kind, prefix in (("train_inner", ""), ("train", "train_"), ("valid", "valid_")):
        for line in logged(output, kind):
            values = {k: v for k, v in line.items() if not re.search(r"(wps|ups|wall)$", k)}
            found[kind, int(line[f"{prefix}num_updates"])] = values
    return found


def state(save, name="checkpoint_last.pt"):
    """All that a training goes on from, without its times."""
    saved = torch.load(save / name, weights_only=True)
    extra = {k: v for k, v in saved["extra_state"].items() if k in ("train_iterator", "val_loss", "best", "early_stop")}
    # fairseq adds an entry to the history each time that it goes on
    return {
        "extra": extra,
        "history": saved["optimizer_history"][-1],
        **{k: saved[k] for k in ("model", "last_optimizer_state")},
    }


def assert_same(found, expected, where=""):
    """Bit for bit."""
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
    """Whatever happened: what has the name of a checkpoint is one."""
    for path in save.glob("*.pt"):
        torch.load(path, weights_only=True)


def assert_as_undisturbed(outputs, save, expected):
    """The parts of a training said together what it says undisturbed, and ended the same.

    Of the mean of an epoch, said after its checkpoint is saved, a kill may leave nothing.
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
    """A training that is killed and started again, until it has ended by itself."""

    def __init__(self, trainings, arguments, folder):
        self.trainings, self.folder, self.save = trainings, folder, folder / "save"
        self.arguments = [*arguments, "--save-dir", self.save]
        self.outputs, self.statuses = [], []

    def go(self, fault=None, wait=None, begun=True, by=signal.SIGKILL):
        """Once more.

        Args:
            fault: what happens, see tests/robustness/faults.py
            wait: seconds until it gets the signal `by`, from the first batch on if `begun`
        """
        fault = fault and {"folder": str(self.save), **fault}
        training = self.trainings.start(self.folder / "log", *self.arguments, fault=fault)
        if wait is not None:
            while begun and b"Start iterating" not in training.log.read_bytes() and is_alive(training.process):
                time.sleep(0.01)
            time.sleep(wait)
            os.kill(training.process, by)
        end = self.trainings.end(training)
        self.outputs.append(end.output)
        self.statuses.append(end.status)
        if self.save.exists():
            assert_whole(self.save)
        return end

    @property
    def kills(self):
        return sum(status != 0 for status in self.statuses)


# In the order of the events of a save: checkpoint_<epoch>_<update>.pt is opened and renamed, then checkpoint_best.pt,
# then checkpoint_last.pt; before the first of them, twice the folder is tried.
IN_THE_FIRST_LAST = dict(at=6, how="cut", bytes=5000)
IN_THE_SECOND = dict(at=10, how="cut", bytes=5000)  # checkpoint_best.pt or checkpoint_last.pt
IN_THE_NEXT = dict(at=2, how="cut", bytes=5000)
BEFORE_A_NAME = dict(at=5, how="kill")


@pytest.mark.parametrize(
    "recipe, moments, flags",
    [
        pytest.param(
            "transformer",
            [IN_THE_FIRST_LAST, IN_THE_SECOND, IN_THE_NEXT],
            THREE_EPOCHS,
            marks=pytest.mark.slow,
        ),
        ("transformer_lm", [IN_THE_SECOND, BEFORE_A_NAME], [*FOUR_EPOCHS, "--max-epoch", "4"]),
    ],
    ids=["transformer", "transformer_lm"],
)
def test_a_training_killed_while_it_saves_ends_as_if_undisturbed(
    recipe, moments, flags, trainings, recipes, undisturbed, tmp_path
):
    expected = undisturbed(recipe, *flags)
    killed = Killed(trainings, [*recipes[recipe], *flags], tmp_path)
    for moment in moments:
        assert killed.go(moment).status in (-signal.SIGKILL, -signal.SIGXFSZ), killed.outputs[-1][-3000:]
    assert killed.go().status == 0, killed.outputs[-1][-3000:]
    assert_as_undisturbed(killed.outputs, killed.save, expected)


def test_the_faults_of_these_tests_hit_where_they_say(undisturbed):
    """All that is written to the folder is written under another name first."""
    found = events(undisturbed("transformer", *THREE_EPOCHS) / "events")[2:]
    names = ["checkpoint_1_3.pt", "checkpoint_best.pt", "checkpoint_last.pt"]
    assert found[:6] == [[event, f"{name}.tmp"] for name in names for event in ("open", "os.rename")]
    assert all(name.endswith(".tmp") for _, name in found)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", READ_AHEAD)
def test_data_that_are_drawn_anew_in_each_epoch_are_those_of_a_training_undisturbed(
    recipe, trainings, recipes, undisturbed, tmp_path
):
    """Killed in the midst of the second epoch and at its end, with workers that have read ahead."""
    expected = undisturbed(recipe, *THREE_EPOCHS)
    names = [(event, name.split(".")[0]) for event, name in events(expected / "events")]
    ends = [i + 1 for i, what in enumerate(names) if what == ("os.rename", "checkpoint_last")]  # of saves
    began = {epoch: next(i for i, what in enumerate(names) if f"_{epoch}_" in what[1]) for epoch in (2, 3)}
    midst = next(end for end in ends if end > began[2])
    end = max(end for end in ends if end <= began[3])
    assert midst < end
    killed = Killed(trainings, [*recipes[recipe], *THREE_EPOCHS], tmp_path)
    for at in (midst, 2 + end - midst):  # twice the folder is tried
        assert killed.go(dict(at=at)).status == -signal.SIGKILL
    site = torch.load(killed.save / "checkpoint_last.pt", weights_only=True)["extra_state"]["train_iterator"]
    assert (site["epoch"], site["iterations_in_epoch"]) == (3, 0)
    assert killed.go().status == 0
    assert_as_undisturbed(killed.outputs, killed.save, expected)


# Ten kills, each within some two epochs, find it still at work.
EPOCHS = {"transformer": 60, "transformer_lm": 40, "transformer_xl": 30}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", EPOCHS)
def test_a_training_killed_ten_times_ends_as_if_undisturbed(recipe, trainings, recipes, undisturbed, tmp_path):
    """At random moments, most of them while it saves; those of a clock follow the speed of this machine."""
    flags = ["--max-epoch", str(EPOCHS[recipe]), "--keep-interval-updates", "2", "--update-freq", "2"]
    expected = undisturbed(recipe, *flags)
    epoch = float((expected / "seconds").read_text()) / EPOCHS[recipe]
    killed = Killed(trainings, [*recipes[recipe], *flags], tmp_path)
    chance = random.Random(recipe)
    for number in range(10):
        if number % 5 < 2:
            by = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
            end = killed.go(wait=chance.uniform(0, 2) * epoch, begun=chance.random() < 0.8, by=by)
        else:
            how = chance.choice(["cut", "kill"])
            end = killed.go(dict(at=chance.randrange(2, 12), how=how, bytes=chance.randrange(40_000)))
        assert end.status < 0, f"kill {number + 1} found no training: {end.output[-3000:]}"
    assert killed.go().status == 0
    assert_as_undisturbed(killed.outputs, killed.save, expected)


def test_an_end_after_each_epoch_changes_nothing(trainings, recipes, undisturbed, tmp_path):
    """Its batches, the learning rate that follows the validation, the losses' mean over several updates."""
    expected = undisturbed("transformer_lm", *FOUR_EPOCHS, "--max-epoch", "4")
    killed = Killed(trainings, [*recipes["transformer_lm"], *FOUR_EPOCHS], tmp_path)
    for epochs in ("2", "3", "4"):
        killed.arguments += ["--max-epoch", epochs]
        assert killed.go().status == 0, killed.outputs[-1][-3000:]
    rates = [line["lr"] for line in logged((expected / "log").read_text())]
    assert rates[0] == "0.01" and rates[-1] == "0.001"
    assert_as_undisturbed(killed.outputs, killed.save, expected)


@pytest.mark.parametrize(
    "limit, reason",
    [
        (["--max-update", "7"], "--max-update 7 is reached"),
        pytest.param(
            ["--patience", "2", "--maximize-best-checkpoint-metric", "--max-update", "40"],  # less is worse
            "--patience 2 is used up",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_has_ended_is_not_trained_on(limit, reason, trainings, recipes, undisturbed, tmp_path):
    """A cluster may start it again after the last checkpoint is saved."""
    expected = undisturbed("transformer", *limit)
    shutil.copytree(expected / "save", tmp_path / "save")
    again = Killed(trainings, [*recipes["transformer"], *limit], tmp_path)
    assert again.go().status == 0
    assert f"nothing to train: {reason}" in again.outputs[0]
    assert lines(again.outputs[0]) == {}
    assert_same(state(again.save), state(expected / "save"))


@pytest.mark.slow
def test_patience_goes_on_counting(trainings, recipes, undisturbed, tmp_path):
    flags = ["--patience", "3", "--maximize-best-checkpoint-metric", "--max-update", "40"]
    expected = undisturbed("transformer", *flags)
    killed = Killed(trainings, [*recipes["transformer"], *flags], tmp_path)
    for _ in range(2):
        assert killed.go(dict(at=9)).status == -signal.SIGKILL
    assert killed.go().status == 0
    assert_as_undisturbed(killed.outputs, killed.save, expected)
    assert max(update for _, update in lines((expected / "log").read_text())) < 40


class SaysTheEpoch(FairseqDataset):
    """As masked_lm's, whose masks depend on it."""

    can_reuse_epoch_itr_across_epochs = True
    epoch = 1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return self.epoch

    def __len__(self):
        return 3

    def collater(self, items):
        return items


@pytest.mark.parametrize("workers", [0, 1])
def test_data_workers_know_the_epoch(workers):
    data = SaysTheEpoch()
    epochs = iterators.EpochBatchIterator(
        data, data.collater, [[0], [1, 2]], num_workers=workers, reuse_dataloader=True, persistent_workers=True
    )
    found = [sorted(epochs.next_epoch_itr(), key=len) for _ in range(3)]
    assert found == [[[epoch], [epoch, epoch]] for epoch in (1, 2, 3)]


# ---- no room, no folder ----------------------------------------------------------------------------------------------


def error_line(output):
    """The last line, which must be the only one that says what went wrong."""
    assert "Traceback" not in output, output[-3000:]
    return output.splitlines()[-1]


@pytest.mark.parametrize("at", [8, pytest.param(10, marks=pytest.mark.slow), pytest.param(12, marks=pytest.mark.slow)])
def test_a_full_disk_ends_the_training_in_one_line_and_leaves_the_last_checkpoint(
    at, trainings, recipes, undisturbed, tmp_path
):
    expected = undisturbed("transformer", *THREE_EPOCHS)
    training = Killed(trainings, [*recipes["transformer"], "--max-epoch", "3"], tmp_path)
    end = training.go(dict(at=at, how="full", bytes=100_000))
    assert end.status == 1
    found = re.fullmatch(
        rf"fairseq-train: error: checkpoint {training.save}/(\S+): cannot be written: File too large; "
        rf"({training.save}/\S+), of update (\d+), is whole",
        error_line(end.output),
    )
    assert found, error_line(end.output)
    assert torch.load(found[2], weights_only=True)["optimizer_history"][-1]["num_updates"] == int(found[3])
    assert not list(training.save.glob("*.tmp"))
    if at != 8:
        assert training.go().status == 0
        assert_as_undisturbed(training.outputs, training.save, expected)


TMPFS = ["unshare", "--user", "--map-root-user", "--mount"]


@pytest.mark.slow
def test_a_disk_that_is_really_full(recipes, tmp_path):
    if subprocess.run([*TMPFS, "true"], capture_output=True).returncode != 0:
        pytest.skip("no name spaces here to mount a small disk in")
    disk = tmp_path / "disk"
    disk.mkdir()
    program = Path(sys.executable).parent / "fairseq-train"
    script = f'mount -t tmpfs -o size=1500k disk {disk} && "$@"; status=$?; cp -r {disk} {tmp_path}/left; exit $status'
    command = [*TMPFS, "sh", "-c", script, "sh", program, *recipes["transformer"], "--max-epoch", "9"]
    result = subprocess.run(
        [str(part) for part in command] + ["--save-dir", f"{disk}/save"], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 1, result.stderr[-3000:]
    assert re.fullmatch(
        r"fairseq-train: error: checkpoint \S+: cannot be written: No space left on device; \S+, of update \d+, is "
        r"whole",
        error_line(result.stderr),
    )
    left = tmp_path / "left" / "save"
    assert_whole(left)
    assert (left / "checkpoint_last.pt").is_file() and not list(left.glob("*.tmp"))


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_built(trainings, recipes, tmp_path):
    (tmp_path / "file").write_text("")
    for folder, reason in [("file", "File exists"), ("file/save", "Not a directory")]:
        save = tmp_path / folder
        end = trainings.run(tmp_path / "log", *recipes["transformer"], "--save-dir", save)
        assert end.status == 1
        assert error_line(end.output) == f"fairseq-train: error: --save-dir {save}: cannot be written to: {reason}"
        assert "model params" not in end.output


def test_checking_a_folder_leaves_it_as_it_was(tmp_path):
    """fairseq's own check empties a file named `dummy` and removes it."""
    (tmp_path / "dummy").write_text("the user's")
    checkpoint_utils.verify_checkpoint_directory(str(tmp_path))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("dummy", "the user's")]
    checkpoint_utils.verify_checkpoint_directory(str(tmp_path / "new" / "folder"))
    assert (tmp_path / "new" / "folder").is_dir()


def test_a_read_only_file_system_is_named(tmp_path):
    with pytest.raises(OptionError, match=r"--save-dir /proc/save: cannot be written to: "):
        checkpoint_utils.verify_checkpoint_directory("/proc/save")


@pytest.mark.slow
def test_a_folder_that_vanishes_ends_the_training_in_one_line(trainings, recipes, tmp_path):
    training = Killed(trainings, [*recipes["transformer"], "--max-epoch", "3"], tmp_path)
    end = training.go(dict(at=7, how="gone"))
    assert end.status == 1
    assert error_line(end.output).startswith(f"fairseq-train: error: checkpoint {training.save}/checkpoint_last.pt")
    assert_whole(tmp_path / "save.gone")


def test_writing_asynchronously_without_iopath_is_refused_not_forgotten(trainings, recipes, tmp_path):
    """fairseq would end with the exit status 0."""
    if find_spec("iopath") is not None:
        pytest.skip("iopath is installed")
    flags = ["--write-checkpoints-asynchronously", "--save-dir", tmp_path / "save", "--max-update", "1"]
    end = trainings.run(tmp_path / "log", *recipes["transformer"], *flags)
    assert end.status == 1
    expected = "fairseq-train: error: --write-checkpoints-asynchronously: needs the package iopath, or must be left out"
    assert error_line(end.output) == expected


@pytest.fixture
def checkpoints(undisturbed, tmp_path):
    shutil.copytree(undisturbed("transformer", *THREE_EPOCHS) / "save", tmp_path / "save")
    return tmp_path / "save"


def test_an_error_in_passing_is_tried_again_from_the_beginning(checkpoints, monkeypatch, caplog):
    """fairseq would write the second attempt behind what the first one has left."""
    monkeypatch.setattr(saving, "PAUSE", 0)
    expected, attempts = torch.load(checkpoints / "checkpoint_last.pt", weights_only=True), []
    stock = torch.save

    def save(content, file):
        attempts.append(file)
        if len(attempts) < 3:
            file.write(b"half of it")
            raise OSError(5, "Input/output error")
        stock(content, file)

    monkeypatch.setattr(torch, "save", save)
    checkpoint_utils.torch_persistent_save(expected, str(checkpoints / "checkpoint9.pt"))
    assert_same(torch.load(checkpoints / "checkpoint9.pt", weights_only=True), expected)
    assert caplog.text.count("Input/output error; one more attempt") == 2


def test_an_error_that_stays_is_an_error(checkpoints, monkeypatch):
    def save(content, file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", save)
    before = (checkpoints / "checkpoint_last.pt").read_bytes()
    with pytest.raises(OptionError, match=r"checkpoint_last.pt: cannot be written: No space left on device; \S+, of"):
        checkpoint_utils.torch_persistent_save({}, str(checkpoints / "checkpoint_last.pt"))
    assert (checkpoints / "checkpoint_last.pt").read_bytes() == before
    with pytest.raises(OptionError, match="No such file or directory; no checkpoint is there to go on from"):
        PathManager.copy(str(checkpoints / "checkpoint_last.pt"), str(checkpoints / "gone" / "checkpoint_best.pt"))


# ---- checkpoints that were damaged before ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, pytest.param(1, marks=pytest.mark.slow), 20_000])
def test_a_truncated_checkpoint_names_the_one_to_go_on_from(size, checkpoints, trainings, recipes, tmp_path):
    """As a training without the plugin may have left it."""
    last = checkpoints / "checkpoint_last.pt"
    os.truncate(last, size)
    flags = ["--max-epoch", "4", "--save-dir", checkpoints]
    end = trainings.run(tmp_path / "log", *recipes["transformer"], *flags)
    assert end.status == 1
    found = re.fullmatch(
        rf"fairseq-train: error: {last}: .+; --restore-file (\S+) goes on from update (\d+)",
        error_line(end.output),
    )
    assert found, error_line(end.output)
    assert lines(end.output) == {}
    if size:
        end = trainings.run(tmp_path / "log", *recipes["transformer"], *flags, "--restore-file", found[1])
        assert end.status == 0
        assert min(update for _, update in lines(end.output)) == int(found[2]) + 1


def test_a_new_start_beside_checkpoints_is_not_silent(checkpoints, trainings, recipes, tmp_path):
    last = checkpoints / "checkpoint_last.pt"
    last.unlink()
    flags = ["--max-update", "1", "--save-dir", checkpoints]
    end = trainings.run(tmp_path / "log", *recipes["transformer"], *flags)
    assert end.status == 0
    assert re.search(rf"no {last}: training begins from nothing, though \S+, of update \d+, is there", end.output)
    last.unlink()
    last.symlink_to("nowhere.pt")
    end = trainings.run(tmp_path / "log", *recipes["transformer"], *flags)
    assert end.status == 1
    assert error_line(end.output).startswith(f"fairseq-train: error: {last}: a link to nothing")


# ---- two workers, one of them gone -----------------------------------------------------------------------------------

# Seconds in which the other one must have noticed.
NOTICES = 60
RAISES = """
from fairseq.tasks.fairseq_task import FairseqTask
stock = FairseqTask.train_step
def train_step(*args, **settings):
    if settings.get("update_num") == 2:
        {what}
    return stock(*args, **settings)
FairseqTask.train_step = train_step
"""


class TwoWorkers:
    def __init__(self, trainings, arguments, folder, before=("", ""), faults=(None, None)):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"tcp://localhost:{free.getsockname()[1]}"
        flags = ["--distributed-world-size", "2", "--distributed-backend", "gloo", "--distributed-no-spawn"]
        flags += ["--ddp-backend", "legacy_ddp"]  # fairseq's pytorch_ddp is for GPUs alone
        flags += ["--distributed-init-method", address, "--save-dir", folder / "save", "--max-update", "100000"]
        self.trainings = trainings
        self.workers = [
            trainings.start(folder / f"log{rank}", *arguments, *flags, "--distributed-rank", rank, **settings)
            for rank, settings in enumerate(dict(before=b, fault=f) for b, f in zip(before, faults))
        ]

    def wait_for_update(self, number, seconds=120):
        deadline = time.monotonic() + seconds
        while f'"num_updates": "{number}"' not in self.workers[0].log.read_text(errors="replace"):
            alive = all(is_alive(worker.process) for worker in self.workers)
            said = self.workers[0].log.read_text(errors="replace")
            assert alive and time.monotonic() < deadline, said[-3000:]
            time.sleep(0.05)

    def ends(self):
        return [self.trainings.end(worker, NOTICES) for worker in self.workers]


@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_the_other_worker_ends_with_an_error_when_one_is_killed(killed, trainings, recipes, tmp_path):
    workers = TwoWorkers(trainings, recipes["transformer"], tmp_path)
    workers.wait_for_update(4)
    os.kill(workers.workers[killed].process, signal.SIGKILL)
    ends = workers.ends()
    assert ends[killed].status == -signal.SIGKILL
    assert ends[1 - killed].status == 1, ends[1 - killed].output[-3000:]
    assert re.search("[Cc]onnection", ends[1 - killed].output)
    assert_whole(tmp_path / "save")
    assert (tmp_path / "save" / "checkpoint_last.pt").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "what, last",
    [
        ("from mixhead_plugin.options import OptionError; raise OptionError('--flag 1: wrong')", "--flag 1: wrong"),
        ("raise MemoryError('of this worker')", "MemoryError: of this worker"),
        ("raise RuntimeError('DefaultCPUAllocator: can\\'t allocate memory')", "can't allocate memory"),
    ],
    ids=["option", "memory", "allocator"],
)
def test_the_other_worker_ends_with_an_error_when_one_raises(what, last, rank, trainings, recipes, tmp_path):
    before = ["", ""]
    before[rank] = RAISES.format(what=what)
    workers = TwoWorkers(trainings, recipes["transformer"], tmp_path, before)
    ends = workers.ends()
    assert [end.status for end in ends] == [1, 1], [end.output[-2000:] for end in ends]
    assert ends[rank].output.splitlines()[-1].endswith(last)


@pytest.mark.slow
@pytest.mark.parametrize(
    "at, name, flags",
    [(6, "checkpoint_2_3.pt", []), (10, "checkpoint_last.pt", []), (4, "checkpoint_last.pt", ["--max-epoch", "1"])],
    ids=["update", "last", "end"],
)
def test_the_other_worker_ends_with_an_error_when_the_disk_is_full(at, name, flags, trainings, recipes, tmp_path):
    """Only the first one saves; the other waits for it in the next update, or at the end of the training."""
    full = {"folder": str(tmp_path / "save"), "at": at, "how": "full", "bytes": 100_000}
    workers = TwoWorkers(trainings, [*recipes["transformer"], *flags], tmp_path, faults=(full, None))
    ends = workers.ends()
    assert [end.status for end in ends] == [1, 1], [end.output[-2000:] for end in ends]
    assert re.fullmatch(
        rf"(\[rank0\]: )?fairseq-train: error: checkpoint {tmp_path}/save/{name}: cannot be written: File too large; "
        r"\S+, of update \d+, is whole",
        error_line(ends[0].output),
    )
    assert re.search("[Cc]onnection", ends[1].output.splitlines()[-1])
    assert_whole(tmp_path / "save")


SPAWN = """
import sys, torch
torch.cuda.device_count = lambda: 2  # fairseq starts a worker for each
sys.argv[0] = "fairseq-train"
from fairseq_cli.train import cli_main
if __name__ == "__main__":
    cli_main()
"""


def children(process):
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize("hit", ["worker", "parent", "parent, politely"])
def test_workers_that_fairseq_has_started_end_together(hit, recipes, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    (tmp_path / "train.py").write_text(SPAWN)
    flags = ["--distributed-world-size", "2", "--distributed-backend", "gloo"]
    flags += ["--distributed-init-method", f"tcp://localhost:{port}"]
    flags += ["--save-dir", tmp_path / "save", "--max-update", "100000", "--ddp-backend", "legacy_ddp"]
    command = [sys.executable, tmp_path / "train.py", *recipes["transformer"], *flags]
    with (tmp_path / "log").open("w") as log:
        parent = subprocess.Popen(
            [str(c) for c in command],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as in the background of a job's script
        )
    workers = []
    try:
        deadline = time.monotonic() + 180
        while not (tmp_path / "save" / "checkpoint_last.pt").exists():
            assert parent.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.1)
        workers = [c for c in children(parent.pid) if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]
        assert len(workers) == 2
        if hit == "worker":
            os.kill(workers[1], signal.SIGKILL)
        else:
            os.kill(parent.pid, signal.SIGKILL if hit == "parent" else signal.SIGTERM)
        assert parent.wait(NOTICES) != 0
        deadline = time.monotonic() + NOTICES
        while any(is_alive(worker) for worker in workers):
            assert time.monotonic() < deadline, "a worker is left"
            time.sleep(0.1)
    finally:
        parent.kill()
        for worker in filter(is_alive, workers):
            os.kill(worker, signal.SIGKILL)
    assert_whole(tmp_path / "save")


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
GLOO = ["--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp"]
NO_GPU = "--distributed-world-size 2: no GPU to start"
SLURM = {"SLURM_JOB_NODELIST": "a", "SLURM_NNODES": "1", "SLURM_NTASKS": "4", "SLURM_NODEID": "0"}
without_gpus = pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs to start workers for")


@without_gpus
@pytest.mark.parametrize("flags", [[], ["--distributed-init-method", "tcp://localhost:1"]])
def test_workers_without_gpus_are_refused_not_forgotten(flags, trainings, recipes, tmp_path):
    """fairseq would start none, and end with the exit status 0."""
    flags = ["--distributed-world-size", "2", "--save-dir", tmp_path / "save", *flags]
    end = trainings.run(tmp_path / "log", *recipes["transformer"], *flags)
    assert end.status == 1
    assert error_line(end.output).startswith(f"fairseq-train: error: {NO_GPU}")


@without_gpus
@pytest.mark.parametrize(
    "flags, variables, said",
    [
        ({"distributed_no_spawn": True}, {}, NO_GPU),
        ({}, {"RANK": "0"}, r".* \(not set: MASTER_ADDR, MASTER_PORT, WORLD_SIZE\), or by --distributed-no-spawn"),
        ({"distributed_init_method": "tcp://localhost:1"}, {"RANK": "0"}, NO_GPU),
        ({"distributed_init_method": "tcp://localhost:1"}, TORCHRUN, NO_GPU),
        ({"distributed_port": 1}, {**TORCHRUN, "RANK": "2"}, "RANK 2: must be below WORLD_SIZE 2"),
        ({}, {**TORCHRUN, "RANK": "-1"}, "RANK '-1': must be a number of at least 0"),
        ({}, {**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE 'two': must be a number of at least 1"),
        ({}, TORCHRUN, "--distributed-backend nccl: needs GPUs; must be gloo"),
        (
            {"distributed_port": 1},
            {"SLURM_JOB_NODELIST": "none"},
            r"--dist.* what Slurm says \(SLURM_JOB_NODELIST none",
        ),
        ({}, {"SLURM_JOB_NODELIST": "none"}, NO_GPU),
        (
            {"distributed_port": 1},
            SLURM,
            r"--dist.* 2: does not fit what Slurm says \(\w+ a, SLURM_NNODES 1, ",
        ),
        (
            {"distributed_port": 1},
            {"SLURM_JOB_NODELIST": "a"},
            r"--dist.* does not fit what Slurm says \(SLURM_JOB_NODELIST a\)",
        ),
    ],
)
def test_what_a_launcher_has_left_out_is_named(flags, variables, said, monkeypatch, tmp_path):
    """fairseq would start no worker, divide by the number of GPUs, or wait for ever."""
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$3" != none ] && echo localhost\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in [name for name in os.environ if name in TORCHRUN or name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    workers = DistributedTrainingConfig(distributed_world_size=2, tpu=False, **flags)
    checkpoint = SimpleNamespace(write_checkpoints_asynchronously=False)
    cfg = SimpleNamespace(common=SimpleNamespace(tpu=False), distributed_training=workers, checkpoint=checkpoint)
    cfg.common_eval = SimpleNamespace(path=None)
    with pytest.raises(OptionError, match=f"^{said}"):
        distributed_utils.call_main(cfg, lambda cfg: None)


@without_gpus
@pytest.mark.parametrize("ddp", ["legacy_ddp", pytest.param("pytorch_ddp", marks=pytest.mark.slow)])
def test_workers_that_torchrun_has_started_train_together_without_gpus(ddp, trainings, recipes, tmp_path):
    """Or say in one line which flag it takes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        variables = {**TORCHRUN, "MASTER_PORT": str(free.getsockname()[1])}
    flags = [*GLOO, "--ddp-backend", ddp, "--distributed-world-size", "2", "--save-dir", tmp_path / "save"]
    flags += ["--max-update", "2"]
    workers = [
        trainings.start(
            tmp_path / f"log{rank}",
            *recipes["transformer"],
            *flags,
            before=f"import os; os.environ.update({ ({**variables, 'RANK': rank})!r})",
        )
        for rank in "01"
    ]
    ends = [trainings.end(worker, NOTICES) for worker in workers]
    if ddp == "legacy_ddp":
        assert [end.status for end in ends] == [0, 0], [end.output[-3000:] for end in ends]
        alone = trainings.run(
            tmp_path / "log", *recipes["transformer"], "--max-update", "2", "--update-freq", "2", "--no-save"
        )
        together, expected = ([line["bsz"] for line in logged(end.output)] for end in (ends[0], alone))
        assert together == expected and len(together) == 2
        assert (tmp_path / "save" / "checkpoint_last.pt").is_file()
    else:
        assert [end.status for end in ends] == [1, 1], [end.output[-3000:] for end in ends]
        assert "fairseq-train: error: --ddp-backend: fairseq's default, pytorch_ddp, needs" in error_line(
            ends[0].output
        )


@pytest.mark.parametrize("rank", ["0", "1"])
def test_workers_of_torchrun_do_not_train_apart(rank, trainings, recipes, tmp_path):
    """fairseq's default, a worker for each GPU of this machine, is 1 where there are none."""
    flags = ["--save-dir", tmp_path / "save", "--max-update", "2", "--distributed-world-size", "1"]
    before = f"import os; os.environ.update({ ({**TORCHRUN, 'RANK': rank})!r})"
    end = trainings.run(tmp_path / "log", *recipes["transformer"], *flags, "--distributed-rank", rank, before=before)
    assert end.status == 1 and not (tmp_path / "save").exists()
    assert error_line(end.output).startswith("fairseq-train: error: --distributed-world-size 1: torchrun has started 2")


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_a_preempted_command_leaves_whole_checkpoints_and_says_so_by_its_status(by, recipes, tmp_path):
    """The real command: it ends at once, and what is not saved is trained again."""
    program = str(Path(sys.executable).parent / "fairseq-train")
    flags = ["--save-dir", tmp_path / "save", "--max-update", "100000"]
    command = [program, *map(str, [*recipes["transformer"], *flags])]
    # in the background of a shell without job control, a process would begin with SIGINT ignored
    training = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while not (tmp_path / "save" / "checkpoint_last.pt").exists():
            assert training.poll() is None
            time.sleep(0.05)
        training.send_signal(by)
        training.wait(timeout=30)
    finally:
        training.kill()
    assert training.returncode == -by
    assert_whole(tmp_path / "save")
    result = run("fairseq-train", *command[1:], "--max-update", "1")
    assert "Loaded checkpoint" in result.stdout + result.stderr


def test_a_trainer_of_another_program_is_left_alone(tmp_path):
    """fairseq's loading of checkpoints serves others too, such as its own unit tests, with less in their configs."""
    resets = ("dataloader", "meters", "optimizer", "lr_scheduler")
    cfg = {"save_dir": str(tmp_path), "restore_file": "checkpoint_last.pt", "finetune_from_model": None}
    cfg = OmegaConf.create({**cfg, "optimizer_overrides": "{}", **{f"reset_{name}": False for name in resets}})
    trainer = MagicMock()
    trainer.load_checkpoint.return_value = state = {"train_iterator": {"epoch": 2, "iterations_in_epoch": 0}}
    assert checkpoint_utils.load_checkpoint(cfg, trainer) == (state, trainer.get_train_iterator.return_value)
