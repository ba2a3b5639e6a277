"""The tables of the planned experiments are those of the runs.

Shares, sign tests, ratios and changes are computed by hand.
"""

import dataclasses
import itertools
import math
import statistics

import pytest
from scipy import stats
from studies import grids, pictures, planned, tables
from studies.study import Study

GRID = {
    "title": "Toy",
    "example": "recall",
    "metrics": {"test": ""},
    "axes": {
        "head-size": {"4": "--head-size 4", "8": "--head-size 8"},
        "attention": {"softmax": "--arm softmax", "A": "--arm A", "B": "--arm B"},
    },
    "seeds": 4,
}
# the steps of seeds 1 to 4; None has not learned
TOOK = {
    ("4", "softmax"): (None, None, 100, None),
    ("4", "A"): (75, None, 100, 50),  # two faster; a tie of never, a tie of 100
    ("4", "B"): (25, 25, 25, 25),
    ("8", "softmax"): (50, 50, 50, 50),
    ("8", "A"): (75, 75, None, 75),
    ("8", "B"): (50, 50, 50, 50),
}


# the axes of a row, from the last one back
AXES = ("steps", "head-size", "attention")


def run_of(row, seed, points=(), value=1.0):
    return {
        "labels": dict(zip(AXES[-len(row) :], row)),
        "seed": seed,
        "train": {"--stop-at": ["0.1"]},
        "metrics": {"test": value},
        "measures": {"test": "nats an answer"},
        "points": list(points),
        "versions": {},
        "seconds": 1.0,
    }


def points_of(steps):
    """Return validations every 25 steps; the last one is small enough if the run learned."""
    last = steps or 100
    points = [
        {"update": update, "tokens": 0, "valid_loss": 2.0} for update in range(25, last + 1, 25)
    ]
    if steps is not None:
        points[-1]["valid_loss"] = 0.1
    return points


def study_of(own_table, content, found, tmp_path):
    """Return the study of a grid's saved runs; the grid names a table of its own."""
    path = tmp_path / "toy.toml"
    grid = grids.grid_from({**content, "table": own_table}, path)
    return Study("saved", grid, str(path), found, {})


def study_of_steps(tmp_path, **changes):
    found = [
        run_of(row, seed, points_of(steps))
        for row, all_steps in TOOK.items()
        for seed, steps in enumerate(all_steps, start=1)
    ]
    return study_of("steps", GRID | changes, found, tmp_path)


def test_the_steps_are_those_of_the_first_validation_loss_that_is_small_enough():
    losses = {25: 2.0, 50: 0.1001, 75: 0.1, 100: 0.05}
    points = [{"update": update, "valid_loss": loss} for update, loss in losses.items()]
    assert planned.steps_taken(run_of(("4", "B"), 1, points)) == 75
    assert planned.steps_taken(run_of(("4", "B"), 1, points[:2])) == planned.NEVER
    assert (
        planned.steps_taken(run_of(("4", "B"), 1, [{"update": 100, "train_loss": 0.0}]))
        == planned.NEVER
    )


def test_a_recipe_without_fairseq_has_validation_losses_in_the_unit_of_its_endpoint(tmp_path):
    study = study_of_steps(tmp_path)
    assert study.loss_unit == "nats an answer"
    of_fairseq = [run | {"flags": {"--arch": ["mixhead_transformer"]}} for run in study.runs]
    assert dataclasses.replace(study, runs=of_fairseq).loss_unit == "bits"


@pytest.mark.parametrize(
    "taken, median",
    [
        ((50, 75, 100, 25), "62.5"),
        ((50, 75, 100, None), "87.5"),
        ((50, 75, None, None), "above 637.5"),
        ((50, None, None, None), "above 1,200"),
        ((50, None, None), "above 1,200"),
    ],
    ids=["all learned", "three of four", "half", "one of four", "one of three"],
)
def test_a_median_that_is_not_known_has_a_bound(taken, median):
    """A seed that never learned needs more than the 1,200 steps that it had."""
    steps = [planned.NEVER if step is None else step for step in taken]
    assert planned.median_of(steps, 1200) == median


def exact_p(faster, slower):
    """Return the two-sided sign test from its definition.

    As many sequences of signs are at least as uneven.
    """
    count = faster + slower
    signs = itertools.product((0, 1), repeat=count)
    extreme = [each for each in signs if abs(sum(each) - count / 2) >= abs(faster - count / 2)]
    return len(extreme) / 2**count


