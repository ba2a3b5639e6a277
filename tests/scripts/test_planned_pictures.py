"""The pictures of the planned experiments show the numbers of the runs."""

import math

import pytest
from studies import grids, planned_pictures
from studies.study import Study


def study_of(table, axes, runs, tmp_path):
    flags = {}  # of each label, by axis
    for axis, labels in axes.items():
        flags[axis] = {label: f"--{axis} {label}" for label in labels}
    content = {
        "title": "Toy",
        "example": "wikitext2",
        "metrics": {"test": ""},
        "axes": flags,
        "seeds": 3,
        "table": table,
    }
    grid = grids.grid_from(content, tmp_path / "toy.toml")
    return Study("saved", grid, "examples/grids/toy.toml", runs, {})


def run_of(axes, row, seed, losses):
    """Return the run of a row whose validation losses are given in nats, by update."""
    points = [
        {"update": update, "valid_loss": loss / math.log(2)} for update, loss in losses.items()
    ]
    return {
        "labels": dict(zip(axes, row)),
        "seed": seed,
        "metrics": {"test": 1.0},
        "measures": {"test": "perplexity"},
        "points": [{"update": 100, "train_loss": 9.0}, *points],
        "flags": {"--arch": ["mixhead_transformer"]},
    }


def lines_of(panel):
    """Return the lines that have a label: values by update."""
    return {
        line.get_label(): dict(zip(line.get_xdata(), line.get_ydata()))
        for line in panel.lines
        if not line.get_label().startswith("_")
    }


def test_the_gain_of_b_is_that_of_the_longer_branch_and_the_mark_that_of_the_shorter(tmp_path):
    axes = {"heads": ("4", "32"), "attention": ("softmax", "B"), "length": ("1600", "6400")}
    runs = []
    for seed, extra in enumerate((-0.01, 0.0, 0.01), start=41):
        for heads, gain in (("4", 0.02), ("32", 0.08)):
            for length, more in (("1600", 0.5), ("6400", 0.0)):
                softmax = {377: 5.0, 1600: 3.0}
                b = {at: loss - gain - more - extra for at, loss in softmax.items()}
                runs.append(run_of(axes, (heads, "softmax", length), seed, softmax))
                runs.append(run_of(axes, (heads, "B", length), seed, b))
    study = study_of("lasting", axes, runs, tmp_path)
    (panel,) = planned_pictures.draw_lasting(study).axes

    assert lines_of(panel) == {
        "B, 4 heads of 32": pytest.approx({377: 0.02, 1600: 0.02}),
        "B, 32 heads of 4": pytest.approx({377: 0.08, 1600: 0.08}),
    }
    # the marks: the mean over the seeds with its interval
    marks = [bars.lines[0].get_xydata()[0].tolist() for bars in panel.containers]
    assert marks == [pytest.approx([1600, 0.52]), pytest.approx([1600, 0.58])]
    half = 4.302652729911275 * 0.01 / math.sqrt(3)  # t of 2 degrees of freedom, at 97.5 %
    (ends,) = panel.containers[0].lines[2]
    assert ends.get_segments()[0][:, 1].tolist() == pytest.approx([0.52 - half, 0.52 + half])


def test_losses_of_units_and_blocks_are_means_over_the_seeds_a_panel_for_each_task(tmp_path):
    axes = {
        "model": ("words-block", "words-units", "masked-block", "masked-units"),
        "attention": ("softmax", "l2"),
    }
    levels = dict(zip(axes["model"], (5.0, 4.0, 3.0, 2.0)))
    runs = [
        run_of(axes, (model, attention), seed, {400: level + more + seed, 1000: level + more})
        for model, level in levels.items()
        for attention, more in (("softmax", 0.0), ("l2", 0.5))
        for seed in (1, 2, 3)
    ]
    study = study_of("units", axes, runs, tmp_path)
    words, masked = planned_pictures.draw_units(study).axes
    assert words.get_title() == "language model"
    assert lines_of(words) == {
        "block, softmax": pytest.approx({400: 7.0, 1000: 5.0}),
        "block, l2": pytest.approx({400: 7.5, 1000: 5.5}),
        "units, softmax": pytest.approx({400: 6.0, 1000: 4.0}),
        "units, l2": pytest.approx({400: 6.5, 1000: 4.5}),
    }
    assert lines_of(masked)["units, l2"] == pytest.approx({400: 4.5, 1000: 2.5})


def test_the_picture_that_was_registered_is_written_in_place_of_the_general_one(tmp_path):
    axes = {"model": ("words-block", "masked-block"), "attention": ("softmax",)}
    runs = [run_of(axes, (model, "softmax"), 1, {400: 1.0}) for model in axes["model"]]
    study = study_of("units", axes, runs, tmp_path)
    assert planned_pictures.draw_own(study, tmp_path / "units.svg")
    assert "masked language model" in (tmp_path / "units.svg").read_text()
    other = study_of("", axes, runs, tmp_path)
    assert not planned_pictures.draw_own(other, tmp_path / "words.svg")
