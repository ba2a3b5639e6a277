"""The tables of the results are those of the runs, computed here once more from the JSON alone."""

import dataclasses
import json
import math
import re
import statistics

import effect_figures
import effects
import pytest
from recipes import ROOT
from scipy import stats

COMPARISONS = effects.read_comparisons(effects.RESULTS / "comparisons.csv")
FOUND = effects.effects()


def of(task, heads, updates):
    """Return the one effect of a task, a number of heads and a number of updates."""
    (found,) = [each for each in FOUND if (each.of.task, each.of.heads, each.of.updates) == (task, heads, updates)]
    return found


def values(file, metric, *labels):
    """Return a metric by seed, straight from the file."""
    runs = json.loads((ROOT / "results" / f"{file}.json").read_text())["runs"]
    return {run["seed"]: run["metrics"][metric] for run in runs if [*run["labels"].values()] == [*labels]}


# ---- each unit, by hand ----------------------------------------------------------------------------------------------


def test_translation_is_a_difference_of_nats():
    ours, theirs = (
        values("translation", "test", "4", "B", "1600"),
        values("translation", "test", "4", "softmax", "1600"),
    )
    test = stats.ttest_rel([theirs[seed] for seed in range(21, 29)], [ours[seed] for seed in range(21, 29)])
    found = of("translation", "4 of 32", 1600)
    interval = test.confidence_interval()
    assert (found.gain.low, found.gain.high) == pytest.approx((interval.low, interval.high))
    assert found.gain.p == pytest.approx(test.pvalue)
    assert found.percent.mean == pytest.approx(100 * found.gain.mean / statistics.fmean(theirs.values()))


def test_the_validation_loss_of_fairseq_is_in_bits():
    runs = json.loads((ROOT / "results" / "table4_fresh.json").read_text())["runs"]
    means = {
        name: statistics.fmean(run["valid_loss"] for run in runs if run["labels"]["attention"] == name)
        for name in ("softmax", "B")
    }
    found = of("translation, self-attention mixed", "4 of 32", 800)
    assert found.gain.mean == pytest.approx((means["softmax"] - means["B"]) * math.log(2))


def test_a_perplexity_counts_by_its_logarithm():
    ours, theirs = values("words", "test", "16", "B"), values("words", "test", "16", "softmax")
    gains = [math.log(theirs[seed]) - math.log(ours[seed]) for seed in ours]
    assert of("words, tuned rate", "16 of 8", 1000).gain.mean == pytest.approx(statistics.fmean(gains))


def test_recall_is_a_ratio():
    ours, theirs = values("recall", "test", "128", "4", "B"), values("recall", "test", "128", "4", "softmax")
    ratio = math.exp(statistics.fmean(math.log(theirs[seed] / ours[seed]) for seed in ours))
    found = of("recall, 128 tokens", "16 of 4", 300)
    assert math.exp(found.gain.mean) == pytest.approx(ratio)
    assert found.percent.mean == pytest.approx(100 * (1 - 1 / ratio))


# ---- the list --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("each", COMPARISONS, ids=lambda each: f"{each.task}, {each.heads}, {each.updates}")
def test_the_best_softmax_is_the_best_of_those_with_the_same_task_and_length(each):
    study = effects.study_of(each.study, effects.RESULTS)

    def mean(row):
        return statistics.fmean(effects.losses(study, row, each.loss).values())

    heads = {"heads", "head-size"}
    others = [
        row
        for row in study.rows
        if all(
            # the bytes have their head size in the name of the attention
            label in ("softmax", "softmax 6x16", "softmax 3x32") if axis == "attention" else label == own
            for axis, label, own in zip(study.grid.axes, row, each.softmax)
            if axis not in heads
        )
    ]
    assert each.softmax in others
    assert mean(each.best) == min(map(mean, others))


def test_no_comparison_stands_twice():
    assert len({(each.study, each.mixed) for each in COMPARISONS}) == len(COMPARISONS)


LIST = (effects.RESULTS / "comparisons.csv").read_text()


@pytest.mark.parametrize(
    "text, said",
    [
        (
            LIST.replace("corpus", "text", 1),
            "its first line must be task,corpus,updates,heads,study,mixed,softmax,best,",
        ),
        (LIST.replace("1600", "many", 1), "line 2: invalid literal for int() with base 10: 'many'"),
        (LIST.replace("4/B/1600", "4/C/1600"), "comparisons.csv: translation.json has no run of 4/C/1600"),
    ],
    ids=["columns", "updates", "row"],
)
def test_a_wrong_list_is_refused_in_one_line(text, said, tmp_path, capsys):
    (tmp_path / "comparisons.csv").write_text(text)
    for path in effects.RESULTS.glob("*.json"):
        (tmp_path / path.name).symlink_to(path)
    with pytest.raises(SystemExit):
        effects.effects(tmp_path)
    assert said in capsys.readouterr().err