@pytest.mark.parametrize("faster, slower", [(1, 0), (5, 0), (6, 1), (3, 3), (2, 7)])
def test_the_sign_test_is_exact(faster, slower):
    ours = dict.fromkeys(range(faster + slower), 1.0)
    theirs = {seed: 2.0 if seed < faster else 0.5 for seed in ours}
    found = planned.sign_test(ours, theirs)
    assert (found.faster, found.slower, found.ties) == (faster, slower, 0)
    assert found.p == pytest.approx(exact_p(faster, slower))


def test_two_seeds_that_never_learned_are_a_tie_and_ties_do_not_count():
    never = planned.NEVER
    found = planned.sign_test(
        {1: 50, 2: never, 3: 75, 4: never}, {1: never, 2: never, 3: 75, 4: 25, 9: 1}
    )
    assert found == planned.Sign(faster=1, slower=1, ties=2, p=1.0)
    assert planned.sign_test({1: never}, {1: never}) == planned.Sign(0, 0, 1, 1.0)


def test_the_table_has_shares_medians_and_the_comparison_with_softmax_of_the_same_heads(tmp_path):
    lines = planned.steps_table(study_of_steps(tmp_path)).splitlines()
    cells = {
        tuple(line.strip("| ").split(" | ")[:2]): line.strip("| ").split(" | ")[2:]
        for line in lines[2:]
    }
    # Clopper and Pearson, 1 of 4
    low = stats.beta.ppf(0.025, 1, 4)
    high = stats.beta.ppf(0.975, 2, 3)
    share = f"1 of 4 ({100 * low:.0f} to {100 * high:.0f} %)"
    assert cells["4", "softmax"][:2] == [share, "above 100"]
    assert cells["4", "A"][0].startswith("3 of 4") and cells["4", "A"][1:3] == ["87.5", "2, 0, 2"]
    assert cells["4", "B"][0].startswith("4 of 4") and cells["4", "B"][1:4] == [
        "25",
        "4, 0, 0",
        "0.12",
    ]
    assert cells["8", "A"][1:4] == ["75", "0, 4, 0", "0.12"]
    assert cells["8", "B"][1:] == ["50", "0, 0, 4", "1", "1"]
    assert cells["4", "B"][4] == "0.5"  # 0.125, the smallest of four


def test_report_shows_the_table_and_the_picture_only_when_every_seed_has_ended(tmp_path):
    ended = tables.markdown(study_of_steps(tmp_path))
    assert "| 4 | B | 4 of 4 " in ended and "gain in" not in ended
    pictures.draw(study_of_steps(tmp_path), tmp_path / "steps.svg")
    assert "share of the seeds that have learned" in (tmp_path / "steps.svg").read_text()
    waiting = tables.markdown(study_of_steps(tmp_path, seeds=5))
    assert "4 of 5 seeds have every point" in waiting and "of 4 (" not in waiting


def test_a_grid_may_name_each_table_and_no_other(tmp_path, capsys):
    for name in planned.TABLES:
        assert planned.has_own_table(study_of(name, GRID, [], tmp_path))
    assert not planned.has_own_table(study_of("", GRID, [], tmp_path))

    path = tmp_path / "toy.toml"
    path.write_text('example = "recall"\ntable = "step"\n[axes.heads]\n2 = ""\n')
    with pytest.raises(SystemExit):
        grids.read_grid(path)
    said = capsys.readouterr().err
    assert said.rstrip().endswith(
        f"{path}: table: must be '', 'steps', 'errors', 'lasting' or 'units', not 'step'"
    )


def test_a_seed_that_some_row_lacks_is_left_out_of_all_rows_and_named(tmp_path):
    study = study_of_steps(tmp_path, seeds=3)
    kept = [run for run in study.runs if (run["labels"]["attention"], run["seed"]) != ("A", 2)]
    some = dataclasses.replace(study, runs=kept)
    found = tables.markdown(some)
    without = dataclasses.replace(study, runs=[run for run in study.runs if run["seed"] != 2])
    named = "\n\nSeed 2 is left out of all rows, because these lack it: 4 / A; 8 / A."
    assert planned.own_table(some) == planned.own_table(without) + named
    assert tables.rows_table(without) in found and named in found


