"""scripts/gpu_report.sh, rehearsed without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_report
import pytest
from benchmarks import gpu
from benchmarks.gpu import check, core

from mixhead_plugin.check.variants import DIMS_OF_MIXING
from mixhead_plugin.ops.triton import support

ROOT = Path(__file__).resolve().parents[2]


SETTINGS = gpu.Settings("cuda", False, Path("compiled"))


def test_the_variants_that_are_timed_are_checked_first_and_then_every_pair():
    names = list(check.named_variants(SETTINGS))
    assert names[: len(check.TIMED)] == [" / ".join(row) for row in check.TIMED]
    rows = [name.split(" / ") for name in names]
    for normalizer in support.KERNEL_NORMALIZERS:
        for mixing in DIMS_OF_MIXING:
            assert any(row[1:3] == [normalizer, mixing] for row in rows)


def test_pairs_cover_every_pair_that_occurs():
    rows = [(a, b, c) for a in "12" for b in "34" for c in "567" if (a, c) != ("1", "7")]
    chosen = check.pairs(rows)
    assert {pair for row in chosen for pair in check.pairs_of(row)} == {
        pair for row in rows for pair in check.pairs_of(row)
    }
    assert len(chosen) < len(rows)


def test_every_timing_has_a_contender_of_each_kind():
    for step in core.TIMINGS:
        batch, heads, length, head_dim = map(int, step.split()[0].split("x"))
        timing = core.Timing(
            (batch, heads, length, head_dim), *step.split()[1:2], float(step.split()[2]), ()
        )
        names = {contender.name for contender in core.contenders(SETTINGS, timing)}
        assert {"triton: Mixhead A", "triton: Mixhead B", "loop 256: Mixhead B"} <= names


RATIOS = {
    "all": (["is_causal", "formula", "triton"], {"by_upstream", "by_softmax"}),
    "without the plugin's softmax": (["is_causal", "formula"], {"by_upstream"}),
    "without torch's attention": (["formula", "triton"], {"by_softmax"}),
    "without both": (["formula"], set()),
}


@pytest.mark.parametrize("case", RATIOS)
def test_a_time_has_no_ratio_to_what_was_left_out(case, monkeypatch):
    providers, ratios = RATIOS[case]
    monkeypatch.setattr(core.core.Inputs, "run", lambda *call: None)
    settings = SETTINGS._replace(device="cpu", quick=True)
    inputs = core.core.Inputs((1, 2, 8, 4), "cpu", "float32")
    right = [core.core.Core(provider) for provider in providers]
    rows = list(core.times(settings, inputs, right, 0.0, "both"))
    assert len(rows) == len(providers)
    for row in rows:
        assert {name for name in row if name.startswith("by_")} == ratios


REFUSED = {
    "part": (["--only", "core", "cor"], "--only cor: parts are machine, check, "),
    "seconds": (["--seconds", "0"], "--seconds 0: must be above 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_flag_is_refused(case, capsys):
    words, message = REFUSED[case]
    with pytest.raises(SystemExit):
        gpu_report.parse(words)
    assert message in capsys.readouterr().err


def test_words_choose_steps_of_a_part_in_their_order():
    only = gpu_report.words_by_part(["core=float16+0.1", "machine"])
    assert list(only) == ["core", "machine"]
    assert gpu_report.chosen(["1 float16", "2 bfloat16 0.1", "3 float32"], only["core"]) == [
        "1 float16",
        "2 bfloat16 0.1",
    ]
    assert gpu_report.chosen(["a", "b"], only["machine"]) == ["a", "b"]


def test_a_word_that_chooses_no_step_is_refused_before_the_first_part(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delattr(gpu_report, "run_part")
    with pytest.raises(SystemExit) as ended:
        gpu_report.main(["--only", "machine", "core=float16+flaot32", f"--out={tmp_path}"])
    assert ended.value.code == (
        "gpu_report.sh: --only core=flaot32: must be in the name of a step, such as 8x8x2048x64 "
        "bfloat16 0.0; 32x8x512x64 bfloat16 0.0; 8x32x2048x8 bfloat16 0.0"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_words_of_the_tests_are_files(tmp_path, monkeypatch):
    given = {}

    def run_part(name, settings, seconds, log, words):
        given[name] = (settings.tests, words)
        return {"title": name, "left_out": "a test", "rows": [], "faults": {}}

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(gpu_report, "run_part", run_part)
    gpu_report.main(["--only", "core=float16", "tests=a.py::b+c.py", f"--out={tmp_path}"])
    files = ("a.py::b", "c.py")
    assert given == {"core": (files, ["float16"]), "tests": (files, [])}


@pytest.mark.parametrize("ending", [None, KeyboardInterrupt], ids=["whole", "Ctrl-C"])
def test_code_is_compiled_into_a_new_folder_that_does_not_stay(ending, tmp_path, monkeypatch):
    """Also for a caller who has caches of his own."""
    found = []

    def run_part(name, *rest):
        for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            folder = Path(os.environ[variable])
            found.append(folder)
            folder.mkdir()
        if ending is not None:
            raise ending
        return {"title": name, "left_out": "a test", "rows": [], "faults": {}}

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "of the caller"))
    monkeypatch.setattr(gpu_report, "run_part", run_part)
    try:
        gpu_report.main(["--only", "core", f"--out={tmp_path}"])
    except KeyboardInterrupt:
        assert ending is KeyboardInterrupt
    assert len(set(found)) == 2
    assert not any(folder.parent.exists() for folder in found)


def test_a_machine_without_a_gpu_is_told_in_one_line(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^gpu_report.sh: .* sees no GPU; .*$"):
        gpu_report.main([])


def test_a_part_that_lacks_a_package_is_left_out_with_a_word(monkeypatch, tmp_path):
    part = gpu.PARTS["training"]._replace(needs="no_such_package")
    monkeypatch.setitem(gpu.PARTS, "training", part)
    found = gpu_report.run_part("training", SETTINGS, 1.0, tmp_path / "log")
    assert found["left_out"] == "needs no_such_package, which is not installed"
    assert "Left out: needs no_such_package" in gpu_report.as_text({"training": found})


def test_a_table_has_every_column_and_empty_cells():
    assert gpu_report.rows_table([{"a": 1.23456}, {"b": "x|y"}]).splitlines() == [
        "| a | b |",
        "| --- | --- |",
        "| 1.23 |  |",
        "|  | x\\|y |",
    ]


@pytest.mark.slow
@pytest.mark.skipif(
    gpu_report.importlib.util.find_spec("triton") is None, reason="needs the package triton"
)
def test_every_part_runs_in_the_interpreter(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHON": sys.executable}
    command = [
        ROOT / "scripts/gpu_report.sh",
        "--quick",
        "--only",
        *gpu.PARTS,
        f"--out={tmp_path}",
        "--seconds=900",
    ]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "interpreter.json").read_text())
    assert report["quick"] and report["parts"].keys() == gpu.PARTS.keys()
    for name, part in report["parts"].items():
        assert name == "tile_compile" or part["rows"], name
    page = (tmp_path / "interpreter.md").read_text()
    assert all(f"## {part.title}" in page for part in gpu.PARTS.values())
    timed = {row["name"] for row in report["parts"]["core"]["rows"]}
    assert timed >= {"FlashAttention-2 in triton: softmax, not causal", "triton: Mixhead B"}
