"""Grids of runs: trained, evaluated, resumed, collected; with scripts that stand in for fairseq."""

import argparse
import contextlib
import csv
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sweep
from recipes import EXAMPLES, dry_run, parse, wait_until_unlocked
from sweep import Point, canonical

pytestmark = pytest.mark.usefixtures("plain_environment")
GRIDS = sorted(path for kind in ("toml", "json") for path in (EXAMPLES / "grids").rglob(f"*.{kind}"))
PAPER_TABLES = sorted((EXAMPLES / "grids").glob("mixhead_table_*.toml"))

# A recipe whose metric is made of its flags; it says what it did.
TRAIN = """#!/usr/bin/env bash
mkdir -p "$SAVE"
echo "train ${MODEL:-} $*" >> "$(dirname "$0")/calls"
echo "${OMP_NUM_THREADS:-} ${CUDA_VISIBLE_DEVICES:-}" >> "$(dirname "$0")/places"
echo "$*" > "$SAVE/flags"
[[ $* != *--fail* ]] || { echo "train: error: as it was told" >&2; exit 3; }
[[ $* != *--stubborn* ]] || trap "" TERM
if [[ $* == *--wait* ]]; then
    trap > "$SAVE/ignored"
    echo $$ >> "$(dirname "$0")/waiting"
    sleep 60
    if [[ $* == *--stubborn* ]]; then sleep 60; fi
fi
"""
EVALUATE = """#!/usr/bin/env bash
echo "evaluate ${MODEL:-}${AVERAGE:+ of $AVERAGE} $*" >> "$(dirname "$0")/calls"
[[ $* != *--silent* ]] || { echo "no number here"; exit; }
length=$(cat "$SAVE/flags"); length=${#length}
[[ $* == *valid* ]] && echo "metric = $length.25" || echo "BLEU|tok:13a = $length.5 60.1/40.2 (BP = 1.000)"
"""


@pytest.fixture
def examples(tmp_path, monkeypatch):
    folder = tmp_path / "examples"
    (folder / "toy").mkdir(parents=True)
    for name, text in (("train.sh", TRAIN), ("evaluate.sh", EVALUATE)):
        (folder / "toy" / name).write_text(text)
        (folder / "toy" / name).chmod(0o755)
    monkeypatch.setattr(sweep, "EXAMPLES", folder)
    return folder


@pytest.fixture(autouse=True)
def no_variables(plain_environment):
    for name in ("BREAKS", "CUDA_VISIBLE_DEVICES", "MODEL", "SELECT", "VARIANT"):
        plain_environment.delenv(name, raising=False)


@pytest.fixture
def calls(examples):
    """What the scripts were called with since the last call of this."""

    def calls():
        path = examples / "toy" / "calls"
        found = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return found

    return calls


GRID = """
title = "A toy"
example = "toy"
train = "--always"

[metrics]
valid = "--gen-subset valid"
test = ""

[axes.heads]
2 = "--heads 2"
16 = "--heads 16"

[axes.mixing]
none = "--mixing none"
B = { train = "MODEL=mixed --mixing position-wise", evaluate = "--context-window 8" }

[published]
"2/none" = "30.1/29.5"
"""


@pytest.fixture
def grid(tmp_path):
    (tmp_path / "toy grid.toml").write_text(GRID)
    return tmp_path / "toy grid.toml"


def run(monkeypatch, capsys, *words, out):
    """The command; its exit status and what it printed."""
    monkeypatch.setattr(sys, "argv", ["sweep.py", *map(str, words[:1]), "--out", str(out), *map(str, words[1:])])
    with pytest.raises(SystemExit) as ended:
        sweep.main()
    return ended.value.code, *capsys.readouterr()


def test_every_point_is_trained_and_evaluated_once(grid, calls, tmp_path, monkeypatch, capsys):
    status, printed, _ = run(monkeypatch, capsys, grid, out=tmp_path / "out")
    assert status == 0
    assert calls() == [
        "train  --always --heads 2 --mixing none",
        "evaluate  --gen-subset valid",
        "evaluate  ",
        "train mixed --always --heads 2 --mixing position-wise",
        "evaluate mixed --context-window 8 --gen-subset valid",
        "evaluate mixed --context-window 8",
        "train  --always --heads 16 --mixing none",
        "evaluate  --gen-subset valid",
        "evaluate  ",
        "train mixed --always --heads 16 --mixing position-wise",
        "evaluate mixed --context-window 8 --gen-subset valid",
        "evaluate mixed --context-window 8",
    ]
    assert printed.startswith(f"4 runs, 0 of them done before; logs in {tmp_path}/out\n")
    table = (tmp_path / "out" / "table.md").read_text()
    assert table in printed
    assert table.splitlines() == [
        "# A toy",
        "",
        "valid/test (in brackets: published)",
        "",
        "| heads | none | B |",
        "| --- | --- | --- |",
        "| 2 | 32.25/32.50 (30.1/29.5) | 41.25/41.50 |",
        "| 16 | 33.25/33.50 | 42.25/42.50 |",
    ]
    with (tmp_path / "out" / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["heads"], row["mixing"], row["valid"], row["test"], row["published"]) for row in rows] == [
        ("2", "none", "32.25", "32.5", "30.1/29.5"),
        ("2", "B", "41.25", "41.5", ""),
        ("16", "none", "33.25", "33.5", ""),
        ("16", "B", "42.25", "42.5", ""),
    ]
    assert json.loads((tmp_path / "out" / "table.json").read_text())["rows"][3]["test"] == 42.5
    assert all((tmp_path / "out" / row["folder"] / "train.log").exists() for row in rows)

    status, printed, _ = run(monkeypatch, capsys, grid, out=tmp_path / "out")
    assert (status, calls()) == (0, [])
    assert "4 runs, 4 of them done before" in printed and table in printed