def test_an_experiment_waits_for_seeds_that_all_rows_share(tmp_path):
    study = study_of_steps(tmp_path, seeds=3)
    lacking = {("4", "A"): 1, ("8", "B"): 2}
    kept = [run for run in study.runs if lacking.get(tuple(run["labels"].values())) != run["seed"]]
    some = dataclasses.replace(study, runs=kept)
    assert some.whole_seeds == {3, 4}
    assert planned.own_table(some) == "Not ended: 2 of 3 seeds have every point."


def test_errors_are_ratios_and_their_change_is_paired_by_seed(tmp_path):
    axes = {
        "steps": {"500": "--steps 500", "2000": "--steps 2000"},
        "head-size": {"2": "--head-size 2"},
        "attention": {"softmax": "--arm softmax", "B": "--arm B"},
    }
    errors = {
        ("500", "2", "softmax"): (0.8, 0.6, 0.7),
        ("500", "2", "B"): (0.4, 0.3, 0.3),
        ("2000", "2", "softmax"): (0.6, 0.5, 0.4),
        ("2000", "2", "B"): (0.2, 0.1, 0.1),
    }
    found = [
        run_of(row, seed, value=value)
        for row, values in errors.items()
        for seed, value in enumerate(values, start=1)
    ]
    content = GRID | {"axes": axes, "example": "nearest_neighbour", "seeds": 3}
    study = study_of("errors", content, found, tmp_path)
    *_, short, long = planned.errors_table(study).splitlines()

    def mean_ratio(*ratios):
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    early = (2, 2, 7 / 3)
    late = (3, 5, 4)
    assert f"| 500 | 2 | B | {mean_ratio(*early):.3g} times (" in short and short.endswith("|  |")
    assert f"| 2000 | 2 | B | {mean_ratio(*late):.3g} times (" in long
    grown = [b / a for a, b in zip(early, late)]
    assert f"| {mean_ratio(*grown):.3g} times (" in long
    test = stats.ttest_1samp([math.log(ratio) for ratio in late], 0)
    assert f" {test.pvalue:.2g} | " in long
    assert planned.errors_table(study) in tables.markdown(study)


def test_rows_without_a_seed_in_common_have_no_ratio(tmp_path):
    found = [run_of(("2000", "2", "softmax"), 1), run_of(("2000", "2", "B"), 2)]
    found += [run_of(("500", "2", "softmax"), 1), run_of(("500", "2", "B"), 1, value=0.5)]
    axes = {
        "steps": {"500": "--steps 500", "2000": "--steps 2000"},
        "head-size": {"2": "--head-size 2"},
        "attention": {"softmax": "--arm softmax", "B": "--arm B"},
    }
    content = GRID | {"axes": axes, "example": "nearest_neighbour", "seeds": 0}
    study = study_of("errors", content, found, tmp_path)
    *_, short, long = planned.errors_table(study).splitlines()
    assert short == "| 500 | 2 | B | 2 times |  |  |  |"  # one seed has no interval
    assert long == "| 2000 | 2 | B | no seed in common |  |  | no seed in common |"


