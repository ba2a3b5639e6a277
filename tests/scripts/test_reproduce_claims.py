"""Verdicts, gains and the report, against scipy and by hand."""

import itertools
import math
import random
import sys
from pathlib import Path

import pytest
from scipy import stats

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts")]

from reproduction import claims, gains, report, samples  # noqa: E402
from reproduction.claims import FAILS, HOLDS, OPEN  # noqa: E402
from reproduction.results import Study  # noqa: E402

BASE = [100.0, 104.0, 102.0]
PUBLISHED = {"4/softmax": "34.76", "4/A": "33.84", "32/softmax": "32.5", "32/A": "33.0"}
CLAIMS = {claim.text: claim for claim in claims.CLAIMS}


def study(
    values,
    table="table7",
    axes=None,
    measure="perplexity",
    better="lower",
    scale="small",
    published=(),
    example="toy",
    **fields,
):
    """Of made-up numbers, {row: values of seeds 1, 2, ... of `test`, or {metric: values}}.

    Runs of the same row, seed and values are the same runs, also in another table.
    """
    runs = []
    for row, of_row in values.items():
        row = row if isinstance(row, tuple) else (row,)
        by_metric = of_row if isinstance(of_row, dict) else {"test": of_row}
        for i in range(len(next(iter(by_metric.values())))):
            more = {name: by_row[row][i] for name, by_row in fields.items()}
            found = {metric: v[i] for metric, v in by_metric.items()}
            digest = f"{row} {i} {found}"
            runs.append({"labels": list(row), "seed": i + 1, "values": found, "digest": digest, "evaluate": {}, **more})
    part = {
        "title": "made up", "axes": axes or {"attention": list(values)}, "measure": measure, "better": better,
        "metrics": list(by_metric), "example": example, "runs": runs,
    }  # fmt: skip
    return Study(table, "Made up", scale, part, dict(published), ["test"])


def judged(text, *studies):
    return claims.judge(CLAIMS[text], studies)


# ---- samples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 10, 31])
def test_quantiles_are_scipys(degrees):
    assert samples.quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-6)


@pytest.mark.parametrize("values", [[1.0, 2.0, 4.0], [-3.0, 0.1, 0.2, 5.0, 1.0], [7.0, 7.5]])
def test_an_interval_is_scipys(values):
    found = samples.sample(values)
    low, high = stats.t.interval(0.95, len(values) - 1, found.mean, stats.sem(values))
    assert (found.mean - found.margin, found.mean + found.margin) == pytest.approx((low, high), rel=1e-6)


# ---- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, verdict, reason",
    [
        ([95.0, 99.1, 96.9], HOLDS, ""),
        ([105.0, 109.1, 106.9], FAILS, ""),
        ([99.0, 105.1, 101.9], OPEN, "its seeds cannot tell it from no effect"),
        ([95.0, 99.1], OPEN, "2 of the 3 seeds"),
        ([], OPEN, "not run here"),
    ],
)
def test_a_verdict_takes_a_difference_beyond_seed_noise(values, verdict, reason):
    found = judged("Mixhead A beats softmax", study({"softmax": BASE, "A": values}))
    assert found.verdict == verdict and found.reason.startswith(reason) and bool(found.reason) == bool(reason)


def test_a_verdict_is_stouffers_of_the_texts_own_tests():
    """Tables of other units and sizes, one of two rows: p as scipy combines the t-tests of the means over rows."""
    rng = random.Random(0)
    lower = study({"softmax": BASE, "A": [99.0, 101.0, 101.5]})
    axes = {"heads": ["4", "32"], "attention": ["softmax", "A"]}
    values = {row: [30 + rng.gauss(0, 1) for _ in range(5)] for row in itertools.product(*axes.values())}
    higher = study(values, "table4", axes, "BLEU", "higher", example="other")
    logs = [100 * math.log(b / a) for a, b in zip([99.0, 101.0, 101.5], BASE)]
    points = [sum(values[heads, "A"][i] - values[heads, "softmax"][i] for heads in axes["heads"]) / 2 for i in range(5)]
    one_sided = [stats.ttest_1samp(found, 0, alternative="greater").pvalue for found in (logs, points)]
    combined = stats.combine_pvalues(one_sided, "stouffer").pvalue
    found = judged("Mixhead A beats softmax", lower, higher)
    assert found.p == pytest.approx(2 * min(combined, 1 - combined), rel=1e-6)
    assert [evidence.study.table for evidence in found.evidence] == ["table7", "table4"]


