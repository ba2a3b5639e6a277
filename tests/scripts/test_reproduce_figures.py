"""What is drawn is what was measured."""

import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "scripts")]

from reproduction import figures, front_page, report, results, samples  # noqa: E402
from test_reproduce_claims import BASE, study  # noqa: E402

from mixhead_plugin.analysis import figures as style  # noqa: E402

AXES = {"heads": ["4", "32"], "attention": ["softmax", "A"]}
BLEU = {
    ("4", "softmax"): [30.0, 31.0, 32.0], ("4", "A"): [30.5, 31.3, 32.6],
    ("32", "softmax"): [20.0, 21.0, 22.0], ("32", "A"): [22.0, 23.5],
}  # fmt: skip
PUBLISHED = {"4/softmax": "34.76", "4/A": "33.84", "32/softmax": "32.60", "32/A": "32.58"}


def panel():
    return style.subplots(1, 1, (4, 3))[1][0][0]


def drawn(container):
    """The ys of a line with error bars, and half the lengths of the bars that can be seen."""
    line, _, (bars,) = container.lines
    halves = [(segment[1][1] - segment[0][1]) / 2 for segment in bars.get_segments() if len(segment)]
    return list(line.get_ydata()), [half for half in halves if not math.isnan(half)]


def test_a_line_for_each_attention_has_means_and_deviations():
    found = panel()
    figures.means(style, found, study(BLEU, "table4", AXES, "BLEU", "higher"))
    softmax, mixed = map(drawn, found.containers)
    assert softmax == (pytest.approx([31, 21]), pytest.approx([1, 1]))
    assert mixed[0] == pytest.approx([31.4667, 22.75], abs=1e-4) and mixed[1][1] == pytest.approx(math.sqrt(1.125))
    assert [text.get_text() for text in found.get_xticklabels()] == ["4", "32"]
    xs = [container.lines[0].get_xdata() for container in found.containers]
    assert all(a < b for a, b in zip(*xs))  # beside one another


def test_gains_have_the_interval_of_their_mean_and_the_papers_beside():
    found = panel()
    figures.gained(style, found, study(BLEU, "table4", AXES, "BLEU", "higher", published=PUBLISHED))
    (container,) = found.containers
    ys, halves = drawn(container)
    assert ys == pytest.approx([0.4667, 2.25], abs=1e-4)
    assert halves == pytest.approx([samples.sample([0.5, 0.3, 0.6]).margin])  # two seeds have none
    (paper,) = (line for line in found.lines if line.get_fillstyle() == "none")
    assert list(paper.get_ydata()) == pytest.approx([33.84 - 34.76, 32.58 - 32.60])


def test_gains_of_unmixed_decoding_are_crosses():
    values = {row: {"test": found, "test unmixed": [v - 1 for v in found]} for row, found in BLEU.items()}
    for heads in AXES["heads"]:
        values[heads, "softmax"]["test unmixed"] = values[heads, "softmax"]["test"]
    found = panel()
    figures.gained(style, found, study(values, "table4", AXES, "BLEU", "higher", published=PUBLISHED))
    (crosses,) = (c for c in found.containers if c.lines[0].get_marker() == "x")
    ys, halves = drawn(crosses)
    assert ys == pytest.approx([0.4667 - 1, 2.25 - 1], abs=1e-4)
    assert halves == pytest.approx([samples.sample([0.5, 0.3, 0.6]).margin])


def test_the_intervals_of_unmixed_decoding_do_not_set_the_scale():
    base, mixed = [30.0, 31.0, 32.0], [30.9, 32.0, 33.1]
    values = {"softmax": {"test": base, "test unmixed": base}, "A": {"test": mixed, "test unmixed": [20.0, 31.0, 39.0]}}
    found = panel()
    figures.gained(style, found, study(values, "table4", measure="BLEU", better="higher"))
    low, high = found.get_ylim()
    assert -1.6 < low < -1 < 1.25 < high < 1.5  # from the mean of what is unmixed to the end of what is mixed


def test_rows_without_an_axis_of_numbers_are_points():
    found = panel()
    made_up = study({"softmax": BASE, "A": [99.0, 103.0, 100.0]})
    figures.means(style, found, made_up)
    assert drawn(found.containers[0])[0] == pytest.approx([102, 302 / 3])
    assert [text.get_text() for text in found.get_xticklabels()] == ["softmax", "A"]


