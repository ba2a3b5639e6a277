"""The sweep trains, evaluates and resumes the runs of a grid, with scripts in place of fairseq."""

import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sweep
from recipes import EXAMPLES, ROOT, parse, script, wait_until_unlocked
from studies import commands, grids, provenance, running, runs

VARIABLES = (
    *commands.TRAINING,
    *commands.EVALUATION,
    "SAVE",
    "CHECKPOINT",
    "GPUS",
    "CUDA_VISIBLE_DEVICES",
    "DRY_RUN",
)

# A recipe that records its calls and logs as fairseq does; its metric is the length of its flags.
TRAIN = """#!/usr/bin/env bash
here=$(dirname "$0")
[[ ! -e $here/refuse ]] || { echo "train: error: as it was told" >&2; exit 2; }
if [[ ${DRY_RUN:-} ]]; then
    echo "fairseq-train $DATA --save-dir $SAVE --recipe ${RECIPE:-1} --gpus ${GPUS:-all} of" \
        "${CUDA_VISIBLE_DEVICES:-all} $*"
    exit
fi
mkdir -p "$SAVE"
echo "train ${MODEL:-} $*" >> "$here/calls"
echo "${OMP_NUM_THREADS:-} ${CUDA_VISIBLE_DEVICES:-}" >> "$here/shares"
echo "$*" > "$SAVE/flags"
[[ $* != *--fail* ]] || { echo "train: error: as it was told" >&2; exit 3; }
trap 'touch "$here/asked"; exit 143' TERM
[[ $* != *--stubborn* ]] || trap "" TERM
if [[ $* == *--wait* && ! -e $here/quick ]]; then echo $$ >> "$here/waiting"; sleep 60; sleep 60; fi
[[ $* != *--from* ]] || echo "Loaded checkpoint x.pt (epoch 1 @ 10 updates)"
printf '2026-01-01 00:00:00 | INFO | valid | {"valid_loss": "4.0",'
sleep 0.05
echo ' "valid_num_updates": "10"}'
"""
EVALUATE = """#!/usr/bin/env bash
[[ ! ${DRY_RUN:-} ]] || { echo "fairseq-eval-lm $*"; exit; }
echo "evaluate ${MODEL:-}${AVERAGE:+ of $AVERAGE} $*" >> "$(dirname "$0")/calls"
[[ ! -e $(dirname "$0")/silent ]] || { echo "no number here"; exit; }
length=$(cat "$SAVE/flags"); length=${#length}
[[ $* == *valid* ]] && echo "perplexity = $length.25" || echo "perplexity = $length.5 60.1/40.2 (BP = 1.000)"
"""
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
"""


def make_toy(folder, monkeypatch):
    """Write the toy grid into a folder, and below it the toy recipe, whose folder is returned."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    recipe = folder / "examples" / "toy"
    recipe.mkdir(parents=True)
    for name, text in (("train.sh", TRAIN), ("evaluate.sh", EVALUATE)):
        (recipe / name).write_text(text)
        (recipe / name).chmod(0o755)
    (folder / "data").mkdir()
    (folder / "data" / "dict.txt").write_text("a 1\n")
    monkeypatch.setenv("DATA", str(folder / "data"))
    monkeypatch.setattr(commands, "EXAMPLES", folder / "examples")
    monkeypatch.setattr(running, "POLL", 0.01)
    (folder / "toy.toml").write_text(GRID)
    return recipe


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Return the folder of the toy recipe; the grid lies above it."""
    return make_toy(tmp_path, monkeypatch)


@pytest.fixture
def calls(toy):
    """Return a function for the calls of the scripts since its last call."""

    def calls(kind=""):
        path = toy / "calls"
        found = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [call.replace(" --log-format json", "") for call in found if call.startswith(kind)]

    return calls


@pytest.fixture
def run(toy, tmp_path, capfd):
    """Run the command on a grid; return its status and what it printed."""

    def run(*words, grid=GRID):
        (tmp_path / "toy.toml").write_text(grid)
        try:
            status = sweep.main(
                [str(tmp_path / "toy.toml"), "--out", str(tmp_path / "out"), *words]
            )
        except SystemExit as ended:
            status = ended.code
        return status, *capfd.readouterr()

    return run


def records(tmp_path):
    return [json.loads(path.read_text()) for path in sorted((tmp_path / "out").glob("*/run.json"))]


def test_cells_choose_the_points_and_their_flags_come_last(run, calls):
    cells = '[cells]\n"16,B" = "--lr 3 --heads 8"\n"2" = ""\n'
    assert run(grid=GRID + cells)[0] == 0
    assert calls("train") == [
        "train  --always --heads 2 --mixing none --seed 1",
        "train mixed --always --heads 2 --mixing position-wise --seed 1",
        "train mixed --always --heads 16 --mixing position-wise --lr 3 --heads 8 --seed 1",
    ]


def test_a_metric_may_be_of_the_points_of_one_label(run, calls):
    metric = 'mismatched = { evaluate = "--valid-subset valid1", only = "16" }\n'
    grid = GRID.replace('test = ""\n', f'test = ""\n{metric}')
    assert run("--only", "none", grid=grid)[0] == 0
    flags = [call.split()[1:] for call in calls("evaluate")]
    assert flags == [
        ["--gen-subset", "valid"],
        [],
        ["--gen-subset", "valid"],
        [],
        ["--valid-subset", "valid1"],
    ]


def test_every_point_is_trained_and_evaluated_once(run, calls, tmp_path):
    status, printed, _ = run("--seeds", "2", "--only", "16", "--", "--more", "1")
    assert status == 0 and "[4/4] 16, B, seed 2: valid " in printed
    assert calls()[6:9] == [
        "train mixed --always --more 1 --heads 16 --mixing position-wise --seed 1",
        "evaluate mixed --context-window 8 --gen-subset valid",
        "evaluate mixed --context-window 8",
    ]
    assert [(r["labels"], r["seed"]) for r in records(tmp_path)] == [
        ({"heads": "16", "mixing": mixing}, seed) for mixing in ("B", "none") for seed in (1, 2)
    ]
    status, printed, _ = run(
        "--seeds", "2-2", "--only", "16,B", "--only", "16,none", "--", "--more", "1"
    )
    assert (status, calls()) == (0, []) and "2 runs, 2 of them finished before" in printed


def test_in_drawn_order_a_seed_is_done_before_the_next_one(run, calls):
    assert run("--seeds", "3-4", "--drawn-order", "--metric", "valid")[0] == 0
    seeds = [call.rpartition("--seed ")[2] for call in calls("train")]
    assert seeds == ["3"] * 4 + ["4"] * 4


def test_a_seed_draws_the_order_of_its_points_and_the_same_one_in_every_sweep(toy, tmp_path):
    grid = commands.grid_of(tmp_path / "toy.toml")
    blocks = sweep.drawn_blocks(runs.runs(grid, range(3, 9)))
    orders = []
    for seed, block in zip(range(3, 9), blocks):
        assert {run.seed for run in block} == {seed}
        assert {run.row for run in block} == set(grid.rows)
        orders.append([run.row for run in block])
    assert len(set(map(tuple, orders))) > 2

    (alone,) = sweep.drawn_blocks(runs.runs(grid, [5]))
    assert [run.row for run in alone] == orders[2]


def test_a_changed_evaluation_is_made_again_without_training(run, calls):
    run("--only", "2,B")
    calls()
    assert run("--only", "2,B", grid=GRID.replace('test = ""', 'test = "--beam 5"'))[0] == 0
    assert calls() == ["evaluate mixed --context-window 8 --beam 5"]


# ---- the record of a run -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder_of_a_run(tmp_path_factory):
    """Return the folder of a toy whose point '2,B' has run; the tests only read."""
    folder = tmp_path_factory.mktemp("toy")
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_toy(folder, monkeypatch)
        words = [folder / "toy.toml", "--out", folder / "out", "--only", "2,B"]
        assert sweep.main([str(word) for word in words]) == 0
    return folder


@pytest.fixture
def record(folder_of_a_run):
    (record,) = records(folder_of_a_run)
    return record


def test_a_record_has_the_metrics_and_what_evaluate_calls_them(record):
    assert record["metrics"] == {"valid": 68.25, "test": 68.5}
    assert record["measures"] == {"valid": "perplexity", "test": "perplexity"}


def test_a_record_has_the_words_of_the_grid_and_the_variables(record, folder_of_a_run):
    assert record["train"] == {
        "--always": [],
        "--heads": ["2"],
        "--mixing": ["position-wise"],
        "--seed": ["1"],
        "DATA": [str(folder_of_a_run / "data")],
        "MODEL": ["mixed"],
    }
    assert record["evaluate"]["test"]["--context-window"] == ["8"]


def test_a_record_has_the_flags_of_the_recipe_without_those_of_this_machine(record):
    assert record["flags"]["--recipe"] == ["1"]
    assert "--save-dir" not in record["flags"]


def test_a_record_says_where_it_was_made(record):
    assert re.fullmatch(r"[0-9a-f]{12}", record["data"])
    assert re.fullmatch(r"[0-9a-f]{12}\+?", record["commit"])
    assert record["versions"]["torch"]
    assert record["device"] == provenance.device(on_gpus=False)


def test_the_device_of_a_run_names_the_gpus_that_it_uses(monkeypatch):
    on_cpu = provenance.device(on_gpus=False)
    monkeypatch.setattr(provenance, "gpus", lambda visible: ["NVIDIA H100", "NVIDIA H100"])
    assert provenance.device(on_gpus=False) == on_cpu
    assert provenance.device(on_gpus=True) == f"NVIDIA H100, {on_cpu}"


def test_the_flags_and_the_device_of_a_run_are_those_of_its_share_of_the_gpus(
    run, tmp_path, monkeypatch
):
    monkeypatch.setattr(provenance, "gpus", lambda visible: [f"GPUs {visible}"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6")
    monkeypatch.setenv("GPUS", "7")
    assert run("--jobs", "2", "--only", "2")[0] == 0
    of_shares = [(["2", "of", "0,1"], "GPUs 0,1"), (["2", "of", "2,3"], "GPUs 2,3")]
    of_runs = [(record["flags"]["--gpus"], record["device"][:8]) for record in records(tmp_path)]
    assert len(of_runs) == 2
    assert all(found in of_shares for found in of_runs)


TEXTS = ["train.bin", "dict.txt", "dict.de.txt", "label/train.label", "train.json", "valid.json"]


@pytest.mark.parametrize("name", TEXTS)
def test_the_checksum_is_of_every_file_that_has_text(name, tmp_path):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("a 1\n")
    before = provenance.checksum(str(tmp_path))
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / "preprocess.log").write_text("a log")
    provenance.checksum_of.cache_clear()
    assert before is not None
    assert provenance.checksum(str(tmp_path)) == before

    file.write_text("b 1\n")
    provenance.checksum_of.cache_clear()
    assert provenance.checksum(str(tmp_path)) != before


def test_the_checksum_of_the_runs_of_older_versions_stays(tmp_path):
    for name in ("dict.de.txt", "dict.en.txt", "train.de-en.de.bin", "train.de-en.en.bin"):
        (tmp_path / name).write_text(name)
    (tmp_path / "settings.json").write_text("{}")
    assert provenance.checksum(str(tmp_path)) == "03dc3f3d7a42"


def test_a_record_has_the_cost_and_the_losses_along_the_training(record):
    assert record["seconds"] > 0
    assert record["cpu_seconds"] >= 0
    assert record["peak_memory_mib"] > 0
    assert record["points"] == [{"update": 10, "tokens": 0, "cpu_seconds": 0.0, "valid_loss": 4.0}]
    assert record["valid_loss"] == 4.0


def test_a_record_has_the_commit_of_each_step(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    record = {"commit": None}
    heads = []
    for message in ("one", "two"):
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", message], check=True)
        provenance.add_commit(record)
        printed = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        heads.append(printed.stdout[:12])
    assert record["commit"] == ", ".join(heads)


@pytest.mark.parametrize("trained", [False, True])
def test_a_record_of_an_older_version_is_completed(trained, run, calls, tmp_path):
    run("--only", "2,B", "--metric", "test")
    (path,) = (tmp_path / "out").glob("*/run.json")
    whole = json.loads(path.read_text())
    needed = ("labels", "seed", "digest", "versions", "seconds")
    older = {name: whole[name] for name in needed}
    older |= {"trained": trained, "metrics": {}, "flags": None, "commit": None}
    path.write_text(json.dumps(older))
    calls()
    status, _, errors = run("--only", "2,B", "--metric", "test")
    assert (status, errors) == (0, "")
    assert len(calls("train")) == int(not trained)
    (record,) = records(tmp_path)
    assert record["metrics"] == whole["metrics"]
    assert record["evaluate"] == whole["evaluate"]


# ---- which runs are the same -------------------------------------------------------------------


def test_grids_share_their_runs_in_any_order_of_flags(run, calls):
    run()
    calls()
    before, _, rest = GRID.partition("[axes.heads]")
    heads, _, mixing = rest.partition("[axes.mixing]")
    other = f"{before}[axes.mixing]{mixing}[axes.heads]{heads.replace('16', '32')}"
    assert "4 runs, 2 of them finished before" in run(grid=other)[1]
    assert len(calls("train")) == 2


@pytest.fixture
def identities(toy, tmp_path, monkeypatch):
    """Return a function for what identifies trainings and evaluations in this environment."""
    (tmp_path / "toy.toml").write_text(GRID.replace("MODEL=mixed ", ""))
    monkeypatch.delenv("DATA")

    def identities():
        trainings = set()
        evaluations = set()
        for run in runs.runs(commands.grid_of(tmp_path / "toy.toml")):
            trainings.add(run.digest)
            evaluations |= {str(runs.canonical(words)) for words in run.evaluate.values()}
        return trainings, evaluations

    return identities


@pytest.mark.parametrize("name", commands.TRAINING)
def test_a_variable_of_the_training_makes_another_run(name, identities, monkeypatch):
    trainings, evaluations = identities()
    monkeypatch.setenv(name, "value")
    other_trainings, other_evaluations = identities()
    assert trainings.isdisjoint(other_trainings)
    assert evaluations.isdisjoint(other_evaluations)


@pytest.mark.parametrize("name", commands.EVALUATION)
def test_a_variable_of_the_evaluation_makes_another_evaluation_alone(name, identities, monkeypatch):
    trainings, evaluations = identities()
    monkeypatch.setenv(name, "value")
    other_trainings, other_evaluations = identities()
    assert trainings == other_trainings
    assert evaluations.isdisjoint(other_evaluations)


# ---- runs that fail, and runs that start from others -------------------------------------------


def test_a_run_that_fails_stops_no_other_and_is_done_again(run, calls, tmp_path):
    bad = GRID.replace('2 = "--heads 2"', '2 = "--heads 2 --fail"')
    status, printed, errors = run(grid=bad)
    assert status == 1 and len(calls("train")) == 4 and "16, B, seed 1: valid" in printed
    assert "failed: 2, none, seed 1: train.sh failed (train: error: as it was told)" in errors
    run(grid=bad)
    assert len(calls("train")) == 2


def test_a_run_whose_command_cannot_be_printed_leaves_no_record(run, toy, tmp_path):
    (toy / "refuse").touch()
    status, _, errors = run("--only", "2,B")
    assert status == 1
    assert (
        "2, B, seed 1: train.sh cannot print its command (train: error: as it was told)" in errors
    )
    assert records(tmp_path) == []

    (toy / "refuse").unlink()
    assert run("--only", "2,B")[0] == 0
    (record,) = records(tmp_path)
    assert record["flags"]["--recipe"] == ["1"]


@pytest.mark.parametrize("word, lacking", [("cuda", "its GPUs"), ("metadata", "its versions")])
def test_a_run_whose_python_tells_nothing_leaves_no_record(
    word, lacking, run, tmp_path, monkeypatch
):
    """A record keeps what the first training has told, so that it would lack it for good."""
    python = tmp_path / "python"
    # It fails at a program with the word; else it prints as if there were nothing to tell.
    python.write_text(f"#!/bin/sh\ncase $2 in *{word}*) exit 1;; esac\necho '{{}}'\n")
    python.chmod(0o755)
    monkeypatch.setattr(provenance, "python_of_recipes", lambda: str(python))
    status, _, errors = run("--only", "2,B")
    assert status == 1
    assert f"2, B, seed 1: {python} cannot tell {lacking}; its message is above" in errors
    assert records(tmp_path) == []


STARTS = """
[starts]
"10" = "hold"
"20" = "more"
more = "hold"
[axes.updates]
hold = "--updates 8"
"10" = "--from {start}/x.pt --updates 10"
more = "--from {start}/x.pt --updates 16"
"20" = "--from {start}/x.pt --updates 20"
"""


def test_a_run_starts_from_another_and_counts_its_time(run, calls, tmp_path):
    status, printed, _ = run("--only", "2,none", "--metric", "test", grid=GRID + STARTS)
    assert (
        status == 0
        and "[4/4] 2, none, 20, seed 1: test " in printed
        and "2, none, hold, seed 1: trained" in printed
    )
    found = {record["labels"]["updates"]: record for record in records(tmp_path)}
    called = calls()
    # none of what others start from
    assert [call for call in called if "evaluate" in call] == ["evaluate  "] * 2
    for label, start, before in (("10", "hold", 1), ("more", "hold", 1), ("20", "more", 2)):
        (folder,) = (tmp_path / "out").glob(f"2_none_{start}_seed_1-*")
        assert any(f"--from {folder}/checkpoints/x.pt " in call for call in called)
        assert found[label]["seconds"] > found[start]["seconds"] and "{start}/x.pt" in str(
            found[label]["train"]
        )
        assert [point["update"] for point in found[label]["points"]] == [10] * (before + 1)
    assert "4 runs, 2 of them finished before" in run("--only", "2,none", grid=GRID + STARTS)[1]
    errors = run("--only", "2,none,10", grid=GRID + STARTS.replace("--updates 8", "--updates 9"))[2]
    assert "starts from 2, none, hold, seed 1, which is not trained" in errors


def test_runs_of_another_machine_are_not_repeated(run, calls, tmp_path):
    run("--only", "2,none,10", "--only", "2,none,hold", grid=GRID + STARTS)
    done = [record for record in records(tmp_path) if record["metrics"]]
    (tmp_path / "kept.json").write_text(json.dumps({"grid": "toy.toml", "runs": done}))
    shutil.rmtree(tmp_path / "out")
    calls()
    run("--kept", str(tmp_path / "kept.json"), "--only", "2,none", grid=GRID + STARTS)
    assert [record["labels"]["updates"] for record in records(tmp_path)] == ["20", "hold", "more"]
    assert (
        run("--kept", str(tmp_path / "kept.json"), "--only", "2,none,10", grid=GRID + STARTS)[0]
        == 0
    )
    assert len(calls("train")) == 3  # 'hold' is trained again for 'more' and '20' alone
    assert "--kept" in run("--kept", str(tmp_path / "none.json"), grid=GRID + STARTS)[2]


def test_metrics_of_several_kept_files_count_together(run, calls, tmp_path):
    run("--only", "2,none")
    (record,) = records(tmp_path)
    words = []
    for metric, value in record["metrics"].items():
        kept = tmp_path / f"{metric}.json"
        runs_of_file = [{**record, "metrics": {metric: value}}]
        kept.write_text(json.dumps({"grid": "toy.toml", "runs": runs_of_file}))
        words += ["--kept", str(kept)]
    shutil.rmtree(tmp_path / "out")
    calls()
    assert run(*words, "--only", "2,none")[0] == 0
    assert calls() == []


# ---- interruptions, and other sweeps -----------------------------------------------------------


@pytest.fixture
def start(toy, tmp_path):
    """Start the command in a process and wait for two trainings; end what is left of them."""
    (tmp_path / "toy.toml").write_text(GRID.replace("--heads 16", "--heads 16 --wait"))
    assert running.GRACE > 0.2  # or setting it does nothing
    setting = "commands.EXAMPLES, running.GRACE = sweep.Path(sys.argv.pop(1)), 0.2"
    code = f"import sweep, sys; from studies import commands, running; {setting}; sys.exit(sweep.main())"
    command = [
        sys.executable,
        "-c",
        code,
        tmp_path / "examples",
        tmp_path / "toy.toml",
        f"--out={tmp_path / 'out'}",
    ]
    processes = []

    def trainings():
        return (
            [int(pid) for pid in (toy / "waiting").read_text().split()]
            if (toy / "waiting").exists()
            else []
        )

    def start():
        # Without the last one, it would import torch to count the GPUs.
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "scripts"),
            "CUDA_VISIBLE_DEVICES": "",
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([*command, "--jobs", "2"], env=environment, **pipes)
        processes.append(process)
        deadline = time.monotonic() + 60
        while len(trainings()) < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        return process, trainings()

    yield start
    for process in processes:
        process.kill()
        process.communicate()
    for pid in trainings():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def wait_for_the_end(tmp_path):
    """Wait for the trainings and all their children, which hold the locks of the folders."""
    for path in (tmp_path / "out").glob("16_*/lock"):
        wait_until_unlocked(path, timeout=60)


@pytest.mark.parametrize(
    "number, flag", [(signal.SIGINT, "--wait"), (signal.SIGTERM, "--wait --stubborn")]
)
def test_interrupted_it_ends_its_runs_and_resumes_later(
    number, flag, start, calls, toy, run, tmp_path
):
    grid = GRID.replace("--heads 16", f"--heads 16 {flag}")
    (tmp_path / "toy.toml").write_text(grid)
    process, _ = start()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (
        128 + number,
        "sweep: interrupted; the same command resumes\n",
    )
    wait_for_the_end(tmp_path)
    assert (toy / "asked").exists() == (number == signal.SIGINT)  # the stubborn ones were killed
    calls()
    (toy / "quick").touch()
    assert "4 runs, 2 of them finished before" in run(grid=grid)[1]
    assert len(calls("train")) == 2


def test_what_has_not_begun_when_it_is_interrupted_leaves_no_folder(start, tmp_path):
    grid = GRID.replace("--heads 16", "--heads 16 --wait")
    later = 'B = { train = "MODEL=mixed --mixing position-wise"'
    (tmp_path / "toy.toml").write_text(grid.replace(later, f'more = "--more"\n{later}'))
    process, _ = start()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    wait_for_the_end(tmp_path)
    # two of 2 heads have ended, two of 16 were stopped, and no share was left for the third
    assert len(list((tmp_path / "out").iterdir())) == 5


def test_nothing_is_trained_beside_what_a_killed_sweep_left(start, calls, run, toy, tmp_path):
    process, trainings = start()
    process.kill()
    process.communicate()
    calls()
    grid = GRID.replace("--heads 16", "--heads 16 --wait")
    status, _, errors = run(grid=grid)
    assert (
        status == 1 and calls() == [] and errors.count("another sweep runs it; its folder: ") == 2
    )
    for pid in trainings:
        os.killpg(pid, signal.SIGKILL)
    wait_for_the_end(tmp_path)
    (toy / "quick").touch()
    assert run(grid=grid)[0] == 0


def test_a_training_does_not_resume_with_another_text(run, calls, toy, tmp_path):
    bad = GRID.replace("--heads 2", "--heads 2 --fail")
    run("--only", "2,B", grid=bad)
    calls()
    (tmp_path / "data" / "dict.txt").write_text("b 1\n")
    provenance.checksum_of.cache_clear()
    status, _, errors = run("--only", "2,B", grid=bad)
    assert status == 1 and "began with another text" in errors and calls() == []


def test_a_training_does_not_resume_with_other_flags_of_its_recipe(
    run, calls, tmp_path, monkeypatch
):
    bad = GRID.replace("--heads 2", "--heads 2 --fail")
    run("--only", "2,B", grid=bad)
    calls()
    monkeypatch.setenv("RECIPE", "2")
    status, _, errors = run("--only", "2,B", grid=bad)
    (folder,) = (path.parent for path in (tmp_path / "out").glob("*/run.json"))
    assert status == 1 and calls() == []
    assert (
        f"began with other flags (--recipe 1, now --recipe 2); folder: {folder}"
        in errors.splitlines()[-1]
    )


BEGAN = {"--lr": ["1"], "--fp16": [], "--distributed-world-size": ["8"], "--update-freq": ["2"]}
RESUMED = {
    "the same": ({}, []),
    "another default": ({"--lr": ["2"]}, ["--lr 1, now --lr 2"]),
    "a new flag": ({"--seed": ["3"]}, ["no --seed, now --seed 3"]),
    "more text an update": ({"--update-freq": ["4"]}, ["--update-freq 2, now --update-freq 4"]),
    "fewer GPUs": ({"--distributed-world-size": ["2"], "--update-freq": ["8"]}, []),
}


@pytest.mark.parametrize("case", RESUMED)
def test_flags_that_depend_on_the_number_of_gpus_may_differ_with_it(case):
    changes, found = RESUMED[case]
    assert running.other_flags(BEGAN, {**BEGAN, **changes}) == found


def test_paths_and_flags_that_an_older_version_did_not_record_may_differ():
    there = {"--codes": ["bpe", "/there/codes"], "--user-dir": ["/there/plugin"]}
    assert running.other_flags(there, {"--codes": ["bpe", "/here/codes"]}) == []
    assert running.other_flags({}, BEGAN) == []


def test_a_training_that_found_no_text_begins_with_the_one_that_came_later(run, calls, tmp_path):
    bad = GRID.replace("--heads 2", "--heads 2 --fail")
    text = tmp_path / "data" / "dict.txt"
    text.unlink()
    run("--only", "2,B", grid=bad)
    calls()

    text.write_text("a 1\n")
    _, _, errors = run("--only", "2,B", grid=bad)
    assert "another text" not in errors and len(calls("train")) == 1
    (record,) = records(tmp_path)
    assert record["data"] is not None
    assert record["data"] == provenance.checksum(str(tmp_path / "data"))


# ---- what is refused ---------------------------------------------------------------------------


WRONG = {
    "nothing": ("", "example: is missing"),
    "no TOML": ("[axes", "Expected ']' at the end of a table declaration (at end of document)"),
    "no axes": ('example = "toy"', "axes: is missing"),
    "an axis without labels": ('example = "toy"\n[axes.x]', "axes.x: must not be empty"),
    "an unknown field": (f"seed = 3\n{GRID}", "seed: no field has this name"),
    "a title": (GRID.replace('"A toy"', "3"), "title: must be a valid string, not 3"),
    "flags": (
        GRID.replace('"--heads 2"', "3"),
        "axes.heads.2: must be flags, or a table of train and evaluate, not 3",
    ),
    "quotes": (GRID.replace("--heads 2", "--heads '2"), "axes.heads.2.train: No closing quotation"),
    "a metric of no point": (
        GRID.replace('test = ""', 'test = { evaluate = "", only = "17" }'),
        "metrics.test.only: '17' is no label of the grid",
    ),
    "a metric": (
        GRID.replace('test = ""', "test = 3"),
        "metrics.test: must be flags, or a table of evaluate and only, not 3",
    ),
    "an unknown field of a metric": (
        GRID.replace('test = ""', 'test = { evaluate = "", label = "16" }'),
        "metrics.test.label: no field has this name",
    ),
    "a cell": (f'{GRID}[cells]\n"16,C" = ""\n', "cells.'16,C': is no point of the grid"),
    "a cell of two labels of one axis": (
        f'{GRID}[cells]\n"none,B" = ""\n',
        "cells.'none,B': is no point of the grid",
    ),
    "cells without what others start from": (
        f'{GRID}[starts]\n16 = "2"\n[cells]\n"16,B" = ""\n',
        "cells: must have '2,B', because '16,B' starts from its run",
    ),
    "a published cell": (
        f'{GRID}[published]\n"16/C" = "1"\n',
        "published.'16/C': is no point of the grid",
    ),
    "a start of another axis": (
        f'{GRID}[starts]\n16 = "B"\n',
        "starts.'16' = 'B': must be an earlier label of the same axis",
    ),
    "a start that comes later": (
        f'{GRID}[starts]\n2 = "16"\n',
        "starts.'2' = '16': must be an earlier label of the same axis",
    ),
    "seeds that are no number": (f"seeds = '8'\n{GRID}", "seeds: must be a valid integer, not '8'"),
    "a part of a seed": (f"seeds = 8.5\n{GRID}", "seeds: must be a valid integer, not 8.5"),
    "seeds that are true": (f"seeds = true\n{GRID}", "seeds: must be a valid integer, not True"),
    "fewer than no seeds": (
        f"seeds = -1\n{GRID}",
        "seeds: must be greater than or equal to 0, not -1",
    ),
}


@pytest.mark.parametrize("text, said", WRONG.values(), ids=WRONG)
def test_the_bad_field_of_a_grid_is_named_in_one_line(text, said, run, tmp_path):
    status, printed, errors = run(grid=text)
    assert (status, printed) == (2, "")
    program = Path(sys.argv[0]).stem
    assert errors == f"{program}: error: {tmp_path / 'toy.toml'}: {said}\n"
    assert not (tmp_path / "out").exists()


ONLY = {
    "an unknown label": (
        ["--only", "none", "--only", "Bb"],
        "--only Bb: 'Bb' must be among the grid's labels: 2, 16, none, B",
    ),
    "two labels of one axis": (
        ["--only", "none,B"],
        "--only none,B: no point of the grid has all these labels",
    ),
}


@pytest.mark.parametrize("words, said", ONLY.values(), ids=ONLY)
def test_every_only_must_choose_something(words, said, run):
    status, printed, errors = run(*words)
    assert (status, printed) == (2, "")
    assert errors == f"{Path(sys.argv[0]).stem}: error: {said}\n"


def test_jobs_are_refused_where_python_cannot_count_the_gpus(run, tmp_path, monkeypatch):
    """The command may run in a Python without torch."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"No module named 'torch'\" >&2; exit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    for name in ("GPUS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    status, _, errors = run("--jobs", "2")
    assert status == 2
    assert errors == (
        f"{Path(sys.argv[0]).stem}: error: --jobs 2: {python} cannot count the GPUs (No module "
        "named 'torch'); set GPUS=0 for none, or name them in CUDA_VISIBLE_DEVICES\n"
    )
    monkeypatch.setenv("GPUS", "0")
    assert run("--jobs", "2", "--only", "2,none")[0] == 0


