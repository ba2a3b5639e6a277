"""What is written is the same for the same numbers, and readable."""

import json
from argparse import Namespace

import numpy as np
import pytest
import torch

from mixhead_plugin.analysis import figures
from mixhead_plugin.analysis.attentions import attentions
from mixhead_plugin.analysis.head_numbers import heat_maps
from mixhead_plugin.analysis.loading import load
from mixhead_plugin.errors import OptionError


def example():
    with figures.style():
        figure, axes = figures.subplots(2, 2, (2, 2))
        figures.heat_map(axes[0, 0], [[1.0, np.nan], [-3.0, 2.0]], diverging=True, title="M")
        image = figures.heat_map(axes[0, 1], figures.ragged([[1.0, 2.0], [3.0]]))
        figures.colour_bar(figure, image, axes[:1], "rank")
        for panel in axes[1]:
            panel.plot([1, 2], [3, 40], **figures.line(0), label="one")
            panel.plot([1, 2], [4, 50], **figures.line(1), label="two")
        figures.logarithmic(axes[1, 1].yaxis)
        figures.legend_below(figure, axes)
        figures.layer_bar(figure, axes[1:], 12)
    return figure


def test_the_same_numbers_are_the_same_bytes(tmp_path):
    first = figures.save(example(), str(tmp_path / "a"), "figure")
    second = figures.save(example(), str(tmp_path / "b" / "c"), "figure")
    assert [path.suffix for path in first] == [".png", ".svg"]
    for one, other in zip(first, second):
        assert one.read_bytes() == other.read_bytes()
    assert "<dc:date>" not in first[1].read_text()


def test_one_legend_has_every_name_once():
    (legend,) = example().legends
    assert [text.get_text() for text in legend.get_texts()] == ["one", "two"]


def test_diverging_colours_have_white_at_0():
    axes = example().axes[0]
    assert axes.images[0].get_clim() == (-3, 3)


def test_series_are_told_apart_by_colour_and_then_by_line():
    looks = [tuple(figures.line(i).values()) for i in range(20)]
    assert len(set(looks)) == len(looks)


def test_rows_of_different_lengths_end_in_blanks():
    np.testing.assert_array_equal(figures.ragged([[1], [2, 3]]), [[1, np.nan], [2, 3]])


def test_an_axis_from_0_has_room_above_the_largest_value():
    panel = example().axes[0]
    figures.from_zero(panel, [0.5, float("nan"), 2.0])
    assert panel.get_ylim() == pytest.approx((0, 2.16))
    figures.from_zero(panel, [0.0])
    assert panel.get_ylim() == (0, 1)


@pytest.mark.parametrize("heads, grid", [(12, (2, 3)), (13, (3, 2))])
def test_panels_of_many_heads_stand_below_each_other(heads, grid, stock_translation_checkpoint):
    model = load(stock_translation_checkpoint, cpu=True).model
    values = {name: {kind: torch.rand(heads) for kind in ("source", "mixed")} for name in attentions(model)}
    figure = heat_maps(model, values, "")
    panels = [axes for axes in figure.axes if axes.get_xlabel() == "head"]
    assert {panel.get_gridspec().get_geometry() for panel in panels} == {grid}
    sites = ("encoder-self", "decoder-self", "cross")
    titles = {f"{site}, {kind} heads" for site in sites for kind in ("source", "mixed")}
    assert {panel.get_title() for panel in panels} == titles


def test_json_has_versions_flags_and_numbers(tmp_path):
    args = Namespace(checkpoint="a.pt", limit=None, cpu=True, model_overrides={"dropout": 0.1}, labels="ä,b")
    results = {"rank": torch.tensor([1.5, float("nan")]), "layers": {0: np.float64(2), 1: (np.inf, 3)}}
    file = figures.save_json(str(tmp_path), "spectrum", args, results)
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["command"] == "spectrum"
    assert found["flags"] == {"checkpoint": "a.pt", "cpu": True, "model_overrides": {"dropout": 0.1}, "labels": "ä,b"}
    assert {"mixhead_plugin", "python", "torch", "fairseq"} == set(found["versions"])
    assert found["rank"] == [1.5, None]
    assert found["layers"] == {"0": 2.0, "1": [None, 3]}


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"--output .*file/sub: "):
        figures.save_json(str(tmp_path / "file" / "sub"), "x", Namespace(), {})