def test_tables_of_one_text_are_one_test_by_the_mean_over_them():
    """However many tables show the same seeds, there are no more of them."""
    noisy = [99.0, 101.0, 101.5]
    axes = {"tokens": ["32", "64"], "attention": ["softmax", "A"]}
    gained = {"32": [1.0, 2.0, 1.4], "64": [2.0, 2.5, 2.2]}
    values = {(n, "softmax"): BASE for n in axes["tokens"]}
    values |= {(n, "A"): [b * math.exp(-g / 100) for b, g in zip(BASE, of_n)] for n, of_n in gained.items()}
    found = judged("Mixhead A beats softmax", study({"softmax": BASE, "A": noisy}), study(values, "table9", axes))
    first = [100 * math.log(b / a) for a, b in zip(noisy, BASE)]
    together = [(own + (a + b) / 2) / 2 for own, a, b in zip(first, *gained.values())]
    assert found.p == pytest.approx(stats.ttest_1samp(together, 0).pvalue, rel=1e-6)
    (test,) = found.tests
    assert test.values == pytest.approx(together) and "mean of table7 and table9: +" in report.grounds(found)


def test_without_an_effect_one_in_twenty_is_decided_however_many_rows_there_are():
    rng = random.Random(1)
    axes = {"tokens": ["32", "64", "128", "256", "512"], "attention": ["softmax", "A"]}
    decided = 0
    for _ in range(1000):
        values = {row: [100 + rng.gauss(0, 1) for _ in range(3)] for row in itertools.product(*axes.values())}
        flat = {row: [100 + rng.gauss(0, 1) for _ in range(3)] for row in ("softmax", "A")}
        found = judged("Mixhead A beats softmax", study(flat), study(values, "table9", axes))
        decided += found.verdict != OPEN
    assert 30 < decided < 72  # of a binomial distribution of mean 50 and deviation 6.9


def test_runs_that_tables_share_are_compared_once_and_where_they_have_most_seeds():
    values = {"softmax": BASE, "A": [95.0, 99.1, 96.9]}
    fewer = {name: of_row[:2] for name, of_row in values.items()}
    other = {**values, "A": [94.0, 98.1, 96.5]}

    def tables_of(*studies):
        return [evidence.study.table for evidence in judged("Mixhead A beats softmax", *studies).evidence]

    assert tables_of(study(values, "table1"), study(values), study(other, "table8")) == ["table1", "table8"]
    assert tables_of(study(fewer, "table1"), study(values)) == ["table7"]


def test_more_is_better_where_the_measure_says_so():
    values = {"softmax": [30.0, 31.0, 30.5], "A": [32.0, 33.1, 32.4]}
    assert judged("Mixhead A beats softmax", study(values, measure="BLEU", better="higher")).verdict == HOLDS
    assert judged("Mixhead A beats softmax", study(values)).verdict == FAILS


def test_hurting_is_being_worse():
    values = {"softmax": BASE, "random": [105.0, 109.1, 106.9], "average": [97.0, 100.2, 99.0]}
    assert judged("Random mixing hurts", study(values)).verdict == HOLDS
    assert judged("Average mixing hurts", study(values)).verdict == FAILS
    assert judged("B beats A", study(values)).reason == "not run here"


