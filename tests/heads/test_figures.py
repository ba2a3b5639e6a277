"""Test figures and JSON files."""

import json
import re
import runpy
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch

from mixhead_plugin.fairseq.analysis import output
from mixhead_plugin.heads import figures


def test_matrices_share_one_scale_with_0_in_its_middle():
    panels = [[("A", [[1.0], [2.0, -3.0]]), None], [("B", [[0.0]]), ("C", [[1.0]])]]
    figure = figures.heat_maps(panels, (2, 2), "M", "RdBu_r")
    images = [axes.images[0] for axes in figure.axes[:4] if axes.images]
    assert [image.get_clim() for image in images] == [(-3, 3)] * 3
    np.testing.assert_array_equal(images[0].get_array().filled(np.nan), [[1, np.nan], [2, -3]])
    assert [axes.axison for axes in figure.axes[:4]] == [True, False, True, True]
    assert figures.heat_maps(panels, (2, 2), "M").axes[0].images[0].get_clim() == (-3, 2)


def test_no_two_series_look_alike():
    looks = figures.looks("abcdefghijklmnopqrstuvwxyz")
    assert len({tuple(look.values()) for look in looks.values()}) == len(looks) == 26


def test_a_name_with_a_fixed_colour_has_it_beside_any_other_and_alone():
    fixed = {"one": figures.COLOURS[0], "two": "#999999"}
    found = figures.colours(["a", "one", "b", "two"], fixed)
    assert found == {"a": figures.COLOURS[1], "b": figures.COLOURS[2], **fixed}


def test_only_modules_of_pictures_import_the_style_of_pictures():
    folder = Path(figures.__file__).parent
    modules = [f"mixhead_plugin.heads.{file.stem}" for file in folder.glob("*.py")]
    without_pictures = [name for name in modules if not name.endswith(("figures", "__init__"))]
    program = f"import sys, {', '.join(without_pictures)}; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert set(without_pictures) <= set(loaded)
    assert figures.__name__ not in loaded


def test_an_svg_file_follows_the_dark_theme(tmp_path):
    figure, axes = figures.subplots(1, 1, (2, 2))
    axes[0, 0].plot([0, 1], color=figures.COLOURS[0])
    figures.save_svg(figure, tmp_path / "line.svg")
    svg = (tmp_path / "line.svg").read_text(encoding="utf-8")
    (rules,) = re.findall(r"@media \(prefers-color-scheme: dark\) (.*?)</style>", svg)
    # each selector is a piece of a style that matplotlib has written
    for light, dark in (("fill: #ffffff", "#181d23"), ("stroke: #0072b2", "#4aa8e0")):
        assert re.search(rf'style="[^"]*{light}', svg)
        part = light.partition(":")[0]
        assert f'[style*="{light}"] {{ {part}: {dark} !important }}' in rules
    assert "svg { fill: #e6eaef }" in rules


def test_json_has_versions_flags_and_numbers(tmp_path):
    args = Namespace(
        checkpoint="a.pt", limit=None, cpu=True, model_overrides={"dropout": 0.1}, labels="ä,b"
    )
    args.output = str(tmp_path / "new" / "folder")
    results = {
        "rank": torch.tensor([1.5, float("nan")]),
        "layers": {0: np.float64(2), 1: (np.inf, 3)},
    }
    output.write(args, "spectrum", results, {})
    found = json.loads((tmp_path / "new" / "folder" / "spectrum.json").read_text(encoding="utf-8"))
    assert found["command"] == "spectrum"
    flags = {
        "checkpoint": "a.pt",
        "cpu": True,
        "model_overrides": {"dropout": 0.1},
        "labels": "ä,b",
    }
    assert found["flags"] == {**flags, "output": args.output}
    assert {"mixhead_plugin", "python", "torch", "fairseq"} == set(found["versions"])
    assert found["rank"] == [1.5, None]
    assert found["layers"] == {"0": 2.0, "1": [None, 3]}


def test_matplotlib_is_imported_only_for_a_picture(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it would fail
    runpy.run_path(figures.__file__)  # not `reload`: it would give later tests other functions
