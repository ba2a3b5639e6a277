"""Tables and pictures show the runs; the committed ones are those of the committed results."""

import dataclasses
import json
import math
import re
import shutil
import sys
from pathlib import Path

import pytest
import report
from recipes import ROOT
from scipy import stats
from studies import commands, comparisons, grids, pictures, tables
from studies.runs import runs
from studies.study import from_results, from_runs, save

RESULTS = sorted((ROOT / "results").glob("*.json"))
GRID = """
title = "Toy"
example = "wikitext2"
[metrics]
valid = "--gen-subset valid"
test = "--gen-subset test"
[axes.heads]
2 = "--decoder-attention-heads 2"
4 = "--decoder-attention-heads 4"
[axes.attention]
softmax = "--head-mixing none"
A = "--head-mixing position-independent"
new = "--head-mixing random"
[published]
"2/softmax" = "20.0/10.0"
"2/A" = "19.0/9.0"
"""
VALUES = {"softmax": [100.0, 110.0, 104.0], "A": [90.0, 101.0, 96.0], "new": [120.0, 110.0]}


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Return a study of two rows with three seeds and one with two; other rows have no run.

    Seed 4 is a pilot's.
    """
    for name in (*commands.TRAINING, "SAVE", "CHECKPOINT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "toy.toml").write_text(GRID)
    for run in runs(commands.grid_of(tmp_path / "toy.toml"), range(1, 5), ["2"]):
        pilot = run.seed == 4
        if not pilot and run.seed > len(VALUES[run.labels["attention"]]):
            continue
        metrics = (
            {"pilot": 1.0} if pilot else {"test": VALUES[run.labels["attention"]][run.seed - 1]}
        )
        pace = 15 if run.labels["attention"] == "A" else 10  # updates a second
        points = [
            dict(update=u, tokens=u * 100, cpu_seconds=u / pace, valid_loss=9 - u / 50)
            for u in (50, 100)
        ]
        record = {
            "labels": {"heads": "two", "attention": "x"},
            "seed": run.seed,
            "digest": run.digest,
            "metrics": metrics,
            "measure": "perplexity",
            "seconds": 60.0,
            "device": "a CPU",
            "commit": "abc",
            "data": "def",
            "versions": {"torch": "2"},
            "points": points,
        }
        run.folder(tmp_path / "runs").mkdir(parents=True)
        (run.folder(tmp_path / "runs") / "run.json").write_text(json.dumps(record))
    return from_runs(tmp_path / "toy.toml", tmp_path / "runs")


def row_of(study, *labels):
    table = tables.markdown(study)
    return next(
        line for line in table.splitlines() if line.startswith(f"| {' | '.join(labels)} |")
    ).split(" | ")[2:]


def test_a_row_has_mean_deviation_and_the_gain_with_its_interval(study):
    assert row_of(study, "2", "softmax")[:2] == ["20.0/10.0", "104.67 ± 5.03 (3)"]
    gains = [100 * (math.log(b) - math.log(a)) for a, b in zip(VALUES["A"], VALUES["softmax"])]
    low, high = stats.t.interval(0.95, 2, sum(gains) / 3, stats.sem(gains))
    assert row_of(study, "2", "A")[1:3] == [
        "95.67 ± 5.51 (3)",
        f"{sum(gains) / 3:+.2f} [{low:+.2f}, {high:+.2f}]",
    ]
    assert row_of(study, "2", "A")[3] == f"{stats.ttest_1samp(gains, 0).pvalue:.2g} |"
    assert row_of(study, "2", "new")[2:] == ["-9.12", " |"]  # two seeds have no interval
    assert study.rows == [("2", "softmax"), ("2", "A"), ("2", "new")]
    text = tables.markdown(study)
    assert "3 of 6 rows" in text and "valid" not in text and "- Seeds: 1 to 3.\n" in text


def test_the_papers_gain_is_of_the_same_metric(study):
    assert study.published_gain(("2", "A")) == pytest.approx(100 * math.log(10 / 9))
    assert (
        study.published_gain(("2", "softmax")) is None
        and study.published_gain(("2", "new")) is None
    )
    own = {"2/softmax": "10", "2/A": "9"}  # a metric that these points do not have
    metrics = {"test": grids.Metric(evaluate=()), "valid": grids.Metric(evaluate=(), only="16")}
    grid = study.grid.model_copy(update={"published": own, "metrics": metrics})
    gain = dataclasses.replace(study, grid=grid).published_gain(("2", "A"))
    assert gain == pytest.approx(100 * math.log(10 / 9))
    with_spread = {"2/softmax": "20/10±0.3", "2/A": "19/9±0.2"}
    grid = study.grid.model_copy(update={"published": with_spread})
    gain = dataclasses.replace(study, grid=grid).published_gain(("2", "A"))
    assert gain == pytest.approx(100 * math.log(10 / 9))
    grid = study.grid.model_copy(update={"published": {}})
    assert dataclasses.replace(study, grid=grid).published_gain(("2", "A")) is None


def test_any_two_rows_are_compared(study, capsys):
    assert "2,new: +9.12 %, test; 2 seeds, no interval;" in tables.comparison(
        study, ["2,softmax", "2,new"]
    )
    gain, p = row_of(study, "2", "A")[2:]
    compared, _, time = tables.comparison(study, ["2,A", "2,softmax"]).rpartition("; ")
    assert compared == f"2,A over 2,softmax: {gain} %, test; 3 seeds, p {p[:-2]}"
    assert time == "CPU time of the updates, ratio 0.67 [0.67, 0.67]"
    with pytest.raises(SystemExit):
        tables.comparison(study, ["2,A", "4,A"])
    assert (
        "--compare 4,A: has no run; must be among 2,softmax; 2,A; 2,new" in capsys.readouterr().err
    )


def test_a_row_is_not_compared_with_itself(study, capsys):
    with pytest.raises(SystemExit):
        tables.comparison(study, ["2,A", "2,A"])
    said = capsys.readouterr().err
    assert said.endswith("error: --compare 2,A 2,A: must be two different rows\n")


@pytest.fixture
def unfinished(study):
    """Return a study that plans three seeds, of which one point has two."""
    axes = {"heads": {"2": grids.Point()}, "attention": study.grid.axes["attention"]}
    return dataclasses.replace(study, grid=study.grid.model_copy(update={"axes": axes, "seeds": 3}))


def test_no_result_is_shown_before_every_point_has_the_planned_seeds(unfinished):
    text = tables.markdown(unfinished)
    assert text.endswith("\nNot ended: 2 of 3 seeds have every point.\n")
    assert "| 2 | A | 19.0/9.0 | 3 runs |" in text
    assert "| 2 | new |  | 2 runs |" in text
    assert "95.67" not in text

    ended = dataclasses.replace(unfinished, grid=unfinished.grid.model_copy(update={"seeds": 2}))
    assert "95.67" in tables.markdown(ended)


def test_no_two_rows_are_compared_before(unfinished, capsys):
    with pytest.raises(SystemExit):
        tables.comparison(unfinished, ["2,A", "2,softmax"])
    assert "shows no result before 3 seeds have every point" in capsys.readouterr().err


def test_no_picture_is_drawn_before(unfinished, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "from_results", lambda path: unfinished)
    (tmp_path / "toy.json").write_text("")
    command(monkeypatch, "--results", tmp_path)
    assert "Not ended" in (tmp_path / "tables.md").read_text()
    assert "![" not in (tmp_path / "tables.md").read_text()
    assert not list(tmp_path.glob("*.svg"))


def test_runs_that_start_from_others_are_drawn_by_their_ends(study, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(pictures.plt, "close", figures.append)
    pictures.draw(
        dataclasses.replace(study, grid=study.grid.model_copy(update={"starts": {"4": "2"}})),
        tmp_path / "x.svg",
    )
    for panel, (end, end_of_a) in zip(figures[0].axes, ((10000, 10000), (10.0, 100 / 15))):
        expected = {(end,) * n for n in (1, 2, 3)} | {(end_of_a,) * n for n in (1, 3)}
        assert {tuple(line.get_xdata()) for line in panel.lines} == expected


@pytest.mark.parametrize(
    "measure, better",
    [("BLEU", 1), ("loss", -1), ("bits per byte", -1), ("nats a token", -1), ("F1", 1)],
)
def test_above_0_is_better(measure, better, study):
    for run in study.runs:
        run["measure"] = measure
    assert study.difference(3.0, 2.0, "test") == better


def test_every_perplexity_is_compared_by_its_logarithm(study):
    """LM1B's is 'perplexity per word'."""
    by_token = row_of(study, "2", "A")
    losses = comparisons.losses(study, ("2", "A"), "test")
    for run in study.runs:
        run["measure"] = "perplexity per word"
    assert row_of(study, "2", "A") == by_token
    assert comparisons.losses(study, ("2", "A"), "test") == losses
    assert study.unit("test") == "%"