def test_two_points_that_train_the_same_are_refused(run):
    status, _, errors = run(grid=GRID.replace("--heads 16", "--heads 2"))
    assert status == 2
    assert errors.endswith(
        "two points of the grid are the same run: 2, none, seed 1; 16, none, seed 1\n"
    )


# ---- the grids of the recipes ------------------------------------------------------------------

# they train without fairseq; test_synthetic.py checks their grids
SYNTHETIC = ("recall", "nearest_neighbour")
GRIDS = [
    path
    for path in sorted((EXAMPLES / "grids").rglob("*.toml"))
    if not path.name.startswith(SYNTHETIC)
]


@pytest.fixture(
    scope="module",
    params=GRIDS,
    ids=[str(path.relative_to(EXAMPLES / "grids")) for path in GRIDS],
)
def path(request):
    """Return the file of a grid.

    The scope lets the tests of a grid follow one another, so that a worker parses it once.
    """
    return request.param


def covering_runs(grid):
    """Return the first runs that have, together, every label and every cell."""
    seen = set()
    chosen = []
    for run in runs.runs(grid):
        has = {*run.row, *grid.cells_of(run.row)}
        if not has <= seen:
            chosen.append(run)
        seen |= has
    return chosen


@functools.cache
def command_of_recipe(script_file, variables):
    """Return the words of fairseq's command that a script prints."""
    lines = script(script_file, **dict(variables), DRY_RUN=1).stdout.splitlines()
    (line,) = (line for line in lines if line.startswith("fairseq-"))
    return tuple(shlex.split(line))