def test_an_experiment_that_has_not_ended_is_left_out(monkeypatch):
    ended = effects.study_of

    def waiting(name, folder):
        study = ended(name, folder)
        return dataclasses.replace(study, grid=dataclasses.replace(study.grid, seeds=99)) if name == "words" else study

    monkeypatch.setattr(effects, "study_of", waiting)
    left = {each.of.task for each in effects.effects()}
    assert "words, tuned rate" not in left and "words, rate 0.003" in left


# ---- what is printed -------------------------------------------------------------------------------------------------


def test_holms_p_is_over_all_lines():
    lines = effects.effects_table().splitlines()[2:]
    smallest = min(each.gain.p for each in FOUND)
    assert len(lines) == len(FOUND)
    assert f"| {len(FOUND) * smallest:.2g} |" in next(line for line in lines if "| 4 of 16 |" in line)


@pytest.mark.parametrize("value, text", [(-0.0004, "0.00"), (-0.006, "-0.01"), (1.239, "1.24")])
def test_a_rounded_0_has_no_sign(value, text):
    assert effects.signed(value, 2) == text


def test_the_share_of_recall_that_was_learned():
    (line,) = [line for line in effects.recall_table().splitlines() if "| 128 tokens | 8 of 8 |" in line]
    learned = sum(value < 0.1 for value in values("recall", "test", "128", "8", "softmax").values())
    assert f"| {learned} of 6; " in line and 0 < learned < 6


def test_the_summary_is_over_all_rows_of_text():
    rows = effects.of_text(FOUND)
    assert set(rows) == {"Multi30k", "WikiText-2", "WikiText-2 as bytes"}
    count = sum(bool(each.corpus) for each in COMPARISONS)
    assert effects.summary_table().count(f"| {count} rows of text, ") == 2


def test_the_gain_along_the_training_is_against_softmax_with_the_same_heads():
    study = effects.study_of("translation", effects.RESULTS)
    runs = [run for run in study.runs if run["seed"] == 21 and run["labels"]["heads"] == "32"]
    at_end = {run["labels"]["attention"]: run["points"][-1]["valid_loss"] for run in runs}
    gain = effects.along(study, ("32", "B", "1600"))[1600][21]
    assert gain == pytest.approx((at_end["softmax"] - at_end["B"]) * math.log(2))


def test_the_worth_in_updates_is_a_straight_line():
    losses = {
        arm: statistics.fmean(values("translation", "test", "4", arm, "1600").values())
        for arm in ("softmax", "B", "softmax in the time of B")
    }
    share = (losses["softmax"] - losses["B"]) / (losses["softmax"] - losses["softmax in the time of B"])
    assert effects.worth_in_updates().mean == pytest.approx(share * 75 / 16, rel=1e-6)
    assert re.search(r"is worth \d+ \(\d+ to \d+\) % more updates", effects.sections())


# ---- the pictures ----------------------------------------------------------------------------------------------------


def points_of(figure):
    """Return (x, y) of all points that have an error bar, by panel."""
    return [[point for bars in axes.containers for point in zip(*bars.lines[0].get_data())] for axes in figure.axes]


def test_every_comparison_is_drawn_once_beside_its_head_size():
    drawn = points_of(effect_figures.draw_by_head_size(effects.RESULTS))
    for of_text, points in zip((True, False), drawn):
        chosen = [each for each in FOUND if bool(each.of.corpus) == of_text]
        assert sorted(y for _, y in points) == pytest.approx(sorted(each.percent.mean for each in chosen))
        for x, y in points:
            (size,) = {each.of.head_size for each in chosen if each.percent.mean == y}
            assert size / 1.4 < x < size * 1.4


def test_the_curves_end_at_the_numbers_of_the_table():
    table = effects.along_table()
    figure = effect_figures.draw_along(effects.RESULTS)
    (axes,) = figure.axes
    assert len(axes.containers) == len(effect_figures.CURVES)
    for name, bars in zip(effect_figures.CURVES, axes.containers):
        (line,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
        assert f"| {bars.lines[0].get_ydata()[-1]:.3f} (" in line