def test_a_gain_that_grows_with_the_length():
    axes = {"tokens": ["32", "64", "128"], "attention": ["softmax", "B"]}
    noise = [0.0, 0.001, -0.001]

    def of(*gained):
        values = {}
        for tokens, gain in zip(axes["tokens"], gained):
            values[tokens, "softmax"] = BASE
            values[tokens, "B"] = [base * math.exp(-gain * (1 + e)) for base, e in zip(BASE, noise)]
        return study(values, "table9", axes)

    text = "Mixing matters most when d_k << n"
    found = judged(text, of(0.01, 0.02, 0.03))
    assert found.verdict == HOLDS and judged(text, of(0.03, 0.02, 0.01)).verdict == FAILS
    (comparison,) = found.evidence[0].comparisons
    assert comparison.values[1] == pytest.approx(1, rel=1e-6) and comparison.unit == "% of perplexity"


def test_a_seed_that_lacks_a_point_has_no_line():
    axes = {"heads": ["4", "8", "32"], "attention": ["softmax", "A"]}
    values = {(heads, "softmax"): [30.0, 30.0] for heads in axes["heads"]}
    values |= {("4", "A"): [30.0, 31.0], ("8", "A"): [31.0, 30.0], ("32", "A"): [33.0]}
    found = judged("Mixing matters most when d_k << n", study(values, "table4", axes, "BLEU", "higher"))
    (comparison,) = found.evidence[0].comparisons
    assert comparison.values == {1: pytest.approx(1.0)}  # 3 BLEU over three halvings


def test_two_points_are_no_line():
    axes = {"head-size": ["32", "64"], "attention": ["softmax", "A"]}
    values = dict.fromkeys(itertools.product(*axes.values()), BASE)
    assert judged("Mixing matters most when d_k << n", study(values, "table10", axes)).reason == "not run here"


@pytest.mark.parametrize("gap, further", [(0.3, HOLDS), (-0.3, FAILS)])
@pytest.mark.parametrize("worse, is_worse", [(5, HOLDS), (-5, FAILS)])
def test_overfitting_is_being_worse_and_being_further_from_the_training_loss(worse, is_worse, gap, further):
    axes = {"head-size": ["64", "512", "256"], "attention": ["softmax"]}
    values = {(size, "softmax"): BASE for size in axes["head-size"]}
    values["512", "softmax"] = [base + worse + noise for base, noise in zip(BASE, (0, 0.1, -0.1))]
    losses = {row: [7.0, 7.1, 7.2] for row in values}
    losses["512", "softmax"] = [7.0 + gap, 7.1 + gap, 7.21 + gap]
    found = study(values, "table10", axes, valid_loss=losses, train_loss={row: [6.0, 6.0, 6.0] for row in values})
    text = "Fixhead overfits when large: it is"
    assert judged(f"{text} worse on the test set", found).verdict == is_worse
    judgement = judged(f"{text} further from its training loss", found)
    assert judgement.verdict == further
    assert judgement.evidence[0].values == pytest.approx([gap, gap, gap + 0.01])


def test_of_models_that_do_not_overfit_nothing_is_said_of_overfitting():
    axes = {"head-size": ["256", "512"], "attention": ["softmax"]}
    values = {("256", "softmax"): BASE, ("512", "softmax"): [base + 5 for base in BASE]}
    valid = {row: [7.0, 7.1, 7.2] for row in values}
    found = study(values, "table10", axes, valid_loss=valid, train_loss={row: [7.0, 7.2, 7.2] for row in values})
    for text in ("worse on the test set", "further from its training loss"):
        judgement = judged(f"Fixhead overfits when large: it is {text}", found)
        assert (judgement.verdict, judgement.reason) == (OPEN, "no model overfits") and math.isnan(judgement.p)


def test_a_verdict_says_how_much_of_it_was_run():
    labels = ["softmax", "A", "B", "sigsoftmax", "A + sigsoftmax", "B + sigsoftmax"]
    values = {"softmax": BASE, "sigsoftmax": [95.0, 99.1, 96.9]}
    found = judged("Sigsoftmax helps a little", study(values, "table1", {"attention": labels}))
    assert found.words == f"{HOLDS} (p {found.p:.2g}; 1 of 3 comparisons were run)"