def test_the_validation_loss_stands_beside_bleu(study):
    assert "validation loss" not in tables.markdown(study)  # perplexity is a likelihood itself
    for run, loss in zip(study.runs, (9.0, 8.5, 8.0, 8.9, 8.2, 7.8)):
        run["measure"], run["valid_loss"] = "BLEU", loss
    text = tables.markdown(study)
    assert (
        "| validation loss, bits | gain in test, BLEU | p | gain in validation loss, bits | p |"
        in text
    )
    assert row_of(study, "2", "A")[2] == "8.300 ± 0.557 (3)" and row_of(study, "2", "A")[
        5
    ].startswith("+0.200 [")


def test_a_seed_that_diverged_is_not_left_out_of_the_mean(study):
    for run, loss in zip(study.runs, (9.0, math.nan, 8.0, 8.9, 8.2, 7.8)):
        run["measure"], run["valid_loss"] = "BLEU", loss
    assert row_of(study, "2", "softmax")[2] == "nan (3)"
    assert row_of(study, "2", "A")[2] == "8.300 ± 0.557 (3)"
    assert row_of(study, "2", "A")[5:] == ["nan |"]


def test_axes_may_share_labels(study):
    """The rows of 4 heads and 4 layers, and of 8 and 8, stand apart."""
    labels = {"4": grids.Point(), "8": grids.Point()}
    grid = study.grid.model_copy(update={"axes": {"heads": labels, "layers": labels}})
    of_grid = dataclasses.replace(study, grid=grid)
    rows = [("4", "4"), ("4", "8"), ("8", "4"), ("8", "8")]
    assert [of_grid.group(row) for row in rows] == ["4", "4", "8", "8"]
    assert of_grid.groups == "heads"
    places = pictures.places_of(of_grid, rows)
    assert len(set(places.values())) == 4


