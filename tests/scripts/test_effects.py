"""The tables of the results are those of the runs, computed here once more from the JSON alone."""

import dataclasses
import functools
import json
import math
import re
import statistics

import pytest
from recipes import ROOT
from scipy import stats
from studies import (
    comparison_tables,
    comparisons,
    effect_figures,
    effect_tables,
    effects,
    markdown,
    translation_tables,
    units_tables,
    words_tables,
)

COMPARISONS = comparisons.read_comparisons(comparisons.RESULTS / "comparisons.csv")


@functools.cache
def all_effects():
    """Return the effects, which take a second: not when the tests are collected."""
    return effects.effects()


def effect_of(task, heads, updates):
    """Return the one effect of a task, its heads and its number of updates."""
    (effect,) = [
        each
        for each in all_effects()
        if each.comparison.task == task
        and each.comparison.heads == heads
        and each.comparison.updates == updates
    ]
    return effect


def runs_of(file, *labels):
    """Return the runs of one row, straight from the file."""
    runs = json.loads((ROOT / "results" / f"{file}.json").read_text())["runs"]
    return [run for run in runs if tuple(run["labels"].values()) == labels]


def by_seed(file, *labels):
    return {run["seed"]: run["metrics"]["test"] for run in runs_of(file, *labels)}


# ---- each unit, by hand --------------------------------------------------------------------------


def test_translation_is_a_difference_of_nats():
    ours = by_seed("translation", "4", "B", "1600")
    theirs = by_seed("translation", "4", "softmax", "1600")
    seeds = range(21, 29)
    test = stats.ttest_rel([theirs[seed] for seed in seeds], [ours[seed] for seed in seeds])
    interval = test.confidence_interval()

    found = effect_of("translation", "4 of 32", 1600)
    assert (found.gain.low, found.gain.high) == pytest.approx((interval.low, interval.high))
    assert found.gain.p == pytest.approx(test.pvalue)
    percent = 100 * found.gain.mean / statistics.fmean(theirs.values())
    assert found.percent.mean == pytest.approx(percent)


def test_the_validation_loss_of_fairseq_is_in_bits():
    ours = [run["valid_loss"] for run in runs_of("table4_fresh", "4", "B")]
    theirs = [run["valid_loss"] for run in runs_of("table4_fresh", "4", "softmax")]
    bits = statistics.fmean(theirs) - statistics.fmean(ours)
    found = effect_of("translation, self-attention mixed", "4 of 32", 800)
    assert found.gain.mean == pytest.approx(bits * math.log(2))


def test_a_perplexity_counts_by_its_logarithm():
    ours = by_seed("words", "16", "B")
    theirs = by_seed("words", "16", "softmax")
    gain = statistics.fmean(math.log(theirs[seed]) - math.log(ours[seed]) for seed in ours)
    assert effect_of("words, tuned rate", "16 of 8", 1000).gain.mean == pytest.approx(gain)


def test_recall_is_a_ratio():
    ours = by_seed("recall", "128", "4", "B")
    theirs = by_seed("recall", "128", "4", "softmax")
    ratio = math.exp(statistics.fmean(math.log(theirs[seed] / ours[seed]) for seed in ours))
    found = effect_of("recall, 128 tokens", "16 of 4", 300)
    assert math.exp(found.gain.mean) == pytest.approx(ratio)
    assert found.percent.mean == pytest.approx(100 * (1 - 1 / ratio))


# ---- the list ------------------------------------------------------------------------------------

LIST = (comparisons.RESULTS / "comparisons.csv").read_text()


# The bytes have their head size in the name of the attention.
SOFTMAX = ("softmax", "softmax 6x16", "softmax 3x32")


def differs_in_heads_alone(row, comparison, study):
    """Return whether a row is one of softmax, and but for its heads that of a comparison."""
    for axis, label, own in zip(study.grid.axes, row, comparison.softmax):
        if axis == "attention" and label not in SOFTMAX:
            return False
        if axis not in ("attention", "heads", "head-size") and label != own:
            return False
    return True