def test_what_is_told_beside_is_told_where_another_table_has_the_rest():
    """The paper says nothing of the ranks of unlearnt mixing; those of A are table 1's."""

    def spectra(*ranks):
        return [{"places": {"decoder": {"mean_effective_rank": rank}}} for rank in ranks]

    ranks = {("softmax",): spectra(10, 11, 12), ("A",): spectra(12, 13.1, 14), ("random",): spectra(15, 16.1, 17)}
    values = {row[0]: BASE for row in ranks}
    learnt = {name: of_row for name, of_row in values.items() if name != "random"}
    found = judged(
        "Mixing raises the effective rank", study(learnt, "table1", spectrum=ranks), study(values, spectrum=ranks)
    )
    assert [len(evidence.counted) for evidence in found.evidence] == [1, 0] and found.verdict == HOLDS
    told = report.grounds(found)
    assert (
        "- table7:\n  - random above softmax (beside the test): +5.03 " in told and told.count("A above softmax") == 1
    )


def test_a_claim_is_tested_on_its_own_tables():
    values = {"softmax": BASE, "A": BASE, "B": [base + 5 + noise for base, noise in zip(BASE, (0, 0.1, -0.1))]}
    assert judged("B beats A", study(values)).verdict == FAILS
    assert judged("B beats A", study(values, "table5")).reason == "not run here"
    assert judged("Mixhead B beats softmax", study(values, "table4")).verdict == FAILS
    assert CLAIMS["B beats A"].source == "tables 1, 2, 3, 7"


def test_what_other_tables_have_of_a_claim_is_told_and_decides_nothing():
    values = {"softmax": BASE, "A": BASE, "B": [base + 5 + noise for base, noise in zip(BASE, (0, 0.1, -0.1))]}
    beside = study(values, "table4")
    found = judged("B beats A", beside)
    assert (found.verdict, found.reason) == (OPEN, "not run here") and math.isnan(found.p)
    assert "- table4 (beside the test): B better than A: -" in report.claims([beside])[1]
    better = study({**values, "B": [95.0, 99.1, 96.9]})
    both = judged("B beats A", beside, better)
    assert both.verdict == HOLDS and both.p == judged("B beats A", better).p
    assert [evidence.study.table for evidence in both.evidence] == ["table7", "table4"]


def test_tables_told_beside_do_not_take_runs_from_those_that_are_tested():
    values = {"softmax": [*BASE, 101.0, 103.0], "A": [*BASE, 101.0, 103.0], "B": [95.0, 99.1, 96.9, 96.0, 98.1]}
    own = study({row: of_row[:3] for row, of_row in values.items()})
    found = judged("B beats A", study(values, "table8"), own)
    assert found.verdict == HOLDS and found.p == judged("B beats A", own).p


def test_lines_through_some_of_the_same_points_are_both_counted():
    """Tables 9 and 10 share the model of the paper's length and head size."""
    noise = (0, 0.1, -0.1)

    def of(table, axis, gained):
        values = {}
        for label, gain in gained.items():
            values[label, "softmax"] = BASE
            values[label, "A"] = [base - gain - n for base, n in zip(BASE, noise)]
        return study(values, table, {axis: list(gained), "attention": ["softmax", "A"]})

    tokens = of("table9", "tokens", {"32": 1, "128": 1, "512": 3})
    sizes = of("table10", "head-size", {"64": 3, "96": 2, "256": 2})
    for run in sizes.part["runs"]:
        if run["labels"][0] == "64":
            run["digest"] = run["digest"].replace("'64'", "'512'")
    own = {run["digest"] for run in tokens.part["runs"]}
    assert sum(run["digest"] in own for run in sizes.part["runs"]) == 6
    found = judged("Mixing matters most when d_k << n", tokens, sizes)
    assert [evidence.study.table for evidence in found.evidence] == ["table9", "table10"]


def test_seeds_may_tell_an_effect_from_the_papers_but_not_from_none():
    values = {"softmax": BASE, "average": [100.1, 103.8, 102.0]}
    near = judged("Average mixing hurts", study(values, published={"softmax": "100", "average": "100.1"}))
    far = judged("Average mixing hurts", study(values, published={"softmax": "100", "average": "104"}))
    assert near.reason == "its seeds cannot tell it from no effect"
    assert far.reason == "its seeds tell it from the paper's effect, but not from none"