def test_results_are_known_by_their_flags_in_any_order(grid, calls, tmp_path, monkeypatch, capsys):
    run(monkeypatch, capsys, grid, out=tmp_path / "out")
    calls()
    head, _, rest = GRID.partition("[axes.heads]")
    heads, _, rest = rest.partition("[axes.mixing]")
    mixing = rest.partition("[published]")[0]
    grid.write_text(f"{head}[axes.mixing]{mixing}[axes.heads]{heads.replace('16', '32')}")
    _, printed, _ = run(monkeypatch, capsys, grid, out=tmp_path / "out")
    assert "4 runs, 2 of them done before" in printed
    assert [call for call in calls() if call.startswith("train")] == [
        "train  --always --mixing none --heads 32",
        "train mixed --always --mixing position-wise --heads 32",
    ]


def test_another_metric_needs_no_training(grid, calls, tmp_path, monkeypatch, capsys):
    run(monkeypatch, capsys, grid, out=tmp_path / "out")
    calls()
    grid.write_text(GRID.replace("[metrics]", '[metrics]\nwide = "--context-window 99"'))
    _, printed, _ = run(monkeypatch, capsys, grid, out=tmp_path / "out")
    assert calls() == [f"evaluate {model} --context-window 99" for model in ("", "mixed --context-window 8") * 2]
    assert "| 16 | 33.50/33.25/33.50 | 42.50/42.25/42.50 |" in printed


def test_flags_mean_what_fairseq_reads():
    assert canonical(shlex.split("--lr 1 --adam-betas '(0.9, 0.98)' --lr=2 --fp16")) == {
        "--adam-betas": ["(0.9, 0.98)"],
        "--fp16": [],
        "--lr": ["2"],
    }
    assert canonical(["MODEL=a", "--b", "C=d"]) == {"--b": ["C=d"], "MODEL": ["a"]}


def test_a_run_that_fails_stops_no_other_and_is_done_again(grid, calls, tmp_path, monkeypatch, capsys):
    grid.write_text(GRID.replace('2 = "--heads 2"', '2 = "--heads 2 --fail"'))
    status, printed, errors = run(monkeypatch, capsys, grid, out=tmp_path / "out")
    assert status == 1
    assert len([call for call in calls() if call.startswith("train")]) == 4
    assert "| 2 | -/- (30.1/29.5) | -/- |" in printed and "| 16 | 33.25/33.50 | 42.25/42.50 |" in printed
    failed = [line for line in errors.splitlines() if line.startswith("sweep: failed: ")]
    assert len(failed) == 2
    reason, log = failed[0].split("; log: ")
    assert reason == "sweep: failed: 2_none: train.sh ended with status 3 (train: error: as it was told)"
    assert re.fullmatch(rf"{tmp_path}/out/2_none-[0-9a-f]{{12}}/train.log", log)
    assert "train: error: as it was told" in Path(log).read_text()

    run(monkeypatch, capsys, grid, out=tmp_path / "out")
    assert [call for call in calls() if call.startswith("train")] == [
        "train  --always --heads 2 --fail --mixing none",
        "train mixed --always --heads 2 --fail --mixing position-wise",
    ]


def test_an_evaluation_that_fails_is_done_again_without_the_training(grid, calls, tmp_path, monkeypatch, capsys):
    status, _, errors = run(monkeypatch, capsys, grid, "--evaluate=--silent", out=tmp_path / "out")
    assert status == 1
    assert "evaluate.sh ended in 'no number here', which has no number; log: " in errors
    assert len(calls()) == 8
    script = sweep.EXAMPLES / "toy" / "evaluate.sh"
    script.write_text(EVALUATE.replace("--silent", "--other"))
    status, _, _ = run(monkeypatch, capsys, grid, "--evaluate=--silent", out=tmp_path / "out")
    assert status == 0
    assert {call.split()[0] for call in calls()} == {"evaluate"}


def test_axes_on_the_command_line(examples, calls, tmp_path, monkeypatch, capsys):
    words = ["toy", "--axis", "heads=2,4", "--axis", "mixing=none", "--", "--max-update", "9"]
    status, printed, _ = run(monkeypatch, capsys, *words, out=tmp_path / "out")
    assert status == 0
    assert [call for call in calls() if "train" in call] == [
        "train  --max-update 9 --heads 2 --mixing none",
        "train  --max-update 9 --heads 4 --mixing none",
    ]
    assert "| heads | none |" in printed and "| 4 | 38.50 |" in printed