NAMES = ["/".join((each.study, *each.mixed)) for each in COMPARISONS]


@pytest.mark.parametrize("comparison", COMPARISONS, ids=NAMES)
def test_the_best_softmax_has_the_lowest_loss_of_those_that_differ_in_heads_alone(comparison):
    study = comparisons.study_of(comparison.study, comparisons.RESULTS)
    if study.waits:
        pytest.skip("nobody looks at its losses yet")
    means = {}
    for row in study.rows:
        if differs_in_heads_alone(row, comparison, study):
            losses = comparisons.losses(study, row, comparison.loss)
            means[row] = statistics.fmean(losses.values())
    assert comparison.softmax in means
    assert comparison.best == min(means, key=means.get)


def test_no_comparison_stands_twice():
    assert len({(each.study, each.mixed) for each in COMPARISONS}) == len(COMPARISONS)


@pytest.mark.parametrize(
    "text, said",
    [
        (LIST.replace("corpus", "text", 1), "its first line must be task,corpus,updates,heads,"),
        (LIST.replace("1600", "many", 1), "line 2: updates: must be a number, not 'many'"),
        (LIST.replace("4 of 32", "4x32", 1), "line 2: heads: must be like '4 of 32', not '4x32'"),
        (
            LIST.replace(",difference", ",ratios", 1),
            "line 2: scale: must be difference or ratio, not 'ratios'",
        ),
        (LIST.replace(",test,difference", "", 1), "line 2: must have 11 columns"),
        (LIST.replace("difference\n", "difference,x\n", 1), "line 2: must have 11 columns"),
        (
            LIST.replace("test", "loss", 1),
            "4/B/1600 and 4/softmax/1600 must have two seeds with 'loss' in common, have 0",
        ),
        (LIST.replace("4/B/1600", "4/C/1600"), "translation.json has no run of 4/C/1600"),
    ],
    ids=["titles", "updates", "heads", "scale", "too few columns", "too many", "metric", "row"],
)
def test_a_wrong_list_is_refused_in_one_line(text, said, tmp_path, capsys):
    (tmp_path / "comparisons.csv").write_text(text)
    for path in comparisons.RESULTS.glob("*.json"):
        (tmp_path / path.name).symlink_to(path)
    with pytest.raises(SystemExit):
        effects.effects(tmp_path)
    assert said in capsys.readouterr().err


def test_an_experiment_that_has_not_ended_is_left_out(monkeypatch):
    read = comparisons.study_of

    def with_words_waiting(name, folder):
        study = read(name, folder)
        if name == "words":
            return dataclasses.replace(study, grid=study.grid.model_copy(update={"seeds": 99}))
        return study

    monkeypatch.setattr(effects, "study_of", with_words_waiting)
    left = {each.comparison.task for each in effects.effects()}
    assert "words, tuned rate" not in left
    assert "words, rate 0.003" in left


# ---- what is printed -----------------------------------------------------------------------------


def test_the_page_has_the_lines_of_the_whole_table_without_percent_and_p():
    shorter = comparison_tables.effects_table().splitlines()
    whole = comparison_tables.effects_with_p_table().splitlines()
    assert len(shorter) == len(whole) == 2 + len(all_effects())
    for line, longer in zip(shorter, whole):
        cells = longer.split(" | ")
        del cells[5:7]
        assert line == " | ".join(cells)


def test_holms_p_is_over_all_lines():
    lines = comparison_tables.effects_with_p_table().splitlines()[2:]
    assert len(lines) == len(all_effects())
    smallest = min(each.gain.p for each in all_effects())
    (line,) = [line for line in lines if "| 4 of 16 |" in line]
    assert f"| {len(all_effects()) * smallest:.2g} |" in line