def test_files_are_the_same_for_the_same_numbers(tmp_path):
    studies = [study(BLEU, "table4", AXES, "BLEU", "higher"), study(BLEU, "table4", AXES, "BLEU", "higher", "full")]
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        assert {path.name for path in figures.draw(studies, folder)} == {"table4.png", "table4.svg"}
    drawn = (folders[0] / "table4.svg").read_text()
    assert drawn == (folders[1] / "table4.svg").read_text()
    assert results.mark(studies) in drawn and results.mark(studies[:1]) not in drawn
    assert results.are_drawn(studies, folders[0]) and not results.are_drawn(studies[:1], folders[0])
    assert not results.are_drawn(studies, tmp_path)


# ---- the README's table ----------------------------------------------------------------------------------------------


def of_all(rows):
    """Fields of every run of the rows, by seed."""
    found = {"parameters": [1_200_000, 1_400_000, 1_520_000], "updates": [800, 1000, 900], "device": ["a CPU"] * 3}
    return {name: {(row,): of_row for row in rows} for name, of_row in found.items()}


def test_the_front_page_leaves_out_what_has_too_few_seeds(monkeypatch):
    def spectrum(rank):
        return {"length": 8, "windows": 4, "places": {"decoder": {"mean_effective_rank": rank, "mean_cumulative": []}}}

    gained = {"softmax": 0, "A": 1, "B": 2, "random": -1, "average": 0}
    values = {row: [base - gain for base in BASE] for row, gain in gained.items()}
    ranks = {(row,): [spectrum(4 + gain + seed / 4) for seed in range(3)] for row, gain in gained.items()}
    axes = {"heads": ["4", "64"], "attention": ["softmax", "A"]}
    bleu = {("64", row): BASE for row in axes["attention"]} | {("4", row): BASE[:1] for row in axes["attention"]}

    def page(*studies):
        monkeypatch.setattr(results, "studies", lambda folder: studies)
        return front_page.table(Path())

    def caption(*studies):
        page(*studies)
        return " ".join(front_page.caption(Path()).split())

    sizes = of_all(values)
    language = study(values, spectrum=ranks, **sizes)
    translation = study(bleu, "table4", axes, "BLEU", "higher")
    heads, softmax, mixed, _, random, _ = page(translation, language)
    texts = ["WikiText-2, 16 heads of 8, 128 tokens: perplexity", "Multi30k De-En, 64 heads of 2: BLEU"]
    assert heads == ["attention", *texts, "WikiText-2, 128 tokens: effective rank"]
    assert softmax[1:] == ["102.0 ± 2.0", "102.0 ± 2.0", "4.2 ± 0.2"]
    assert mixed[1].startswith("101.0 ± 2.0; gain +1.0 [") and mixed[2] == "102.0 ± 2.0; gain +0.0 [+0.0, +0.0]"
    assert random[1].startswith("103.0 ± 2.0; gain -1.0 [") and random[2] == ""
    fewer = study({**bleu, ("64", "A"): BASE[:2]}, "table4", axes, "BLEU", "higher")
    for studies in ([language, fewer], [language, translation._replace(scale="full")], [language]):
        assert page(*studies)[0] == ["attention", texts[0], heads[-1]]
    assert page(study(values))[0] == ["attention", texts[0]]
    assert page()[0] == ["attention"] and caption() == ""
    start = "Small models: 1.2 to 1.5 million parameters after 800 to 1,000 updates (a CPU), 3 seeds. "
    assert caption(language).startswith(start)
    assert "effective rank" in caption(language) and "effective rank" not in caption(study(values, **sizes))


def test_the_front_page_says_what_unmixed_decoding_costs(monkeypatch):
    values = {row: {"test": [30.0, 31.0, 32.0], "test unmixed": [29.0, 29.5, 30.9]} for row in ("softmax", "A", "B")}
    found = study(values, "table4", measure="BLEU", better="higher", **of_all(values))
    language = study({"softmax": BASE, "A": BASE}, **of_all(["softmax", "A"]))
    monkeypatch.setattr(results, "studies", lambda folder: [found, language])
    cost = samples.sample([1.0, 1.5, 1.1])
    low, high = cost.mean - cost.margin, cost.mean + cost.margin
    assert f" lose 1.2 [{low:.1f}, {high:.1f}] BLEU, " in " ".join(front_page.caption(Path()).split())
    two = study({row: {m: v[:2] for m, v in of_row.items()} for row, of_row in values.items()}, "table4")
    monkeypatch.setattr(results, "studies", lambda folder: [two, language])
    assert "unmixed" not in front_page.caption(Path())