def test_a_change_of_a_gain_is_paired_by_seed_and_holms_family_is_the_numbers_of_heads(tmp_path):
    content = {
        "title": "Toy",
        "example": "multi30k_de_en",
        "metrics": {"test": "--score-reference", "BLEU": ""},
        "axes": {
            "heads": {"4": "--heads 4", "32": "--heads 32"},
            "attention": {"softmax": "--head-mixing none", "B": "--head-mixing position-wise"},
            "length": {"1600": "--max-update 1600", "6400": "--max-update 6400"},
        },
        "seeds": 3,
    }
    gains = {
        ("4", "1600"): (0.05, 0.06, 0.04),
        ("4", "6400"): (0.01, 0.03, 0.02),
        ("32", "1600"): (0.08, 0.07, 0.09),
        ("32", "6400"): (0.08, 0.09, 0.08),
    }
    found = []
    for (heads, length), by_seed in gains.items():
        for seed, gain in enumerate(by_seed, start=41):
            for arm in ("softmax", "B"):
                mine = gain if arm == "B" else 0.0
                run = run_of((heads, arm, length), seed)
                run["labels"] = {"heads": heads, "attention": arm, "length": length}
                run["metrics"] = {"test": 2 + seed / 100 - mine, "BLEU": 30 + seed / 10 + 10 * mine}
                run["measures"] = {"test": "nats a token", "BLEU": "BLEU"}
                found.append(run)
    study = study_of("lasting", content, found, tmp_path)
    four, thirty_two = planned.lasting_table(study).splitlines()[2:]

    def interval(values, decimals):
        test = stats.ttest_1samp(values, 0).confidence_interval()
        mean = statistics.fmean(values)
        return f"{mean:.{decimals}f} ({test.low:.{decimals}f} to {test.high:.{decimals}f})"

    change = [late - early for early, late in zip(gains["4", "1600"], gains["4", "6400"])]
    other = [late - early for early, late in zip(gains["32", "1600"], gains["32", "6400"])]
    p, other_p = (stats.ttest_1samp(values, 0).pvalue for values in (change, other))
    assert p < other_p and 2 * p < 1
    assert four == (
        f"| 4 of 32 | 3 | {interval(gains['4', '1600'], 4)} | {interval(gains['4', '6400'], 4)} "
        f"| {interval(change, 4)} | {p:.2g} | {2 * p:.2g} "
        f"| {interval([10 * gain for gain in gains['4', '1600']], 2)} "
        f"| {interval([10 * gain for gain in gains['4', '6400']], 2)} |"
    )
    assert f"| {interval(other, 4)} | {other_p:.2g} | {max(2 * p, other_p):.2g} |" in thirty_two
    assert four in tables.markdown(study)


def test_units_are_compared_with_softmax_of_the_same_model_and_holms_family_is_four_rows(tmp_path):
    axes = {
        "model": dict.fromkeys(("words-block", "words-units", "masked-block", "masked-units"), ""),
        "attention": dict.fromkeys(("softmax", "l2", "l2 half", "relu2"), ""),
    }
    cells = {f"{model},{name}": "" for model, name in planned.PRIMARY_UNITS}
    cells |= {f"{model},softmax": "" for model in axes["model"]}
    cells["words-units,relu2"] = ""
    content = {
        "title": "Toy",
        "example": "wikitext2",
        "metrics": {"test": ""},
        "axes": axes,
        "cells": cells,
        "seeds": 3,
    }
    # in percent of perplexity, by seed
    gains = {
        ("words-units", "l2"): (1.0, 1.2, 1.4),
        ("masked-units", "l2"): (2.0, 2.1, 1.9),
        ("words-block", "l2 half"): (-3.0, 1.0, 2.0),
        ("masked-block", "l2 half"): (-1.0, -1.1, -0.7),
        ("words-units", "relu2"): (-5.0, -4.0, -5.5),
    }
    gains |= {(model, "softmax"): (0.0, 0.0, 0.0) for model in axes["model"]}
    found = []
    for row, by_seed in gains.items():
        for seed, gain in enumerate(by_seed, start=61):
            loss = 7.0 - 2 * gain / (100 * math.log(2))
            early = {"update": planned.EARLY_UPDATE, "valid_loss": loss}
            run = run_of(row, seed, [early, {"update": 1000, "valid_loss": 1.0}])
            run["labels"] = dict(zip(axes, row))
            run["metrics"] = {"test": 200 * math.exp(-gain / 100)}
            run["measures"] = {"test": "perplexity"}
            found.append(run)
    study = study_of("units", content, found, tmp_path)
    lines = planned.units_table(study).splitlines()[2:]
    assert len(lines) == 5

    def interval(values):
        test = stats.ttest_1samp(values, 0).confidence_interval()
        return f"{statistics.fmean(values):.2f} ({test.low:.2f} to {test.high:.2f})"

    p = {row: stats.ttest_1samp(gains[row], 0).pvalue for row in planned.PRIMARY_UNITS}
    assert min(p, key=p.get) == ("masked-units", "l2")
    smallest = p["masked-units", "l2"]
    twice = [2 * gain for gain in gains["masked-units", "l2"]]
    assert (
        f"| masked-units | l2 | 3 | {interval(gains['masked-units', 'l2'])} | {smallest:.2g} | "
        f"{4 * smallest:.2g} | {interval(twice)} |"
    ) in lines
    (relu2,) = (line for line in lines if "relu2" in line)
    assert f"| {interval(gains['words-units', 'relu2'])} |" in relu2 and " |  | " in relu2