@pytest.mark.parametrize("value, text", [(-0.0004, "0.00"), (-0.006, "-0.01"), (1.239, "1.24")])
def test_a_rounded_0_has_no_sign(value, text):
    assert markdown.signed(value, 2) == text


def test_the_share_of_recall_that_was_learned():
    losses = by_seed("recall", "128", "8", "softmax").values()
    learned = sum(loss < 0.1 for loss in losses)
    nearly = sum(loss < 0.5 for loss in losses)
    assert 0 < learned < 6
    row = f"| 128 tokens | 8 of 8 | softmax | 6 | {learned} | {nearly} | "
    assert row in comparison_tables.recall_table()


def test_times_of_different_machines_are_not_compared():
    study = comparisons.study_of("translation", comparisons.RESULTS)
    devices = {}
    for attention in ("softmax", "B self"):
        runs = runs_of("translation", "4", attention, "1600")
        devices[attention] = {(run["seed"], run["device"]) for run in runs}
    both = devices["softmax"] & devices["B self"]
    assert 0 < len(both) < 8
    assert len(study.time_ratios(("4", "B self", "1600"), ("4", "softmax", "1600"))) == len(both)


def test_decoding_without_the_mixing_loses_bleu():
    lost = []
    for run in runs_of("table4", "32", "B"):
        lost.append(run["metrics"]["test"] - run["metrics"]["test unmixed"])
    cells = f"| 32 of 4 | {len(lost)} | {statistics.fmean(lost):.1f} ("
    assert cells in comparison_tables.unmixed_table()


def test_a_rate_that_a_pilot_did_not_try_is_an_empty_cell():
    lines = words_tables.pilots_table().splitlines()
    (line,) = [line for line in lines if line.startswith("| B, 16 heads of 8")]
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[3:5] == ["", "249.3, 249.6"]


def test_the_summary_is_over_all_rows_of_text():
    assert set(effects.of_text(all_effects())) == {
        "Multi30k",
        "WikiText-2",
        "WikiText-2 as bytes",
    }
    count = sum(bool(each.corpus) for each in COMPARISONS)
    assert comparison_tables.summary_table().count(f"| {count} rows of text, ") == 2


def test_the_gain_along_the_training_is_against_softmax_with_the_same_heads():
    at_end = {}
    for attention in ("softmax", "B"):
        runs = runs_of("translation", "32", attention, "1600")
        (run,) = [run for run in runs if run["seed"] == 21]
        at_end[attention] = run["points"][-1]["valid_loss"]
    study = comparisons.study_of("translation", comparisons.RESULTS)
    gain = effects.along(study, ("32", "B", "1600"))[1600][21]
    assert gain == pytest.approx((at_end["softmax"] - at_end["B"]) * math.log(2))


def test_the_bleu_is_that_of_the_test_set():
    """table4 has the BLEU of the validation set, too."""
    ours = statistics.fmean(by_seed("table4", "32", "B").values())
    theirs = statistics.fmean(by_seed("table4", "32", "softmax").values())
    cells = f"| 32 of 4 | 3 | {theirs:.2f} | {ours:.2f} | {ours - theirs:.2f} ("
    assert cells in comparison_tables.bleu_table()


def test_the_worth_in_updates_is_a_straight_line():
    def mean(attention):
        return statistics.fmean(by_seed("translation", "4", attention, "1600").values())

    softmax = mean("softmax")
    b = mean("B")
    more = mean("softmax in the time of B")
    share = (softmax - b) / (softmax - more)
    assert effects.worth_in_updates().mean == pytest.approx(share * 100 * 75 / 1600)
    assert re.search(r"is worth \d+ \(\d+ to \d+\) % more updates", effect_tables.sections())


# ---- the pictures --------------------------------------------------------------------------------


def points_of(axes):
    """Return (x, y) of all points that have an error bar."""
    points = []
    for bars in axes.containers:
        points += zip(*bars.lines[0].get_data())
    return points