@functools.cache
def parsed(command):
    return str(sorted(vars(parse(list(command))).items()))


def words_of(run, name, words):
    """Return the variables of a script, and fairseq's command.

    The words of the grid stand after the script's own, as the scripts put them.
    """
    command, variables = commands.command_of(run, name, words, "out/run/save")
    key = tuple(sorted(variables.items()))
    return key, (*command_of_recipe(command[0], key), *command[1:])


def arguments_of(run, name, words):
    """Return the variables of a script, and what fairseq makes of its command."""
    variables, command = words_of(run, name, words)
    return variables, parsed(command)


def test_fairseq_takes_every_command_of_a_grid(path):
    for run in covering_runs(grids.read_grid(path)):
        arguments_of(run, "train", run.train)
        for words in run.evaluate.values():
            arguments_of(run, "evaluate", words)


def test_no_two_runs_of_a_grid_train_the_same(path):
    grid = grids.read_grid(path)
    all_runs = runs.runs(grid)
    flags = set()
    for run in all_runs:
        variables, command = words_of(run, "train", run.train)
        flags.add((variables, str(runs.canonical(command))))
    assert len(flags) == len(all_runs)

    # A flag may repeat fairseq's own default, which no script shows. To let fairseq parse every
    # command would take a minute. These runs have every label; in a grid of all points, two labels
    # of an axis stand beside the same labels of the other axes.
    chosen = covering_runs(grid)
    trained = {arguments_of(run, "train", run.train) for run in chosen}
    assert len(trained) == len(chosen)


def test_the_baseline_of_a_grid_is_one_of_its_labels(path):
    grid = grids.read_grid(path)
    assert grid.baseline == "" or grid.baseline in grid.labels


def test_the_papers_numbers_are_above_0(path):
    for cell in grids.read_grid(path).published.values():
        for number in cell.split("/"):
            assert float(number.partition("±")[0]) > 0


def test_table_5_has_both_validation_sets_of_mnli_and_table_6_both_numbers():
    grid = grids.read_grid(EXAMPLES / "grids" / "mixhead_table_5.toml")
    mismatched = {
        run.labels["task"]: dict(run.evaluate).get("mismatched") for run in runs.runs(grid)
    }
    assert mismatched.pop("MNLI") == ("VARIANT=MNLI", "--valid-subset", "valid1")
    assert set(mismatched.values()) == {None}
    grid = grids.read_grid(EXAMPLES / "grids" / "mixhead_table_6.toml")
    assert [dict(run.evaluate) for run in runs.runs(grid)] == [
        {"EM": ("METRIC=EM",), "F1": ("METRIC=F1",)}
    ] * 4