def test_ends_without_cpu_seconds_have_no_panel_of_them(study, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(pictures.plt, "close", figures.append)
    for run in study.runs:
        for point in run["points"]:
            del point["cpu_seconds"]
    grid = study.grid.model_copy(update={"starts": {"4": "2"}})
    pictures.draw(dataclasses.replace(study, grid=grid), tmp_path / "x.svg")
    labels = [panel.get_xlabel() for panel in figures[0].axes]
    assert [label for label in labels if "updates" in label] == [
        "tokens of all updates, logarithmic"
    ]


def test_a_picture_has_no_empty_panel(study, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(pictures.plt, "close", figures.append)
    pictures.draw(study, tmp_path / "toy.svg")
    (figure,) = figures
    assert [panel.get_xlabel() for panel in figure.axes][2:] == ["tokens", "CPU seconds"]
    assert all(panel.has_data() for panel in figure.axes)
    assert (tmp_path / "toy.svg").stat().st_size > 1000


def command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, words)])
    report.main()


def test_a_saved_file_keeps_its_times_and_runs(study, tmp_path, monkeypatch):
    cost = {"rows": [{"labels": {"heads": "2", "attention": "A"}, "time_ratios": [1.3, 1.4, 1.5]}]}
    measured = [{**run, "metrics": {"test": 1.0}} for run in study.runs[:-1]]
    measured.append({**study.runs[-1], "digest": "lost", "seed": 9})
    save(dataclasses.replace(study, runs=measured, cost=cost), tmp_path / "saved.json")
    monkeypatch.setattr(report, "draw", lambda *_: None)
    command(
        monkeypatch,
        tmp_path / "toy.toml",
        f"--runs={tmp_path / 'runs'}",
        "--save",
        tmp_path / "saved.json",
    )
    saved = from_results(tmp_path / "saved.json")
    assert row_of(saved, "2", "A")[1] == "95.67 ± 5.51 (3)" and len(saved.runs) == 9
    assert row_of(saved, "2", "A")[4:] == ["1.40 [1.30, 1.50] |"]