def test_ranks_and_unmixed_decoding_are_of_the_same_seed():
    def spectrum(rank):
        return {"length": 8, "windows": 4, "places": {"decoder": {"mean_effective_rank": rank, "mean_cumulative": []}}}

    ranks = {"softmax": (4, 5, 6), "B": (5, 6.1, 7.2), "random": (3, 3, 3)}
    spectra = {(row,): [spectrum(r) for r in of_row] for row, of_row in ranks.items()}
    values = {
        "softmax": {"test": [30.0, 31.0, 32.0], "test unmixed": [30.0, 31.0, 32.0]},
        "B": {"test": [30.0, 31.0, 32.0], "test unmixed": [20.0, 21.5, 22.4]},
        "random": {"test": [30.0, 31.0, 32.0], "test unmixed": [30.0, 31.0, 32.0]},
    }
    found = study(values, "table4", measure="BLEU", better="higher", spectrum=spectra)
    rank = judged("Mixing raises the effective rank", found)
    assert rank.verdict == HOLDS  # of A and B; random, which loses, is told beside it
    assert rank.evidence[0].values == pytest.approx([1, 1.1, 1.2])
    assert [c.what.split()[0] for c in rank.evidence[0].comparisons] == ["B", "random"]
    unmixed = judged("Decoding unmixed, as the published code does, costs BLEU", found)
    assert unmixed.verdict == HOLDS and unmixed.evidence[0].values == pytest.approx([10, 9.5, 9.6])


# ---- gains -----------------------------------------------------------------------------------------------------------


def test_the_papers_gain_is_of_the_same_set():
    published = {"softmax": "21.82/20.89", "A": "21.20/20.48"}
    found = study({"softmax": BASE, "A": BASE, "B": BASE}, published=published)._replace(
        published_metrics=["valid", "test"]
    )
    assert gains.published(found, ("A",), ("softmax",)) == pytest.approx(100 * math.log(20.89 / 20.48))
    assert gains.published(found, ("B",), ("softmax",)) is None
    assert gains.published(found._replace(published_metrics=["EM", "F1"]), ("A",), ("softmax",)) is None


# ---- the report ------------------------------------------------------------------------------------------------------


def test_scales_are_judged_apart_and_what_was_tried_decides_nothing():
    small = study({"softmax": BASE, "A": [105.0, 109.1, 106.9]})
    full = study({"softmax": BASE, "A": [95.0, 99.1, 96.9]}, scale="full")
    tiny = study({"softmax": BASE, "A": [95.0, 99.1, 96.9]}, "table8", scale="tiny")
    lines = "".join(report.claims([full, small, tiny])).splitlines()
    assert "| claim | tested on | at `full` | at `small` |" in lines
    (row,) = (line for line in lines if line.startswith("| Mixhead A beats softmax |"))
    assert HOLDS in row.split("|")[3] and FAILS in row.split("|")[4]
    assert "table8" not in "\n".join(lines)


def test_what_a_verdict_rests_on_is_told_by_row():
    axes = {"heads": ["4", "32"], "attention": ["softmax", "A"]}
    values = {
        ("4", "softmax"): [30.0, 31.0, 32.0], ("4", "A"): [30.5, 31.3, 32.6],
        ("32", "softmax"): [20.0, 21.0], ("32", "A"): [22.0, 23.0],
    }  # fmt: skip
    _, text = report.claims([study(values, "table4", axes, "BLEU", "higher")])
    basis = "mean of 2 comparisons, over the seeds that all of them have"
    assert f"- table4, {basis} (beside the test): +1.20 BLEU (2 seeds)" in text
    assert "  - A better than softmax, heads 4: +0.47 [+0.09, +0.85] BLEU (3 seeds, p 0.034)" in text
    assert "  - A better than softmax, heads 32: +2.00 BLEU (2 seeds)" in text


