"""Grids of runs: trained, evaluated, resumed, collected; with scripts that stand in for fairseq."""

import csv
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
from recipes import EXAMPLES, dry_run, parse
from sweep import Point, canonical

pytestmark = pytest.mark.usefixtures("plain_environment")
GRIDS = sorted(path for kind in ("toml", "json") for path in (EXAMPLES / "grids").glob(f"*.{kind}"))
PAPER_TABLES = sorted((EXAMPLES / "grids").glob("mixhead_table_*.toml"))

# A recipe whose metric is made of its flags; it says what it did.
TRAIN = """#!/usr/bin/env bash
mkdir -p "$SAVE"
echo "train ${MODEL:-} $*" >> "$(dirname "$0")/calls"
echo "${OMP_NUM_THREADS:-} ${CUDA_VISIBLE_DEVICES:-}" >> "$(dirname "$0")/places"
echo "$*" > "$SAVE/flags"
[[ $* != *--fail* ]] || { echo "train: error: as it was told" >&2; exit 3; }
[[ $* != *--wait* ]] || { echo $$ >> "$(dirname "$0")/waiting"; sleep 60; }
"""
EVALUATE = """#!/usr/bin/env bash
echo "evaluate ${MODEL:-} $*" >> "$(dirname "$0")/calls"
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
    monkeypatch.setattr(sweep, "visible_gpus", lambda: ["0", "1", "2", "5"])
    assert [place["CUDA_VISIBLE_DEVICES"] for place in sweep.places(3)] == ["0,5", "1", "2"]
    assert [place["CUDA_VISIBLE_DEVICES"] for place in sweep.places(5)] == ["0", "1", "2", "5", "0"]
    assert "CUDA_VISIBLE_DEVICES" not in next(sweep.places(1))  # the scripts find them


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_its_runs_and_goes_on_later(number, examples, grid, calls, tmp_path):
    grid.write_text(GRID.replace("--heads 16", "--heads 16 --wait"))
    (examples / "sweep.py").write_text((EXAMPLES / "sweep.py").read_text())
    command = [sys.executable, str(examples / "sweep.py"), str(grid), "--out", str(tmp_path / "out"), "--jobs", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    waiting = examples / "toy" / "waiting"
    deadline = time.monotonic() + 60
    while not (waiting.exists() and waiting.read_text().count("\n") == 2):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "sweep: interrupted; the same command goes on from here\n"
    for pid in waiting.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)

    calls()
    (examples / "toy" / "train.sh").write_text(TRAIN.replace("sleep 60", "true"))
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "4 runs, 2 of them done before" in printed
    assert len([call for call in calls() if call.startswith("train")]) == 2


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
    ],
)
def test_a_grid_that_makes_no_sense_is_refused_in_one_line(text, message, examples, tmp_path, monkeypatch, capsys):
    (tmp_path / "grid.toml").write_text(text)
    status, _, errors = run(monkeypatch, capsys, tmp_path / "grid.toml", out=tmp_path / "out")
    assert status == 2 and errors.startswith("sweep: error: ") and message in errors and errors.count("\n") == 1


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


@pytest.mark.parametrize("path", GRIDS, ids=[path.stem for path in GRIDS])
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
    assert set(grid.published) <= {"/".join(run.labels.values()) for run in sweep.runs(grid)}


def test_the_published_numbers_are_the_papers():
    for path in PAPER_TABLES:
        grid = sweep.read_grid(path)
        assert len(grid.published) == len(sweep.runs(grid)), path
    published = {path.stem.removeprefix("mixhead_table_"): sweep.read_grid(path).published for path in PAPER_TABLES}
    assert published["8"]["10/B"] == "21.65/20.67" and published["9"]["32/softmax"] == "37.05/27.36"
    assert published["10"]["512/A"] == "20.37/19.46" and published["7"]["average"] == "22.50/21.57"
    assert published["1"]["baevski/B"] == "20.37/19.47" and published["4"]["64/A"] == "31.74/31.32"
    assert published["2"]["B + sigsoftmax"] == "90.97/81.77" and published["3"]["B"] == "34.21/34.38"