def test_a_saved_file_stays_whole_where_the_next_one_cannot_be_written(
    study, tmp_path, monkeypatch
):
    """It may be the only copy of runs whose folders are gone."""
    path = tmp_path / "saved.json"
    save(study, path)
    before = path.read_text()

    def write_half(file, text, **rest):
        with file.open("w") as opened:
            opened.write(text[: len(text) // 2])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(OSError, match="No space left"):
        save(dataclasses.replace(study, runs=study.runs[:3]), path)
    assert path.read_text() == before


def test_a_metric_that_was_evaluated_with_other_flags_is_left_out(study, tmp_path, capsys):
    """A change of the training's flags makes another run; one of these flags does not."""
    grid = tmp_path / "toy.toml"
    (path, *_) = sorted((tmp_path / "runs").glob("2_softmax_seed_1-*/run.json"))
    record = json.loads(path.read_text())
    record["metrics"] = {"test": 100.0, "valid": 120.0}
    record["evaluate"] = {
        "test": {"--gen-subset": ["test"]},
        "valid": {"--gen-subset": ["valid"], "--beam": ["4"]},
    }
    path.write_text(json.dumps(record))
    again = from_runs(grid, tmp_path / "runs")
    assert again.values(("2", "softmax"), "test") == study.values(("2", "softmax"), "test")
    assert again.metrics == ["test"]
    assert capsys.readouterr().err == (
        "2, softmax, seed 1: valid is left out, because it was evaluated with other flags than the "
        "grid has now; scripts/sweep.py evaluates it again\n"
    )

    grid.write_text(GRID.replace("--gen-subset test", "--gen-subset test --beam 4"))
    again = from_runs(grid, tmp_path / "runs")
    assert list(again.values(("2", "softmax"), "test")) == [2, 3]  # older records do not tell


def damaged(**change):
    """Return the text of a file of one run with a value of its record changed."""
    run = {
        "labels": {"heads": "2", "attention": "softmax"},
        "seed": 1,
        "digest": "a",
        "metrics": {"test": 2.0},
        "measure": "perplexity",
    }
    run |= {"seconds": 1.0, "device": "a", "versions": {"torch": "2"}, "points": [{"update": 1}]}
    run |= change
    return json.dumps({"grid": "examples/grids/mixhead_table_8.toml", "runs": [run]})


def damaged_file(**change):
    """Return the text of a file of one run with a value of the file changed."""
    return json.dumps({**json.loads(damaged()), **change})


HUGE = int("9" * 400)  # JSON has numbers of any size
OTHER_GRID = "grid: must be a .toml of this checkout, or below the file's folder, not"
DAMAGED = {
    "nothing": ("", "Expecting value: line 1 column 1 (char 0)"),
    "a list": ("[1]", "must be a valid dictionary, not [1]"),
    "nested": ("[" * 100_000, "is nested too deeply"),
    "no grid": ("{}", "grid: is missing"),
    "a grid of numbers": (damaged_file(grid=3), "grid: must be a valid string, not 3"),
    "a grid of somewhere": (damaged_file(grid="/etc/x.toml"), f"{OTHER_GRID} '/etc/x.toml'"),
    "a grid above": (damaged_file(grid="../x.toml"), f"{OTHER_GRID} '../x.toml'"),
    "another kind of file": (damaged_file(grid="README.md"), f"{OTHER_GRID} 'README.md'"),
    "no runs": (damaged_file(runs=[]), "runs: must not be empty"),
    "runs by name": (damaged_file(runs={}), "runs: must be a valid list, not {}"),
    "cost": (damaged_file(cost=[]), "cost: must be a valid dictionary, not []"),
    "a row of cost": (damaged_file(cost={"rows": [{}]}), "cost.rows.0.labels: is missing"),
    "labels": (damaged(labels=[]), "runs.0.labels: must be a valid dictionary, not []"),
    "seed": (damaged(seed="1"), "runs.0.seed: must be a valid integer, not '1'"),
    "a huge seed": (
        damaged(seed=HUGE),
        f"runs.0.seed: must be less than {2**63}, not {'9' * 60}...",
    ),
    "seconds": (damaged(seconds=None), "runs.0.seconds: must be a valid number, not None"),
    "huge seconds": (
        damaged(seconds=HUGE),
        f"runs.0.seconds: must be a valid number, not {'9' * 60}...",
    ),
    "a metric in words": (
        damaged(metrics={"test": "2"}),
        "runs.0.metrics.test: must be a valid number, not '2'",
    ),
    "a metric that is NaN": (
        damaged(metrics={"test": float("nan")}),
        "runs.0.metrics.test: must be a finite number, not nan",
    ),
    "a metric without a logarithm": (
        damaged(metrics={"test": 0}),
        "runs.0: the perplexity 'test' must be above 0, not 0",
    ),
    "a metric that nothing names": (
        damaged(measure="", measures={"valid": "perplexity"}),
        "runs.0: the metric 'test' must be among its measures",
    ),
    "a point": (damaged(points=[{}]), "runs.0.points.0: must have an update"),
    "versions": (damaged(versions=3), "runs.0.versions: must be a valid dictionary, not 3"),
    "device": (damaged(device=["a"]), "runs.0.device: must be a valid string, not ['a']"),
    "measures": (
        damaged(measures={"test": 3}),
        "runs.0.measures.test: must be a valid string, not 3",
    ),
}


@pytest.mark.parametrize("text, said", DAMAGED.values(), ids=DAMAGED)
def test_the_bad_field_of_a_file_is_named_in_one_line(text, said, tmp_path, monkeypatch, capsys):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(SystemExit):
        command(monkeypatch, "--results", tmp_path)
    printed = capsys.readouterr().err
    assert printed == f"report: error: {path}: is no file of report.py --save: {said}\n"
    assert not (tmp_path / "tables.md").exists()


def test_a_file_with_the_metrics_of_another_grid_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "x.json").write_text(damaged(metrics={"of another grid": 1.0}))
    with pytest.raises(SystemExit):
        command(monkeypatch, "--results", tmp_path)
    assert "x.json: its runs have none of the metrics of " in capsys.readouterr().err


def two_runs(*changes):
    """Return the text of a file of two runs, each with values of its record changed."""
    (run,) = json.loads(damaged())["runs"]
    return damaged_file(runs=[{**run, **change} for change in changes])


STRANGE = {
    "an older label": (
        two_runs({}, {"labels": {"heads": "2", "attention": "plain"}}),
        "2, plain, seed 1: is no point of examples/grids/mixhead_table_8.toml",
    ),
    "no label of the grid": (
        damaged(labels={"width": "128"}),
        "128, seed 1: is no point of examples/grids/mixhead_table_8.toml",
    ),
    "a seed that stands twice": (
        two_runs({}, {"digest": "b"}),
        "2, softmax, seed 1: has two runs, of other flags or another text; must have one",
    ),
}


@pytest.mark.parametrize("text, said", STRANGE.values(), ids=STRANGE)
def test_a_run_that_no_table_would_show_is_refused(text, said, tmp_path, monkeypatch, capsys):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(SystemExit):
        command(monkeypatch, path)
    assert capsys.readouterr().err == f"report: error: {path}: {said}\n"


@pytest.mark.parametrize(
    "change, said",
    [
        ({"digest": "older"}, "{file}: 2, new, seed 2: has two runs, of other flags or another"),
        ({"source": "{folder}/other.toml"}, "--save {file}: has runs of {folder}/other.toml; must"),
    ],
    ids=["older flags", "another grid"],
)
def test_runs_are_not_saved_among_others(change, said, study, tmp_path, monkeypatch, capsys):
    (tmp_path / "other.toml").write_text(GRID)
    file = tmp_path / "saved.json"
    source = change.get("source", study.source).format(folder=tmp_path)
    last = {**study.runs[-1], "digest": change.get("digest", study.runs[-1]["digest"])}
    save(dataclasses.replace(study, runs=[*study.runs[:-1], last], source=source), file)
    before = file.read_text()
    with pytest.raises(SystemExit):
        command(monkeypatch, tmp_path / "toy.toml", f"--runs={tmp_path / 'runs'}", "--save", file)
    assert said.format(file=file, folder=tmp_path) in capsys.readouterr().err
    assert file.read_text() == before


def test_labels_that_the_grid_has_renamed_are_saved_anew(study, tmp_path, monkeypatch):
    file = tmp_path / "saved.json"
    older = [{**run, "labels": {"heads": "two", "attention": "x"}} for run in study.runs]
    save(dataclasses.replace(study, runs=older), file)
    monkeypatch.setattr(report, "draw", lambda *_: None)
    command(monkeypatch, tmp_path / "toy.toml", f"--runs={tmp_path / 'runs'}", "--save", file)
    assert from_results(file).rows == study.rows


@pytest.mark.parametrize("words", [["--save", "x.json"], ["--compare", "A", "B"]], ids=" ".join)
def test_a_flag_about_one_study_needs_a_study(words, tmp_path, monkeypatch, capsys):
    (tmp_path / "saved.json").write_text(damaged())
    with pytest.raises(SystemExit):
        command(monkeypatch, "--results", tmp_path, *words)
    flag = " ".join(words)
    expected = f"report: error: {flag}: needs a grid, or a file of saved runs\n"
    assert capsys.readouterr().err == expected
    assert not (tmp_path / "tables.md").exists()


@pytest.mark.parametrize(
    "change",
    [{}, {"data": None}, {"points": [{"update": 1, "valid_loss": float("nan")}]}, {"later": {}}],
    ids=["as it is", "a task that draws its data", "diverged", "a field of a later version"],
)
def test_a_run_may_lack_its_text_diverge_and_have_more_fields(change, tmp_path):
    (tmp_path / "x.json").write_text(damaged(**change))
    assert len(from_results(tmp_path / "x.json").runs) == 1


@pytest.mark.parametrize(
    "name, said",
    [
        ("no folder/x.json", "{folder}/no folder is no folder"),
        ("runs", "is a folder, must be a file"),
    ],
    ids=["no folder", "a folder"],
)
def test_a_file_that_cannot_be_saved_is_refused_before_the_table(
    name, said, study, tmp_path, monkeypatch, capsys
):
    file = tmp_path / name
    with pytest.raises(SystemExit):
        command(monkeypatch, tmp_path / "toy.toml", "--runs", tmp_path / "runs", "--save", file)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"report: error: --save {file}: {said.format(folder=tmp_path)}\n"


def test_a_damaged_run_is_refused_in_one_line(study, tmp_path, monkeypatch, capsys):
    path = next((tmp_path / "runs").glob("*/run.json"))
    for text in ("{", json.dumps({**json.loads(path.read_text()), "versions": "2"})):
        path.write_text(text)
        with pytest.raises(SystemExit):
            command(monkeypatch, tmp_path / "toy.toml", "--runs", tmp_path / "runs")
        assert re.fullmatch(rf"report: error: {path}: .*\n", capsys.readouterr().err)


def test_what_a_run_says_of_itself_is_plain_text(study):
    study.runs[0]["device"] = "<script>alert(1)</script> [a](javascript:b) | `"
    text = tables.markdown(study)
    assert (
        "<script>" not in text and "&lt;script&gt;" in text and r"\[a\](javascript:b) \| \`" in text
    )


def test_the_committed_tables_are_those_of_the_committed_runs(tmp_path, monkeypatch):
    for path in [*RESULTS, ROOT / "results" / "comparisons.csv"]:
        (tmp_path / path.name).write_text(path.read_text())
    # one table is of the pilots of words
    shutil.copytree(ROOT / "results" / "pilots", tmp_path / "pilots")
    monkeypatch.setattr(report, "draw", lambda *_: None)
    monkeypatch.setattr(report.effect_figures, "draw", lambda *_: None)
    command(monkeypatch, "--results", tmp_path)
    assert (tmp_path / "tables.md").read_text() == (ROOT / "results" / "tables.md").read_text(), (
        "run scripts/report.py"
    )


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_ended_experiment_has_its_picture(path):
    assert from_results(path).waits or path.with_suffix(".svg").exists()