def test_the_papers_effect_is_within_our_interval_or_not():
    axes = {"heads": ["4", "32"], "attention": ["softmax", "A"]}
    values = {row: [30.0, 31.0, 32.0] for row in itertools.product(*axes.values())}
    values["4", "A"] = values["32", "A"] = [30.5, 31.3, 32.6]
    found = study(values, "table4", axes, "BLEU", "higher", published=PUBLISHED)
    _, text = report.claims([found])
    assert "heads 4: +0.47 [+0.09, +0.85] BLEU (3 seeds, p 0.034); the paper's -0.92 is outside" in text
    assert "heads 32: +0.47 [+0.09, +0.85] BLEU (3 seeds, p 0.034); the paper's +0.50 is within" in text


def test_a_mean_of_some_rows_says_so():
    axes = {"tokens": ["32", "64", "128"], "attention": ["softmax", "A"]}
    values = {("32", "softmax"): BASE, ("32", "A"): [95.0, 99.1, 96.9]}
    found = study(values, "table9", axes)
    verdicts, text = report.claims([found])
    assert "- table9, mean of 1 of 3 comparisons: +" in text
    assert "  - A better than softmax, tokens 32: +" in text and "tokens 64" not in text
    assert "| Mixhead B beats softmax | all tables | not testable at this size: not run here |" in verdicts


def test_gains_of_unmixed_decoding_stand_beside_the_papers():
    """The published code decodes so; what is mixed in decoding, too, is not compared with it."""
    values = {
        "softmax": {"test": [30.0, 31.0, 32.0], "test unmixed": [30.0, 31.0, 32.0]},
        "A": {"test": [31.0, 32.5, 33.1], "test unmixed": [28.0, 30.5, 30.2]},
    }
    published = {"softmax": "34.76", "A": "33.84"}
    found = study(values, "table4", measure="BLEU", better="higher", published=published)
    heads, _, _, row = report.numbers(found).splitlines()
    assert "| paper's gain, BLEU | our gain, BLEU (test) | our gain, BLEU (test unmixed) |" in heads
    assert "| -0.92 | +1.20 [+0.54, +1.86] | -1.43 [-3.46, +0.59] |" in row
    assert "the paper's" not in report.claims([found])[1].partition("**Mixhead A beats softmax")[2]


@pytest.mark.parametrize("mean, deviation", [(1.2, 0.5), (0.25, 0.91), (-0.7, 0.6), (0.79, 0.62), (1.21, 0.51)])
def test_the_seeds_that_a_gain_would_take_have_the_power(mean, deviation):
    """By the noncentral t distribution, which the approximation is of; one seed fewer has not."""

    def power(n):
        beyond, centre = stats.t.ppf(0.975, n - 1), abs(mean) / deviation * math.sqrt(n)
        return stats.nct.sf(beyond, n - 1, centre) + stats.nct.cdf(-beyond, n - 1, centre)

    found = samples.seeds_wanted(samples.Sample(3, mean, deviation))
    if (mean, deviation) == (0.25, 0.91):
        assert found == 0 and power(samples.MOST) < 0.8
    else:
        assert power(found) > 0.75 and power(found - 1) < 0.8


def test_a_gain_that_no_seeds_could_show_takes_none():
    assert samples.seeds_wanted(samples.Sample(3, 0.01, 1.0)) == samples.seeds_wanted(samples.Sample(3, 0.0, 0.0)) == 0


def test_noise_is_told_with_what_it_hides():
    values = {"softmax": BASE, "A": [99.0, 103.0, 100.9], "B": [99.0, 105.1, 100.0]}
    (noise, told) = report.noise(study(values))
    gained = {row: [100 * math.log(b / a) for a, b in zip(values[row], BASE)] for row in ("A", "B")}
    low, high = sorted(stats.tstd(found) for found in gained.values())
    margin = sum(stats.t.interval(0.95, 2, 0, stats.sem(found))[1] for found in gained.values()) / 2
    assert f"softmax varies by {200 / 102:.2g}% between seeds, gains by {low:.2g} to {high:.2g}% " in noise
    assert f"half the width of a gain's interval is {margin:.2g}% by the median." in noise
    assert told.startswith("Told from none: 1 of 2 gains. ")
    wanted = samples.seeds_wanted(samples.sample(gained["B"]))
    assert told.endswith(f" would tell them with probability 0.8: B {wanted or 'more than 100'}.")
    assert report.noise(study({"softmax": BASE, "A": [99.0, 103.0, 100.9]}))[1] == "Told from none: 1 of 1 gains."