def test_jobs_run_side_by_side_and_share_the_processors(grid, examples, calls, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(sweep, "CORES", 8)
    monkeypatch.setattr(sweep, "visible_gpus", lambda: [])
    status, _, _ = run(monkeypatch, capsys, grid, "--jobs", "4", out=tmp_path / "out")
    assert status == 0 and len(calls()) == 12
    assert set((examples / "toy" / "places").read_text().splitlines()) == {"2 "}
    assert sweep.places(3) == [{"OMP_NUM_THREADS": "2"}] * 3


@pytest.mark.parametrize(
    "gpus, jobs, shares",
    [
        ("0,1,2,3,4,5,6,7", 3, ["0,1", "2,3", "4,5"]),
        ("0,1,2,3,4,5,6,7", 2, ["0,1,2,3", "4,5,6,7"]),
        ("0,1,2,5", 3, ["0", "1", "2"]),
        ("0,1,2,5", 2, ["0,1", "2,5"]),
        ("0,1,2,5", 5, ["0", "1", "2", "5"]),
        ("3,4,5,6,7,8", 2, ["3,4", "5,6"]),
        ("4,-1,5", 2, ["4"]),
    ],
)
def test_every_job_gets_the_same_number_of_gpus_a_power_of_two(gpus, jobs, shares, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    assert sweep.places(jobs) == [{"CUDA_VISIBLE_DEVICES": share} for share in shares]
    assert "CUDA_VISIBLE_DEVICES" not in sweep.places(1)[0]  # the scripts find them


def test_gpus_is_how_many_of_its_share_a_job_may_use(grid, examples, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    for wanted, used in (("8", "2"), ("2", "2"), ("1", "1")):
        monkeypatch.setenv("GPUS", wanted)
        assert [place["GPUS"] for place in sweep.places(2)] == [used, used]
    monkeypatch.setenv("GPUS", "0")
    assert "CUDA_VISIBLE_DEVICES" not in sweep.places(2)[0]
    monkeypatch.setenv("GPUS", "two")
    status, _, errors = run(monkeypatch, capsys, grid, out=tmp_path / "out")
    assert (status, errors) == (2, "sweep: error: GPUS=two: must be a number\n")


def test_no_more_jobs_than_gpus_run_at_a_time(grid, examples, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    lock = 'mkdir "$(dirname "$0")/gpu" || exit 9; sleep 0.1; rmdir "$(dirname "$0")/gpu"\n'
    (examples / "toy" / "train.sh").write_text(TRAIN + lock)
    status, _, _ = run(monkeypatch, capsys, grid, "--jobs", "4", out=tmp_path / "out")
    assert status == 0
    assert {line.split()[-1] for line in (examples / "toy" / "places").read_text().splitlines()} == {"4"}


# ---- the environment -------------------------------------------------------------------------------------------------


def keys(path):
    """By what the runs of a grid and their evaluations are known."""
    args = argparse.Namespace(grid=str(path), axis=[], evaluate="")
    found = sweep.runs(sweep.grid_of(args, []))
    evaluations = [str(canonical(words)) for run in found for words in run.evaluate.values()]
    return {run.digest for run in found}, set(evaluations)


@pytest.mark.parametrize("name", [*sweep.TRAINING, *sweep.EVALUATION])
def test_a_run_is_known_by_the_variables_of_its_environment(name, grid, examples, tmp_path, monkeypatch):
    grid.write_text(GRID.replace("MODEL=mixed ", ""))
    trainings, evaluations = keys(grid)
    monkeypatch.setenv(name, "value")
    other_trainings, other_evaluations = keys(grid)
    assert evaluations.isdisjoint(other_evaluations)
    assert other_trainings == trainings if name == "AVERAGE" else trainings.isdisjoint(other_trainings)
    monkeypatch.chdir(tmp_path)
    assert (keys(grid) == (other_trainings, other_evaluations)) == (name != "DATA")  # the one path
    monkeypatch.setenv(name, "")  # as good as not set
    assert keys(grid) == (trainings, evaluations)


def test_a_variable_in_the_environment_makes_other_runs(grid, calls, tmp_path, monkeypatch, capsys):
    run(monkeypatch, capsys, grid, out=tmp_path / "out")
    calls()
    monkeypatch.setenv("BREAKS", "articles")
    _, printed, _ = run(monkeypatch, capsys, grid, out=tmp_path / "out")
    assert "4 runs, 0 of them done before" in printed and len(calls()) == 12


def test_data_is_the_same_from_anywhere(grid, calls, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA", "mine")
    run(monkeypatch, capsys, grid, out=tmp_path / "out")
    calls()
    monkeypatch.delenv("DATA")
    _, printed, _ = run(monkeypatch, capsys, grid, "--", f"DATA={tmp_path}/mine", out=tmp_path / "out")
    assert "4 runs, 4 of them done before" in printed and calls() == []


def test_an_average_is_another_evaluation_of_the_same_training(grid, calls, tmp_path, monkeypatch, capsys):
    run(monkeypatch, capsys, grid, out=tmp_path / "out")
    calls()
    monkeypatch.setenv("AVERAGE", "5")
    run(monkeypatch, capsys, grid, out=tmp_path / "out")
    assert (
        calls()
        == [
            "evaluate  of 5 --gen-subset valid",
            "evaluate  of 5 ",
            "evaluate mixed of 5 --context-window 8 --gen-subset valid",
            "evaluate mixed of 5 --context-window 8",
        ]
        * 2
    )


def test_the_grids_own_variables_win(grid, calls, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MODEL", "outer")
    run(monkeypatch, capsys, grid, out=tmp_path / "out")
    assert {call.split()[1] for call in calls() if call.startswith("train")} == {"outer", "mixed"}


def test_gpus_makes_no_other_run(grid, calls, tmp_path, monkeypatch, capsys):
    run(monkeypatch, capsys, grid, out=tmp_path / "out")
    calls()
    monkeypatch.setenv("GPUS", "0")
    run(monkeypatch, capsys, grid, out=tmp_path / "out")
    assert calls() == []


@pytest.mark.parametrize("name", ["SAVE", "CHECKPOINT"])
def test_what_every_run_has_of_its_own_is_refused(name, grid, calls, tmp_path, monkeypatch, capsys):
    grid.write_text(GRID.replace("MODEL=mixed", f"{name}=here"))
    message = f"sweep: error: {name}=here: must not be set; sweep.py gives each run its own\n"
    assert run(monkeypatch, capsys, grid, out=tmp_path / "out") == (2, "", message)
    grid.write_text(GRID)
    monkeypatch.setenv(name, "here")
    assert run(monkeypatch, capsys, grid, out=tmp_path / "out") == (2, "", message)
    assert calls() == []


# ---- interruptions, and other sweeps ---------------------------------------------------------------------------------


def signals_at_their_defaults():
    """The tests themselves may run under nohup, or behind a script's `&`."""
    for number in (*sweep.STOPS, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def start(examples, grid, tmp_path):
    """Start the command by a line of shell ("$@") and wait for two trainings; ends what is left of all in the end."""
    grid.write_text(GRID.replace("--heads 16", "--heads 16 --wait"))
    program = (EXAMPLES / "sweep.py").read_text()
    (examples / "sweep.py").write_text(program.replace("GRACE = 10.0", "GRACE = 0.2"))
    command = [sys.executable, str(examples / "sweep.py"), str(grid), "--out", str(tmp_path / "out"), "--jobs", "2"]
    waiting = examples / "toy" / "waiting"
    processes = []

    def trainings():
        return [int(pid) for pid in waiting.read_text().split()] if waiting.exists() else []

    def start(line='exec "$@"'):
        words = ["bash", "-c", line, "bash", *command]
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=signals_at_their_defaults
        )
        processes.append(process)
        deadline = time.monotonic() + 60
        while len(trainings()) < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        return process, trainings()

    start.command = command
    yield start
    for process in processes:
        process.kill()
        process.communicate()
    for pid in trainings():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def wait_for_the_end_of(trainings, out):
    """Of them and of all that they started, which have their folders' locks too: a moment later at most."""
    locks = list(out.glob("16_*/lock"))
    assert len(locks) == len(trainings) == 2
    for path in locks:
        wait_until_unlocked(path, timeout=5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_it_ends_its_runs_and_goes_on_later(number, examples, start, calls, tmp_path):
    process, trainings = start()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert errors == "sweep: interrupted; the same command goes on from here\n"
    wait_for_the_end_of(trainings, tmp_path / "out")

    calls()
    (examples / "toy" / "train.sh").write_text(TRAIN.replace("sleep 60", "true"))
    printed = subprocess.run(start.command, capture_output=True, text=True, check=True).stdout
    assert "4 runs, 2 of them done before" in printed
    assert len([call for call in calls() if call.startswith("train")]) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_were_ignored_at_its_start_end_it_too(number, start, tmp_path):
    """As they are by what a script starts with `&`; only nohup's SIGHUP stays ignored, and not by the trainings."""
    process, trainings = start('trap "" INT TERM HUP; exec "$@"')
    assert [path.read_text() for path in (tmp_path / "out").glob("16_*/checkpoints/ignored")] == ["", ""]
    process.send_signal(signal.SIGHUP)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number
    wait_for_the_end_of(trainings, tmp_path / "out")


def test_a_training_that_ignores_the_end_is_killed(grid, start, tmp_path):
    grid.write_text(grid.read_text().replace("--wait", "--wait --stubborn"))
    process, trainings = start()
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    wait_for_the_end_of(trainings, tmp_path / "out")


def test_nothing_is_trained_beside_what_a_killed_sweep_left_behind(examples, start, calls, tmp_path):
    process, trainings = start()
    process.kill()
    process.communicate()
    calls()
    again = subprocess.run(start.command, capture_output=True, text=True, timeout=30)
    assert again.returncode == 1 and calls() == []
    assert "[3/4] 16_" in again.stdout and again.stdout.count(": being run by another sweep\n") == 2
    for pid in trainings:
        os.killpg(pid, signal.SIGKILL)
    wait_for_the_end_of(trainings, tmp_path / "out")
    (examples / "toy" / "train.sh").write_text(TRAIN.replace("sleep 60", "true"))
    subprocess.run(start.command, capture_output=True, check=True, timeout=60)


def test_what_another_sweep_holds_is_left_to_it(grid, calls, tmp_path, monkeypatch, capsys):
    run(monkeypatch, capsys, grid, out=tmp_path / "out")
    (folder,) = (tmp_path / "out").glob("2_B-*")
    (folder / "result.json").unlink()
    calls()
    with (folder / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        status, printed, errors = run(monkeypatch, capsys, grid, out=tmp_path / "out")
    assert status == 1 and calls() == []
    assert "[4/4] 2_B: being run by another sweep\n" in printed and "| 2 | 32.25/32.50 (30.1/29.5) | -/- |" in printed
    assert errors == f"sweep: left out: 2_B: being run by another sweep; its folder: {folder}\n"
    status, _, _ = run(monkeypatch, capsys, grid, out=tmp_path / "out")
    assert status == 0 and [call.split()[0] for call in calls()] == ["evaluate", "evaluate"]


@pytest.mark.parametrize("kind", [fcntl.LOCK_SH, fcntl.LOCK_EX])
def test_a_run_that_is_held_for_a_moment_is_not_left_out(kind, grid, calls, tmp_path, monkeypatch, capsys):
    """As by who asks whether it is held."""
    run(monkeypatch, capsys, grid, out=tmp_path / "out")
    (folder,) = (tmp_path / "out").glob("2_B-*")
    (folder / "result.json").unlink()
    calls()
    monkeypatch.setattr(sweep, "PATIENCE", 30)
    with (folder / "lock").open() as file:
        fcntl.flock(file, kind)
        tried = []

        def locked(opened, own=sweep.locked):
            tried.append(own(opened))
            fcntl.flock(file, fcntl.LOCK_UN)
            return tried[-1]

        monkeypatch.setattr(sweep, "locked", locked)
        status, _, errors = run(monkeypatch, capsys, grid, out=tmp_path / "out")
    assert (status, errors, tried) == (0, "", [False, True]) and len(calls()) == 2


def test_a_run_knows_what_its_training_took(grid, examples, calls, tmp_path, monkeypatch, capsys):
    (examples / "toy" / "train.sh").write_text(
        TRAIN + 'sleep 0.2\n[[ -e "$SAVE/again" ]] || { touch "$SAVE/again"; exit 4; }\n'
    )
    run(monkeypatch, capsys, grid, out=tmp_path / "out")
    taken = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*/training.json")]
    assert len(taken) == 4 and {once["starts"] for once in taken} == {1}
    run(monkeypatch, capsys, grid, out=tmp_path / "out")
    for path in (tmp_path / "out").glob("*/result.json"):
        training = json.loads(path.read_text())["training"]
        assert training["starts"] == 2 and 0.4 <= training["seconds"] < 60  # both together
        assert 1 < training["peak_rss_mib"] < 2000


def test_the_peak_is_that_of_the_largest_process():
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'x = bytearray(300 * 2**20)'])"
    # from a process without torch in it, as sweep.py is
    measure = (
        f"import subprocess, sweep, sys; print(*sweep.end_of(subprocess.Popen([sys.executable, '-c', {program!r}])))"
    )
    measured = subprocess.run([sys.executable, "-c", measure], cwd=EXAMPLES, capture_output=True, text=True, check=True)
    status, peak = measured.stdout.split()
    assert status == "0" and 300 < float(peak) < 600
    assert sweep.end_of(subprocess.Popen(["sh", "-c", "exit 3"]))[0] == 3
    assert sweep.end_of(subprocess.Popen(["sh", "-c", "kill -TERM $$"]))[0] == -signal.SIGTERM


def test_flags_can_name_the_checkout_and_the_runs_checkpoints(grid, calls, tmp_path, monkeypatch, capsys):
    grid.write_text(GRID.replace('test = ""', 'test = "--from {root}/x --to {save}/y"'))
    run(monkeypatch, capsys, grid, out=tmp_path / "out")
    (folder,) = (tmp_path / "out").glob("2_none-*")
    assert f"evaluate  --from {sweep.ROOT}/x --to {folder}/checkpoints/y" in calls()
    assert str(tmp_path) not in (folder / "result.json").read_text()  # the same run in another checkout
    run(monkeypatch, capsys, grid, out=tmp_path / "out")
    assert calls() == []


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", '{"evaluations": [{"metric": "va', "[]", '{"evaluations": [1]}', "{}"])
def test_a_result_that_was_cut_off_is_no_result(text, grid, calls, tmp_path, monkeypatch, capsys):
    run(monkeypatch, capsys, grid, out=tmp_path / "out")
    (folder,) = (tmp_path / "out").glob("2_B-*")
    whole = (folder / "result.json").read_text()
    (folder / "result.json").write_text(text)
    calls()
    status, printed, errors = run(monkeypatch, capsys, grid, out=tmp_path / "out")
    assert status == 0 and "4 runs, 3 of them done before" in printed
    assert errors == f"sweep: {folder}/result.json: cut off, or not written by this; taken as not done\n"
    assert [call.split()[0] for call in calls()] == ["evaluate", "evaluate"]
    assert (folder / "result.json").read_text() == whole


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "result.json").mkdir()  # nothing can take its place
    with pytest.raises(OSError):
        sweep.write(tmp_path / "result.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_file_is_no_folder_for_the_runs(below, grid, examples, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    status, _, errors = run(monkeypatch, capsys, grid, out=f"{tmp_path}/file{below}")
    assert status == 2 and errors.count("\n") == 1
    assert errors.startswith(f"sweep: error: --out {tmp_path}/file{below}: cannot be made a folder: ")


def test_labels_of_any_length_and_metrics_of_any_name(grid, calls, tmp_path, monkeypatch, capsys):
    grid.write_text(GRID.replace("B = {", f"{'B' * 300} = {{").replace("valid =", '"valid/all" ='))
    status, _, errors = run(monkeypatch, capsys, grid, out=tmp_path / "out")
    assert (status, errors) == (0, "")


@pytest.mark.parametrize(
    "words, message",
    [
        (["toys", "--axis", "a=1"], "toys: must be a file that ends in .toml or .json, or one of toy"),
        (
            ["toy"],
            "--axis is missing: the name of a recipe needs at least one, such as --axis head-mixing=none,average",
        ),
        (["toy", "--axis", "heads"], "--axis heads: must be a flag and its values, such as head-mixing=none,average"),
        (["toy", "--axis", "heads=1,,2"], "--axis heads=1,,2: must be a flag and its values, such as"),
        (["toy", "--axis", "heads=1,1"], "--axis heads=1,1: has a value twice"),
        (["toy", "--axis", "heads=1", "--axis=--heads=2"], "--axis --heads=2: heads has an axis already"),
        (["toy", "--axis", "heads=1", "--jobs", "0"], "--jobs 0: must be at least 1"),
        (["toy", "--axis", "heads=1", "--", "--lr", "'"], None),
        (["missing.toml"], "missing.toml: [Errno 2] No such file or directory: 'missing.toml'"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(words, message, examples, tmp_path, monkeypatch, capsys):
    status, _, errors = run(monkeypatch, capsys, *words, out=tmp_path / "out")
    if message is None:  # a quotation mark reaches the scripts as it was typed
        assert status == 0
        return
    assert status == 2 and errors.startswith(f"sweep: error: {message}") and errors.count("\n") == 1


@pytest.mark.parametrize(
    "text, message",
    [
        ("example = 'toy'\naxis = 1\n[axes.a]\n1 = '--a'", "axis: must be among axes, evaluate, example, metrics, "),
        ("example = 'toy'", "needs example and axes"),
        ("example = 'toy'\n[axes.a]\n1 = 1", "axes.a.1: must be flags, or train and evaluate"),
        ("example = 'toy'\n[axes.a.1]\ntest = '--a'", "axes.a.1: must be flags, or train and evaluate"),
        ("example = 'toy'\n[axes.a]\n1 = '--a'\n2 = '--a'", "two points of the grid are the same run: "),
        ("example = 'toy'\n[axes.a]\n1 = '--a \"'", "train = '--a \"': No closing quotation"),
        ("example = toy", "Invalid value"),
        ("example = 'toy'\naxes = 'x'", "axes: must be a table with something in it, not 'x'"),
        ("example = 'toy'\n[axes]\na = 'x'", "axes.a: must be a table with something in it, not 'x'"),
        ("example = 'toy'\n[axes.a]", "axes.a: must be a table with something in it, not {}"),
        ("example = 'toy'\n[axes.a.1]\ntrain = 1", "axes.a.1: must be a text, not 1"),
        ("example = ['toy']\n[axes.a]\n1 = '--a'", "example: must be a text, not ['toy']"),
        ("example = 'toy'\ntitle = 1\n[axes.a]\n1 = '--a'", "title: must be a text, not 1"),
        ("example = 'toy'\ntrain = ['--a']\n[axes.a]\n1 = '--a'", "train: must be a text, not ['--a']"),
        (
            "example = 'toy'\nmetrics = 'x'\n[axes.a]\n1 = '--a'",
            "metrics: must be a table with something in it, not 'x'",
        ),
        ("example = 'toy'\n[metrics]\n[axes.a]\n1 = '--a'", "metrics: must be a table with something in it, not {}"),
        ("example = 'toy'\n[metrics]\nb = 2\n[axes.a]\n1 = '--a'", "metrics.b: must be a text, not 2"),
        (
            "example = 'toy'\n[metrics]\na = ''\n[axes.a]\n1 = '--a'",
            "a: a column of the table already, cannot be an axis",
        ),
        ("example = 'toy'\npublished = 'x'\n[axes.a]\n1 = '--a'", "published: must be a table with something in it"),
        ("example = 'toy'\n[axes.a]\n1 = '--a'\n[published]\n1 = 2.5", "published.'1': must be a text, not 2.5"),
        (
            "example = 'toy'\n[axes.a]\n1 = '--a'\n[published]\n2 = '2.5'",
            "published.'2': is no point of the grid, such as '1'",
        ),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused_in_one_line(text, message, examples, tmp_path, monkeypatch, capsys):
    (tmp_path / "grid.toml").write_text(text)
    status, _, errors = run(monkeypatch, capsys, tmp_path / "grid.toml", out=tmp_path / "out")
    assert status == 2 and errors.startswith("sweep: error: ") and message in errors and errors.count("\n") == 1


@pytest.mark.parametrize("text", ["[]", "null", '"example"', "{}"])
def test_json_without_a_grid_is_refused_in_one_line(text, examples, tmp_path, monkeypatch, capsys):
    (tmp_path / "grid.json").write_text(text)
    status, _, errors = run(monkeypatch, capsys, tmp_path / "grid.json", out=tmp_path / "out")
    message = f"sweep: error: {tmp_path}/grid.json: the file: must be a table with something in it, not "
    assert status == 2 and errors.startswith(message) and errors.count("\n") == 1


def test_json_is_read_too(examples, tmp_path):
    grid = {"example": "toy", "axes": {"heads": {"2": "--heads 2", "4": {"train": "--heads 4", "evaluate": "--b"}}}}
    (tmp_path / "grid.json").write_text(json.dumps(grid))
    found = sweep.read_grid(tmp_path / "grid.json")
    assert found.axes == {"heads": {"2": Point("--heads 2"), "4": Point("--heads 4", "--b")}}
    assert (found.title, found.metrics) == ("grid", {"result": ""})


# ---- the grids of the papers -----------------------------------------------------------------------------------------


def test_a_dry_run_prints_fairseqs_commands():
    commands = dry_run(f"{sys.executable} examples/sweep.py examples/grids/mixhead_table_7.toml")
    assert [command[0] for command in commands] == ["fairseq-train", "fairseq-eval-lm", "fairseq-eval-lm"] * 5
    assert "random" in commands[9] and "--gen-subset" in commands[10]


def test_a_dry_run_names_the_folders_of_the_runs(grid, examples, tmp_path, monkeypatch, capsys):
    for name in ("train", "evaluate"):
        path = examples / "toy" / f"{name}.sh"
        says = f'echo "{name} $SAVE $*" >> {tmp_path}/said\n[[ ! ${{DRY_RUN:-}} ]] || exit 0\n'
        path.write_text(path.read_text().replace("bash\n", f"bash\n{says}", 1))
    grid.write_text(GRID.replace('test = ""', 'test = "--results-path {save}/x {root}"'))
    found = []
    for dry in ("1", ""):
        monkeypatch.setenv("DRY_RUN", dry)
        if dry:  # returns; a sweep ends with its status
            monkeypatch.setattr(sys, "argv", ["sweep.py", str(grid), "--out", str(tmp_path / "out")])
            sweep.main()
            assert not (tmp_path / "out").exists()
        else:
            assert run(monkeypatch, capsys, grid, out=tmp_path / "out")[0] == 0
        found.append((tmp_path / "said").read_text().splitlines())
        (tmp_path / "said").unlink()
    assert len(found[0]) == 12 and found[0] == found[1]


@pytest.mark.parametrize("path", GRIDS, ids=[str(path.relative_to(EXAMPLES / "grids")) for path in GRIDS])
def test_fairseq_takes_every_command_of_a_grid(path):
    """Flags come last in the scripts, so each command is the script's own with the run's flags behind."""
    grid = sweep.read_grid(path)
    own = {}
    trained = set()
    for run in sweep.runs(grid):
        for name, words in (("train", run.train), *(("evaluate", words) for words in run.evaluate.values())):
            command, variables = sweep.command_of(grid.example, name, words)
            if (key := (name, *sorted(variables.items()))) not in own:
                (own[key],) = dry_run(command[0], **variables)
            args = parse([*own[key], *command[1:]])
            if name == "train":
                trained.add(str(sorted(vars(args).items())))
    assert len(trained) == len(sweep.runs(grid))  # no two runs train the same


# The tables of the Mixhead paper, as it prints them: rows by name, columns in the order of the first line.
PAPER = {
    "mixhead_table_1": """
                  softmax      sigsoftmax   A            A+sigsoftmax B            B+sigsoftmax
        vanilla   30.75/29.78  30.66/29.61  30.00/28.86  30.08/28.93  29.65/28.67  29.68/28.87
        baevski   21.45/20.54  21.10/20.18  20.49/19.58  20.98/19.95  20.37/19.47  20.88/20.06
        transformer-xl  23.41/23.69  23.29/23.56  22.99/23.56  22.96/23.47  22.66/22.92  22.57/22.89
        synthesizer     24.32/23.79  24.02/23.53  23.98/23.51  24.03/23.57  23.40/22.77  23.47/22.92
    """,
    "mixhead_table_2": """
                  softmax      sigsoftmax   A            A+sigsoftmax B            B+sigsoftmax
        vanilla   92.16/83.97  91.62/83.34  91.56/83.39  91.09/82.04  92.57/82.93  90.97/81.77
        transformer-xl  67.52/64.47  66.90/63.93  65.91/63.25  65.87/63.02  65.53/62.46  64.58/61.88
    """,
    "mixhead_table_3": """
                  softmax      A            B
        baevski   38.03/37.66  37.05/36.90  34.21/34.38
        transformer-xl  32.03/32.16  29.88/29.95  29.44/29.51
    """,
    "mixhead_table_4": """
                  softmax      A            B
        4         35.28/34.76  34.71/33.84  35.06/34.25
        32        33.31/32.60  32.94/32.58  33.15/32.35
        64        28.69/27.88  31.74/31.32  31.75/31.44
    """,
    "mixhead_table_6": """
                  softmax      B
        squad     80.6/88.0    81.0/88.4
    """,
    "mixhead_table_7": """
                  softmax      A            B            random       average
        d64       21.82/20.89  21.20/20.48  21.10/20.18  22.26/21.39  22.50/21.57
    """,
    "mixhead_table_8": """
                  softmax      A            B
        2         23.62/22.87  22.90/22.11  22.66/21.89
        4         22.55/21.68  22.02/21.19  21.95/21.02
        6         22.04/21.09  22.09/21.13  22.02/21.15
        8         21.82/20.89  21.20/20.48  21.10/20.18
        10        22.11/21.33  21.29/20.49  21.65/20.67
    """,
    "mixhead_table_9": """
                  softmax      A            B
        32        37.05/27.36  36.11/26.59  36.19/26.36
        64        29.59/24.66  28.87/23.93  28.82/23.83
        128       25.47/23.07  24.66/22.38  24.99/22.73
        256       23.05/22.13  22.27/21.45  22.40/21.57
        512       21.79/21.69  21.34/21.29  21.26/21.16
    """,
    "mixhead_table_10": """
                  softmax      A            B
        32        22.66/21.77  22.40/21.74  22.35/21.46
        64        21.85/21.02  21.39/20.60  21.49/20.75
        128       21.03/20.15  20.23/19.30  21.08/20.09
        256       20.72/19.74  20.15/19.29  20.15/19.22
        512       21.21/20.17  20.37/19.46  20.36/19.51
    """,
}


UNPUBLISHED = {"mixhead_table_6": 1}  # points of a grid that its table lacks


def paper(table):
    """(row, column) -> cell."""
    columns, *rows = (line.split() for line in PAPER[table].strip().splitlines())
    assert all(len(row) == 1 + len(columns) for row in rows)
    return {(row[0], column): cell for row in rows for column, cell in zip(columns, row[1:])}


def markdown_table(recipe, head):
    """The rows of the one table of a recipe's README whose first line begins with `head`, as lists of cells."""
    text = (EXAMPLES / recipe / "README.md").read_text()
    (found,) = re.findall(rf"(?m)^\| {re.escape(head)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines()]


def attention(name):
    """As the columns of PAPER call it."""
    return name.removeprefix("Mixhead ").replace(" ", "")


def test_there_is_a_grid_for_every_table():
    assert {path.stem for path in PAPER_TABLES} == set(PAPER)


@pytest.mark.parametrize("table", PAPER)
def test_the_published_numbers_of_a_grid_are_the_papers(table):
    grid = sweep.read_grid(EXAMPLES / "grids" / f"{table}.toml")
    expected = paper(table)
    rows = {row for row, _ in expected}
    found = {}
    for label, cell in grid.published.items():
        row, _, column = label.rpartition("/")
        found[row or min(rows), attention(column)] = cell
    assert found == expected
    assert len(grid.published) == len(sweep.runs(grid)) - UNPUBLISHED.get(table, 0)


# Tables 1, 2A, 2B and 3A of the low-rank bottleneck paper: the architecture, and what its model has after fine-tuning.
LOW_RANK = """
                            F1       EM       MNLI
    bert_d1024_h8_k128      90.89    84.1     85
    bert_d1024_h16_k64      90.61    83.75    84.5
    bert_d1024_h32_k32      90.45    83.48    84.4
    bert_d512_h8_k128       89.6     82.73    83.5
    bert_d512_h12_k128      90.25    83.18    84.2
    bert_d512_h16_k128      90.43    83.59    83.9
    bert_d512_h32_k128      90.95    84.4     84.9
    bert_d512_h8_k32        88.53    81.19    82.5
    bert_d512_h8_k64        89.51    82.41    83.4
    bert_d512_h8_k256       90.33    83.36    83.9
    bert_d768_h8_k128       90.35    83.37    84.4
    bert_d768_h12_k128      90.48    83.67    84.4
    bert_d768_h16_k128      90.92    84.16    84.7
    bert_d768_h20_k128      90.89    84.29    85.1
"""


@pytest.mark.parametrize("task, columns", [("squad", ["F1", "EM"]), ("mnli", ["MNLI"])])
def test_the_published_numbers_of_pretrained_models_are_the_papers(task, columns):
    """Each beside the architecture that it is of, fine-tuned from a checkpoint of that architecture."""
    grid = sweep.read_grid(EXAMPLES / "grids" / f"low_rank_tables_{task}.toml")
    head, *rows = (line.split() for line in LOW_RANK.strip().splitlines())
    expected = {name: "/".join(cells[head.index(column)] for column in columns) for name, *cells in rows}
    found = {}
    for run in sweep.runs(grid):
        flags = canonical(run.train)
        (arch,), (label,) = flags["--arch"], run.labels.values()
        checkpoint = f"{{root}}/checkpoints/bert/pretraining/{arch}/512/checkpoint_last.pt"
        assert flags["--finetune-from-model"] == [checkpoint]
        numbers = dict(re.findall(r"(d|h|d_k) (\d+)", label))
        found[arch.removeprefix("fixhead_")] = grid.published[label]
        size = numbers.get("d_k") or ("128" if numbers["d"] != "1024" else str(1024 // int(numbers["h"])))
        assert arch == f"fixhead_bert_d{numbers['d']}_h{numbers['h']}_k{size}"
    assert found == expected
    recipe = EXAMPLES / grid.example / "README.md"
    assert dict(re.findall(r"(?m)^\| \w+ \| `fixhead_(\w+)` \| (\S+) \|$", recipe.read_text())) == expected


def test_the_numbers_in_the_readmes_are_the_papers():
    heads = {
        "baevski": "row, adaptive inputs",
        "vanilla": "row, vanilla",
        "transformer-xl": "row, Transformer-XL",
        "synthesizer": "row, Synthesizer",
    }
    for table, recipe, models in (
        (1, "wikitext103", heads),
        (2, "wikitext2", ["vanilla", "transformer-xl"]),
        (3, "lm1b", ["baevski", "transformer-xl"]),
    ):
        found = {}
        for model in models:
            for name, cell, *_ in markdown_table(recipe, heads[model]):
                found[model, attention(name)] = cell.replace(" ", "")
        assert found == paper(f"mixhead_table_{table}")

    prose = (EXAMPLES / "wikitext103" / "README.md").read_text()
    numbers = re.findall(r"table 9: (\d+\.\d+) and (\d+\.\d+)", prose)
    assert ["/".join(pair) for pair in numbers] == [paper("mixhead_table_9")["32", "softmax"]]

    *rows, concatenated = markdown_table("iwslt14_de_en", "heads, size")
    columns = ("softmax", "A", "B")
    found = {
        (heads.partition(",")[0], column): cell.replace(" ", "")
        for heads, *cells in rows
        for column, cell in zip(columns, cells)
    }
    assert found == paper("mixhead_table_4")
    assert concatenated[1:4] == ["< 1", "", "34.5 (A or B is not said)"]

    prose = (EXAMPLES / "bert" / "squad" / "README.md").read_text()
    stock, mixed = re.search(r"\| BERT \| (\S+) \|.*\n\| Mixhead B \| (\S+) \|", prose).groups()
    assert {("squad", "softmax"): stock, ("squad", "B"): mixed} == paper("mixhead_table_6")


@pytest.mark.parametrize(
    "recipe, pattern, cells",
    [
        (
            "wikitext103",
            r"(\d+\.\d+) on test",
            ["1 baevski B", "1 vanilla B", "1 transformer-xl B", "1 synthesizer B"],
        ),
        ("wikitext2", r"(\d+\.\d+) on test(?:, (\d+\.\d+) with)?", ["2 vanilla B", "2 transformer-xl B"]),
        ("lm1b", r"\((\d+\.\d+) on test\)", ["3 baevski B", "3 transformer-xl B"]),
    ],
)
def test_the_numbers_in_the_scripts_are_the_papers(recipe, pattern, cells):
    matches = re.finditer(pattern, (EXAMPLES / recipe / "train.sh").read_text())
    for number, cell in zip((number for found in matches for number in found.groups()), cells, strict=True):
        table, row, column = cell.split()
        assert number == paper(f"mixhead_table_{table}")[row, column].partition("/")[2]