def test_the_front_page_has_costs_once_all_rows_have_them(monkeypatch):
    cost = {"seconds_per_update": 0.512, "peak_memory_mib": 840.4}
    cost |= {"time_ratios": [1.236, 1.1, 1.5], "memory_ratios": [1.05, 1.2, 1.0]}
    found = study(dict.fromkeys(front_page.ROWS, BASE), **of_all(front_page.ROWS))
    monkeypatch.setattr(results, "studies", lambda folder: [found])
    rows = [{"labels": [row], **cost} for row in front_page.ROWS]
    found.part["cost"] = {"rows": rows}
    heads, *table = front_page.table(Path())
    assert heads[2:] == ["WikiText-2, 128 tokens: seconds per update", "WikiText-2, 128 tokens: peak MiB"]
    assert [row[2:] for row in table] == [["0.51 (1.24; 1.10 to 1.50)", "840 (1.05; 1.00 to 1.20)"]] * 5
    assert "Seconds and memory are" in front_page.caption(Path())
    without_ratios = {name: value for name, value in rows[-1].items() if name != "memory_ratios"}
    for some in (rows[:-1], [*rows[:-1], without_ratios]):
        found.part["cost"] = {"rows": some}
        assert len(front_page.table(Path())[0]) == 2 and "Seconds" not in front_page.caption(Path())


def trained(updates, gained, table, axes=None, **flags):
    """Softmax and A, whose perplexity is lower by `gained` percent, after so many updates."""
    names = ("softmax", "A") if axes is None else (("128", "softmax"), ("128", "A"))
    losses = dict(zip(names, (0, gained)))
    rows = {row if isinstance(row, tuple) else (row,): row for row in names}
    recipes = {
        row: [
            {"--max-update": [f"{updates}"], "--seed": [f"{i}"], "--head-mixing": [row[-1]], **flags} for i in range(3)
        ]
        for row in rows
    }
    about = {"updates": updates, "parameters": 1_400_000, "device": "a CPU"}
    fields = {name: {row: [value] * 3 for row in rows} for name, value in about.items()}
    values = {name: [base * (1 - loss / 100) for base in BASE] for name, loss in losses.items()}
    return study(values, table, axes, train=recipes, **fields)


def test_gains_of_the_same_model_are_told_after_fewer_and_more_updates(monkeypatch):
    axes = {"tokens": ["128"], "attention": ["softmax", "A"]}
    whole, half = trained(1000, 1, "table7"), trained(500, 3, "table9", axes)
    (section,) = report.longer([whole, half])
    assert "- table9 128/A, table7 A: +3.05 [" in section and section.count("\n- ") == 1
    assert section.index("% after 500 updates; +1.01 [") < section.index("% after 1,000 updates\n")
    monkeypatch.setattr(results, "studies", lambda folder: [whole, half])
    caption = " ".join(front_page.caption(Path()).split())
    assert "At 128 tokens the gains are: Mixhead A +3.0 % after 500 and +1.0 % after 1,000 updates." in caption
    other = trained(500, 3, "table9", axes, **{"--lr": ["1"]})
    for studies in ([whole], [whole, other], [whole, half._replace(scale="full")]):
        assert report.longer(studies) == []


# ---- spectra ---------------------------------------------------------------------------------------------------------


def test_a_spectrum_has_a_panel_for_each_place_and_a_curve_for_each_attention():
    """The mean over the seeds; five curves of five lines."""
    rows = ["softmax", "A", "B", "random", "average"]
    sites = {"encoder-self": [0.5, 0.8, 1.0], "decoder-self": [0.4, 0.9, 1.0]}

    def spectrum(i):
        found = {
            site: {"mean_effective_rank": 2 + i / 4, "mean_cumulative": [share - i / 100 for share in curve]}
            for site, curve in sites.items()
        }
        return {"length": 3, "windows": 4, "places": found}

    found = study(dict.fromkeys(rows, BASE), spectrum={(row,): [spectrum(i) for i in range(3)] for row in rows})
    figure = figures.spectrum(style, [found])
    panels = [panel for panel in figure.axes if panel.lines]
    assert [panel.get_title() for panel in panels] == list(sites)
    for panel, curve in zip(panels, sites.values()):
        assert [line.get_label() for line in panel.lines] == [f"{row}: 2.2" for row in rows]
        assert len({str(line._dash_pattern) for line in panel.lines}) == 5
        for line in panel.lines:
            assert list(line.get_ydata()) == pytest.approx([share - 0.01 for share in curve])