def test_what_was_run_is_told_with_its_minutes_threads_and_text():
    runs = {"updates": [1000] * 3, "seconds_per_update": [0.6, 0.9, 3.0], "parameters": [1_500_000] * 3}
    more = {"device": ["a CPU"] * 3, "threads": [1, 1, 2], "data": ["b1597121f3f1", "b1597121f3f1", "other"]}
    fields = {name: {("softmax",): found} for name, found in {**runs, **more}.items()}
    text = report.words(study({"softmax": BASE}, **fields))
    assert "1.5 million parameters, 1,000 updates, 10 to 50 minutes each, 15 by the median." in text
    assert "Devices: a CPU, 2 threads a run; a CPU, one thread a run." in text
    assert "Text: SHA-256 b1597121f3f1... (WikiText-2 with its articles in another order " in text
    assert "; SHA-256 other....".replace("....", "...") in text and "Time and memory were not measured in turn." in text


def test_what_was_not_in_the_test_is_marked():
    _, text = report.claims(
        [study({"softmax": BASE, "A": [95.0, 99.1, 96.9]}), study({"softmax": BASE, "A": [107.0, 108.0]}, "table8")]
    )
    assert "- table8 (beside the test): A better than softmax: " in text and "- table7: A better" in text


def test_a_row_of_the_report_by_hand():
    published = {"softmax": "20.89", "A": "20.48"}
    values = {"softmax": BASE, "A": [95.0, 99.1, 96.9], "B": [99.0]}
    text = report.numbers(study(values, published=published))
    interval = [100 * math.log(b / a) for a, b in zip(values["A"], BASE)]
    low, high = stats.t.interval(0.95, 2, sum(interval) / 3, stats.sem(interval))
    assert text.splitlines()[0] == (
        "| attention | paper (test) | ours: test | paper's gain, % | our gain, % (test) | s/update | peak MiB |"
    )
    assert (
        f"| A | 20.48 | 97.00 ± 2.05 (3) | +1.98 | {sum(interval) / 3:+.2f} [{low:+.2f}, {high:+.2f}] | - | - |" in text
    )
    assert "| B |  | 99.00 (1) | - | +1.01 (1) | - | - |" in text


def test_commits_are_counted_where_the_code_was_another():
    fields = {"commit": {("softmax",): ["a, b+", "a", "c+"]}}
    assert report.commits(study({"softmax": BASE}, **fields)) == "a, b+, c+; with + 2 of 3 runs"
    assert report.commits(study({"softmax": BASE}, commit={("softmax",): ["a, b", "a", None]})) == "a, b"


def test_ranks_are_told_with_the_windows_they_are_of():
    spectra = {("softmax",): [{"length": length, "windows": 16, "places": {}} for length in (128, 32, 128)]}
    found = study({"softmax": BASE}, spectrum=spectra)
    assert report.windows(found) == "16 windows of 32 tokens, 16 windows of 128 tokens a run"
    assert report.windows(study({"softmax": BASE})) == ""


def test_a_cost_has_its_ratio_and_how_far_the_rounds_lie_apart():
    cost = {"seconds_per_update": 0.47, "peak_memory_mib": 750.4}
    ratios = {"time_ratios": [1.5, 1.2, 1.3], "memory_ratios": [1.0, 1.0, 1.0]}
    assert report.costs({**cost, **ratios}) == ("0.47 (1.30; 1.20 to 1.50)", "750 (1.00)")
    assert report.costs(cost) == ("0.47", "750") and report.costs({}) == ("-", "-")


def test_a_measurement_says_what_of_the_device_it_had():
    assert report.workers({"gpus": 8}) == ", 8 of them" and report.workers({}) == ""
    assert report.workers({"threads": 1}) == ", 1 thread" and report.workers({"threads": 2}) == ", 2 threads"