def test_every_comparison_is_drawn_once_beside_its_head_size():
    figure = effect_figures.draw_by_head_size(comparisons.RESULTS)
    for axes, of_text in zip(figure.axes, (True, False)):
        chosen = [each for each in all_effects() if bool(each.comparison.corpus) == of_text]
        points = points_of(axes)
        drawn = sorted(y for _, y in points)
        assert drawn == pytest.approx(sorted(each.percent.mean for each in chosen))
        for x, y in points:
            (size,) = {each.comparison.head_size for each in chosen if each.percent.mean == y}
            assert size / 1.4 < x < size * 1.4


def test_the_curves_end_at_the_numbers_of_the_table():
    lines = translation_tables.along_table().splitlines()
    (axes,) = effect_figures.draw_along(comparisons.RESULTS).axes
    assert len(axes.containers) == len(effect_figures.CURVES)
    for name, bars in zip(effect_figures.CURVES, axes.containers):
        (line,) = [line for line in lines if line.startswith(f"| {name} |")]
        assert f"| {bars.lines[0].get_ydata()[-1]:.3f} (" in line


def test_the_gains_after_two_lengths_are_those_of_the_list():
    found = {}
    for each in all_effects():
        comparison = each.comparison
        if comparison.study == "translation_long":
            found[comparison.heads, comparison.updates] = each
    perplexity, bleu = effect_figures.draw_by_length(comparisons.RESULTS).axes
    for axes in (perplexity, bleu):
        assert [bars.get_label() for bars in axes.containers] == ["4 heads of 32", "32 heads of 4"]
        for heads, bars in zip(("4 of 32", "32 of 4"), axes.containers):
            for updates, y in zip((1600, 6400), bars.lines[0].get_ydata()):
                comparison = found[heads, updates].comparison
                expected = effects.lower_by(found[heads, updates].gain)
                if axes is bleu:
                    study = comparisons.study_of("translation_long", comparisons.RESULTS)
                    rows = (comparison.mixed, comparison.softmax)
                    expected = effects.bleu_gain(study, *rows, "BLEU")
                assert y == pytest.approx(expected.mean)


def test_rows_of_the_long_translation_stand_beside_the_best_softmax_of_their_length():
    lines = translation_tables.long_rows_table().splitlines()[2:]
    assert len(lines) == 8
    for number, updates in enumerate(("1,600", "6,400")):
        best, *others = lines[4 * number : 4 * number + 4]
        loss, bleu = (float(best.split(" | ")[place]) for place in (2, 4))
        assert best.startswith(f"| {updates} | softmax, 4 heads of 32 |")
        for line in others:
            _, _, own_loss, gain, own_bleu, more = line.strip("| ").split(" | ")
            assert float(gain.split()[0]) == pytest.approx(loss - float(own_loss), abs=2e-4)
            assert float(more.split()[0]) == pytest.approx(float(own_bleu) - bleu, abs=0.02)


def test_perplexities_in_units_are_divided_by_that_of_softmax_in_the_same_model():
    lines = units_tables.units_page_table().splitlines()[2:]
    for model, words, attentions in (
        ("masked-units", "masked model, units", ["l2", "", "relu2"]),
        ("words-block", "language model, block", ["l2", "l2 half", ""]),
    ):
        theirs = by_seed("units", model, "softmax")
        expected = [words, f"{statistics.fmean(theirs.values()):.1f}"]
        for attention in attentions:
            expected.append(
                quotient(by_seed("units", model, attention), theirs) if attention else ""
            )
        assert "| " + " | ".join(expected) + " |" in lines


def quotient(ours, theirs):
    logs = [math.log(ours[seed] / theirs[seed]) for seed in (61, 62, 63, 64)]
    interval = stats.ttest_1samp(logs, 0).confidence_interval()
    mean, low, high = map(math.exp, (statistics.fmean(logs), interval.low, interval.high))
    return f"{mean:.2f} ({low:.2f} to {high:.2f})"
