import csv
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark.py"
spec = importlib.util.spec_from_file_location("benchmark", SCRIPT)
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)

SMALL = "--lengths 32 80 --tokens 160 --heads 2 --head-dim 8 --rounds 2".split()


def rows_in(folder):
    with (folder / "benchmark.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_the_core_is_checked_timed_and_written_down(tmp_path, capsys, dtype):
    benchmark.main(["core", *SMALL, "--dtype", dtype, "--out", str(tmp_path)])
    rows = rows_in(tmp_path)
    contenders = benchmark.cores(0.1)
    assert len(rows) == 2 * 2 * len(contenders)  # lengths, passes
    assert {row["name"] for row in rows} == {core.name for core in contenders}
    for row in rows:
        assert float(row["p20_ms"]) <= float(row["p50_ms"]) <= float(row["p80_ms"])
        assert float(row["ratio"]) > 0
        assert (row["torch"], row["dtype"], row["busy"]) == (torch.__version__, dtype, "false")
    assert {float(row["ratio"]) for row in rows if row["name"] == row["measured_by"]} == {1.0}
    assert (tmp_path / "benchmark.svg").stat().st_size > 1000
    assert "mixhead_plugin: Mixhead B, dropout 0.1" in capsys.readouterr().out


@pytest.mark.parametrize("wrong_by", [0.01, float("nan")])
def test_no_speed_is_told_of_wrong_values(tmp_path, monkeypatch, capsys, wrong_by):
    right = benchmark.attention
    monkeypatch.setattr(benchmark, "attention", lambda *a, **k: right(*a, **k) + wrong_by)
    with pytest.raises(SystemExit, match=r"mixhead_plugin: softmax: output is wrong by .*; nothing is timed"):
        benchmark.main(["core", *SMALL, "--out", str(tmp_path)])
    assert not (tmp_path / "benchmark.csv").exists()
    assert "ms" not in capsys.readouterr().out


def test_no_speed_is_told_of_wrong_gradients(tmp_path, monkeypatch):
    right = benchmark.attention
    monkeypatch.setattr(benchmark, "attention", lambda q, k, v, **o: right(q, k, v.detach() + 0 * v, **o))
    with pytest.raises(SystemExit, match="gradient of value is wrong by"):
        benchmark.main(["core", *SMALL, "--out", str(tmp_path)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrong", [lambda out: out / 2, lambda out: out.roll(1, 1)], ids=["half", "other heads"])
def test_no_speed_is_told_of_wrong_modules(tmp_path, monkeypatch, dtype, wrong):
    from mixhead_plugin.modules import attention as module

    right = module.attention

    def sometimes_wrong(*tensors, impl, **options):
        out = right(*tensors, impl=impl, **options)
        return wrong(out) if impl == "auto" else out

    monkeypatch.setattr(module, "attention", sometimes_wrong)
    command = f"module --tokens 512 --heads 2 --head-dim 8 --rounds 2 --dtype {dtype} --out {tmp_path}"
    with pytest.raises(SystemExit, match=r"mixhead_plugin: .* is wrong by .*; nothing is timed"):
        benchmark.main(command.split())


def test_modules_are_measured_by_fairseqs(tmp_path):
    benchmark.main([*"module --tokens 512 --heads 2 --head-dim 8 --rounds 2 --out".split(), str(tmp_path)])
    rows = rows_in(tmp_path)
    assert {row["measured_by"] for row in rows} == {"fairseq"}
    assert "mixhead_plugin: Mixhead B" in {row["name"] for row in rows}


@pytest.mark.slow
def test_memory_is_that_of_a_fresh_process(tmp_path):
    sizes = "--memory-lengths 1024 --tokens 512".split()
    benchmark.main(["memory", *sizes, "--out", str(tmp_path)])
    rows = rows_in(tmp_path)
    assert {row["level"] for row in rows} == {"core memory", "module memory", "step memory"}
    peak = {(row["name"], row["length"]): float(row["peak_mib"]) for row in rows if row["level"] == "core memory"}
    assert peak["eager: Mixhead B", "1024"] > 8 * 1024**2 * 4 / 2**20  # all weights, at least once
    assert peak["mixhead_plugin: Mixhead B", "1024"] < peak["eager: Mixhead B", "1024"] / 3


@pytest.mark.slow
def test_training_steps_and_decoding_are_measured_by_fairseqs(tmp_path):
    sizes = "--tokens 512 --heads 2 --head-dim 8 --rounds 2 --out".split()
    benchmark.main(["step", "decoding", *sizes, str(tmp_path)])
    assert {row["level"] for row in rows_in(tmp_path)} == {"step", "decoding"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["cores"], "cores: levels are core, module"),
        (["step", "--dtype", "bfloat16"], "--dtype bfloat16: step run in float32"),
        (["--lengths", "0"], "--lengths [0]: must be at least 1"),
        (["--dropout", "2"], "--dropout 2.0: must be between 0 and 1"),
        (["--rounds", "1"], "--rounds 1: percentiles need at least 2"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        pytest.param(
            ["--device", "cuda"],
            "--device cuda: no CUDA device is visible",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_wrong_arguments_are_refused_at_once(capsys, arguments, message):
    with pytest.raises(SystemExit):
        benchmark.main(arguments)
    assert message in capsys.readouterr().err


def test_levels_that_need_fairseq_say_so(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "HAS_FAIRSEQ", False)
    with pytest.raises(SystemExit):
        benchmark.main(["module"])
    assert "module: needs fairseq" in capsys.readouterr().err
    assert benchmark.parse([]).levels == ["core", "memory"]


@pytest.mark.slow
@pytest.mark.parametrize("normalizer", ["softmax", "sigsoftmax", "l2"])
def test_flex_attention_is_told_the_same_formula(normalizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "benchmark", benchmark)  # the compiler looks up what the function uses
    query, key, value = torch.randn(3, 1, 2, 33, 16)
    future = torch.full((33, 33), float("-inf")).triu(1)
    expected = benchmark.eager(query, key, value, None, normalizer, future, 0.0)
    torch.testing.assert_close(benchmark.flex(query, key, value, normalizer), expected)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_gpu_has_more_contenders_each_with_its_measure(dtype):
    on_cpu, on_gpu = benchmark.cores(0.1), benchmark.cores(0.1, "cuda", dtype)
    names = [core.name for core in on_gpu]
    assert on_gpu[: len(on_cpu)] == on_cpu
    assert len(set(names)) == len(names)
    assert {core.provider for core in on_gpu[len(on_cpu) :]} <= set(benchmark.ON_GPU)
    assert {benchmark.baseline(core, "cuda", dtype).name for core in on_gpu} <= set(names)
