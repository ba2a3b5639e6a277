"""The verdicts are those of the rules in docs/does-it-help.md, whose words and numbers are written here once more."""

import copy
import dataclasses
import math
import statistics

import grids
import pytest
import report
import studies
import verdicts
from scipy import stats

GRID = {
    "title": "Toy",
    "example": "wikitext2",
    "metrics": {"test": ""},
    "axes": {"attention": dict.fromkeys(("softmax", "B", "A", "average", "gate", "longer"), "")},
    "rules": {
        "toy": {
            "best": "softmax", "mixed": ["B", "A"], "average": "average", "gate": "gate", "time": "longer",
            "seeds": 8, "alpha": 0.05, "margin": 0.02, "size": 8,
        }
    },
}  # fmt: skip
NOISE = (0.01, -0.012, 0.004, -0.006, 0.011, -0.007, 0.003, -0.003)


def study_of(tmp_path, spread=1.0, **worse):
    """Return a study in nats; each arm is worse than softmax by so much in the mean, with its own noise."""
    base = {"softmax": 0.0, "B": 0.0, "A": 0.0, "average": 0.5, "gate": 0.0, "longer": 0.0} | worse
    found = []
    for number, (arm, loss) in enumerate(base.items()):
        for seed in range(8):
            value = 3 + seed / 10 + loss + (spread * NOISE[(seed + number) % 8] if arm != "softmax" else 0)
            run = {"labels": {"attention": arm}, "seed": seed, "metrics": {"test": value}, "measure": "nats"}
            found.append(run | {"seconds": 1.0, "versions": {}})
    return studies.Study("toy", grids.checked(copy.deepcopy(GRID), tmp_path / "toy.toml"), "toy.toml", found, {})


def words(study):
    return verdicts.verdict(study, study.grid.rules["toy"])[0]


@pytest.mark.parametrize(
    "worse, said",
    [
        ({"average": 0.0}, "not valid"),  # different heads are worth nothing
        ({"average": 0.02, "spread": 2.0}, "not valid"),  # worth something, but B - softmax is too wide
        ({}, "valid, equivalent"),
        ({"spread": 4.0}, "valid, undecided"),
        ({"B": 0.1}, "valid, undecided"),  # behind
        ({"B": -0.1, "gate": -0.1, "longer": -0.1}, "valid, helps"),
        ({"B": -0.1, "longer": -0.1}, "valid, helps, mixing, not dynamics"),
        ({"B": -0.1, "gate": -0.1}, "valid, helps, useful"),
        ({"B": -0.1}, "valid, helps, mixing, not dynamics, useful"),
    ],
)
def test_the_words_are_those_of_the_rules(worse, said, tmp_path):
    assert ", ".join(words(study_of(tmp_path, **worse))) == said


def test_holms_interval_excludes_0_if_and_only_if_holm_rejects(tmp_path):
    names, alpha = ["B", "A", "gate", "longer"], 0.05
    outcomes = set()
    for shift in (0.004, 0.006, 0.0075, 0.009, 0.012):
        study = study_of(tmp_path, B=-shift, A=-1.3 * shift, gate=shift, longer=-0.8 * shift)
        corrected = verdicts.holm(study, names, "softmax", alpha)
        p = {name: study_p(study, name) for name in names}
        rejected, remaining = set(), sorted(names, key=p.get)
        while remaining and p[remaining[0]] <= alpha / len(remaining):
            rejected.add(remaining.pop(0))
        assert {name for name in names if not corrected[name].low <= 0 <= corrected[name].high} == rejected
        outcomes.add(len(rejected))
    assert len(outcomes) > 1  # some are rejected at one shift and not at another


def study_p(study, name):
    ours, theirs = (study.values((row,), "test") for row in (name, "softmax"))
    return stats.ttest_1samp([ours[seed] - theirs[seed] for seed in ours], 0).pvalue


def test_an_interval_is_that_of_the_paired_t(tmp_path):
    study = study_of(tmp_path, B=-0.1)
    found = verdicts.at_level(study, "B", "softmax", 0.029)
    half = stats.t.ppf(1 - 0.029 / 2, 7) * statistics.stdev(found.values) / math.sqrt(8)
    assert (found.low, found.high) == pytest.approx((0.1 - half, 0.1 + half), abs=1e-3)


def test_nothing_is_told_before_every_row_has_its_seeds(tmp_path):
    study = study_of(tmp_path)
    few = dataclasses.replace(study, runs=study.runs[:-1])  # the last arm lacks one
    assert verdicts.verdicts(few) == ["**toy: not ended.** 7 of 8 seeds have every row.\n"]
    assert "| B | 8 runs |" in report.markdown(few)
    assert "| B | 3." in report.markdown(study)
    (text,) = verdicts.verdicts(study)
    assert "- B over softmax, Holm: +0.0" in text or "- B over softmax, Holm: -0.0" in text
    assert "8 seeds, p " in text
    for role in ("gate", "time"):  # a regime may lack them
        del study.grid.rules["toy"][role]
    assert "gate" not in verdicts.verdicts(study)[0]


def test_the_figure_has_a_line_for_each_mixed_arm(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(verdicts.plt, "close", figures.append)
    verdicts.draw_regimes([study_of(tmp_path)], tmp_path / "x.svg")
    (panel,) = figures[0].axes
    assert sorted(label.get_text() for label in panel.get_yticklabels()) == [
        "toy: A over softmax",
        "toy: B over softmax",
    ]
    verdicts.draw_regimes([study_of(tmp_path, average=0.0)], tmp_path / "x.svg")
    assert all("toy, not valid: " in label.get_text() for label in figures[1].axes[0].get_yticklabels())
    few = study_of(tmp_path).runs[:-1]
    verdicts.draw_regimes([dataclasses.replace(study_of(tmp_path), runs=few)], tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"best": "sofmax"}, "'sofmax' is no point of the grid"),
        ({"mixed": ["B", "C"]}, "'C' is no point of the grid"),
        ({"alpha": "5 %"}, "alpha must be a number"),
        ({"worst": "B"}, "may have best"),
    ],
)
def test_wrong_rules_are_refused(change, said, tmp_path):
    content = GRID | {"rules": {"toy": GRID["rules"]["toy"] | change}}
    with pytest.raises(ValueError, match=said):
        grids.checked(content, tmp_path / "toy.toml")
