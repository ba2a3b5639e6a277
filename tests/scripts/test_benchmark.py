import csv
import importlib.util
import warnings
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark.py"
spec = importlib.util.spec_from_file_location("benchmark", SCRIPT)
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)
from benchmarks import cases, core, grid, measuring, wiki103  # noqa: E402  (found where the script is)

SMALL = "--lengths 32 80 --tokens 160 --heads 2 --head-dim 8 --rounds 2".split()


def rows_in(folder):
    with (folder / "benchmark.csv").open() as file:
        return list(csv.DictReader(file))


def measured(rows):
    return [row for row in rows if not row["reason"]]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_the_core_is_checked_timed_and_written_down(tmp_path, capsys, dtype):
    benchmark.main(["core", *SMALL, "--dtype", dtype, "--out", str(tmp_path)])
    rows = rows_in(tmp_path)
    names = {name.name for name in core.cores(0.1)}
    assert {row["name"] for row in rows} == names
    assert [row["name"] for row in rows if row["provider"] == "mixhead_plugin" and row["reason"]] == []
    assert {(row["name"], row["length"], row["passes"]) for row in rows if not row["reason"]} | {
        (row["name"], row["length"], passes) for row in rows if row["reason"] for passes in ("full", "forward")
    } == {(name, length, passes) for name in names for length in ("32", "80") for passes in ("full", "forward")}
    for row in measured(rows):
        assert float(row["p20_ms"]) <= float(row["p50_ms"]) <= float(row["p80_ms"])
        assert float(row["ratio"]) > 0
        assert (row["torch"], row["dtype"], row["busy"]) == (torch.__version__, dtype, "false")
    assert {float(row["ratio"]) for row in measured(rows) if row["name"] == row["measured_by"]} == {1.0}
    assert (tmp_path / "benchmark.svg").stat().st_size > 1000
    told = capsys.readouterr().out
    assert "mixhead_plugin: Mixhead B, dropout 0.1" in told
    assert "not measured (a score_mod sees one head at a time): flex: Mixhead A; flex: Mixhead B" in told


def test_the_columns_of_before_come_first():
    before = "level name batch heads length head_dim passes p20_ms p50_ms p80_ms peak_mib ratio measured_by dtype busy"
    before = [*before.split(), "device", "python", "torch", "fairseq"]
    assert benchmark.write_csv.__globals__["COLUMNS"][: len(before)] == before


@pytest.mark.parametrize("wrong_by", [0.01, float("nan")])
def test_no_speed_is_told_of_wrong_values(tmp_path, monkeypatch, capsys, wrong_by):
    right = core.attention
    monkeypatch.setattr(core, "attention", lambda *a, **k: right(*a, **k) + wrong_by)
    with pytest.raises(SystemExit, match=r"mixhead_plugin: softmax: output is wrong by .*; nothing is timed"):
        benchmark.main(["core", *SMALL, "--out", str(tmp_path)])
    assert not (tmp_path / "benchmark.csv").exists()
    assert "ms" not in capsys.readouterr().out


def test_no_speed_is_told_of_wrong_gradients(tmp_path, monkeypatch):
    right = core.attention
    monkeypatch.setattr(core, "attention", lambda q, k, v, **o: right(q, k, v.detach() + 0 * v, **o))
    with pytest.raises(SystemExit, match="gradient of value is wrong by"):
        benchmark.main(["core", *SMALL, "--out", str(tmp_path)])


TINY_GRID = "--batch 2 --grid-lengths 24 40 --grid-head-dims 4 8 --heads 2 --rounds 2 --device cpu".split()


def test_the_grid_has_every_size_in_one_file(tmp_path):
    benchmark.main(["grid", *TINY_GRID, "--dtype", "bfloat16", "--out", str(tmp_path)])
    rows = rows_in(tmp_path)
    sizes = {(row["batch"], row["heads"], row["length"], row["head_dim"]) for row in measured(rows)}
    assert sizes == {("2", "2", n, d) for n in ("24", "40") for d in ("4", "8")}
    assert {row["provider"] for row in rows} == {"torch", "flash", *grid.PROVIDERS}
    assert {row["name"] for row in rows} == {c.name for c in grid.cores(0.1, grid.PROVIDERS)}
    blockwise = [row for row in measured(rows) if row["provider"] == "blockwise"]
    assert {row["measured_by"] for row in blockwise} == {
        "torch: softmax, is_causal",
        "torch: softmax, is_causal, dropout 0.1",
    }
    for row in measured(rows):
        speedup = row["speedup_over_eager"]
        if row["provider"] == "eager":
            assert float(speedup) == 1
        else:  # the formula with dropout is not in the grid
            assert (float(speedup) > 0) if "dropout" not in row["name"] else speedup == ""
    assert grid.UNTIMED not in {row["reason"] for row in rows}
    (why,) = {row["reason"] for row in rows if row["provider"] == "triton"}
    assert why == ("needs --device cuda" if torch.cuda.is_available() else "needs a CUDA device and none is visible")
    assert (tmp_path / "benchmark.svg").stat().st_size > 1000


def test_one_that_is_wrong_is_not_timed_and_fails_the_command_but_not_the_others(tmp_path, monkeypatch, capsys):
    right = core.attention

    def wrong(*tensors, **options):
        if options["normalizer"] == "l2":
            raise TypeError("no such kernel\nand much more")
        return right(*tensors, **options) * (1 if options["mixing"] is None else 1.1)

    monkeypatch.setattr(core, "attention", wrong)
    command = ["grid", *TINY_GRID, "--grid-lengths", "24", "--grid-head-dims", "4", "--providers", "blockwise"]
    with pytest.raises(SystemExit, match="5 failed: blockwise: l2; blockwise: Mixhead A; "):
        benchmark.main([*command, "--out", str(tmp_path)])
    rows = {(row["name"], row["passes"]): row for row in rows_in(tmp_path)}
    assert rows["blockwise: l2", ""]["reason"] == "failed: TypeError: no such kernel"
    assert rows["blockwise: Mixhead A", ""]["reason"].startswith("failed: blockwise: Mixhead A: output is wrong by")
    assert float(rows["blockwise: sigsoftmax", "full"]["p50_ms"]) > 0
    assert ("blockwise: Mixhead A", "full") not in rows


@pytest.mark.parametrize("stopped", ["while it checks", "while it times"])
def test_a_grid_that_is_stopped_keeps_what_it_had(tmp_path, monkeypatch, stopped):
    def stop_at(number, module, name):
        function, calls = getattr(module, name), []

        def counted(*arguments):
            calls.append(arguments)
            if len(calls) == number:
                raise KeyboardInterrupt
            return function(*arguments)

        monkeypatch.setattr(module, name, counted)

    command = ["grid", *TINY_GRID, "--grid-head-dims", "4", "--providers", "blockwise", "triton"]
    if stopped == "while it checks":
        stop_at(3, grid, "refusal")  # two by torch, and blockwise
    else:
        stop_at(2, grid, "measure")
    with pytest.raises(KeyboardInterrupt):
        benchmark.main([*command, "--out", str(tmp_path)])
    rows = rows_in(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["benchmark.csv"]
    done = {row["name"] for row in measured(rows)}
    right = {row["name"]: row["length"] for row in rows if row["reason"] == grid.UNTIMED}
    if stopped == "while it checks":
        assert not done and right == dict.fromkeys(
            ("torch: softmax, is_causal", "torch: softmax, is_causal, dropout 0.1"), "24"
        )
        assert len(rows) == 4  # and FlashAttention, which a CPU has not
    else:
        chosen = {core_.name for core_ in grid.cores(0.1, ["blockwise"]) if core_.provider != "flash"}
        assert done == chosen and right == dict.fromkeys(chosen, "40")
        assert {row["length"] for row in measured(rows)} == {"24"}


def test_a_level_that_is_left_out_has_a_row_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "HAS_FAIRSEQ", False)
    sizes = ["--grid-lengths", "24", "--grid-head-dims", "4", "--providers", "blockwise"]
    benchmark.main(["gpu", *TINY_GRID, *sizes, "--out", str(tmp_path)])
    rows = rows_in(tmp_path)
    left_out = [(row["level"], row["name"], row["reason"]) for row in rows if row["level"] != "grid"]
    why = "needs fairseq, which is not installed"
    assert left_out == [("module", "everything", why), ("wiki103", "everything", why)]
    assert measured(rows)


def inputs_of_three():
    inputs = core.CoreInputs(cases.Shape(3, 2, 40, 8), "cpu", torch.float32)
    inputs.sentences = [0, 2]
    return inputs


@pytest.mark.parametrize("core_", [core.Core("mixhead_plugin", *v) for v in core.VARIANTS], ids=lambda c: c.name)
@pytest.mark.parametrize("sentence", [0, 2])
def test_the_check_of_some_sentences_sees_all_that_is_in_them(monkeypatch, core_, sentence):
    inputs = inputs_of_three()
    inputs.check(core_)
    right = core.attention

    def wrong(*tensors, **options):
        out = right(*tensors, **options)
        factor = torch.ones_like(out)
        factor[sentence, 1, 17] = 1.01  # one query of one head
        return out * factor

    monkeypatch.setattr(core, "attention", wrong)
    with pytest.raises(SystemExit, match="output is wrong by"):
        inputs.check(core_)


def test_the_check_of_some_sentences_refuses_gradients_from_elsewhere(monkeypatch):
    right = core.attention
    monkeypatch.setattr(core, "attention", lambda q, k, v, **o: right(q, k, v, **o) + 1e-9 * v.sum())
    with pytest.raises(SystemExit, match="gradient of value is not 0 where nothing depends on the input"):
        inputs_of_three().check(core.Core("mixhead_plugin"))


@pytest.mark.parametrize("chunk", [100, 2**20])
def test_chunks_of_queries_give_what_the_whole_gives(monkeypatch, chunk):
    from benchmarks import checks

    monkeypatch.setattr(checks, "_CHUNK", chunk)
    inputs = core.CoreInputs(cases.Shape(2, 2, 21, 4), "cpu", torch.float64)
    for variant in core.VARIANTS:
        expected = inputs.with_gradients(core.Core("eager", *variant))
        got = checks.exact_causal(core.eager, inputs.of(core.Core("eager", *variant)), variant[0], inputs.d_output)
        for one, other in zip(got, expected):
            torch.testing.assert_close(one, other)


def test_long_batches_are_checked_in_their_first_and_last_sentence():
    from benchmarks.checks import sentences_to_check

    assert sentences_to_check(4, 8, 512) == [0, 1, 2, 3]
    assert sentences_to_check(16, 8, 4096) == [0, 15]


def test_memory_is_beside_that_of_flash_attention_with_and_without_the_statistics():
    shape = cases.Shape(16, 8, 1024, 64)
    names = ["flash: softmax, is_causal", "triton: sigsoftmax", "triton: Mixhead B", "triton: Mixhead A"]
    times = {name: {"full": [1.0, 2.0], "forward": [1.0, 1.0]} for name in names}
    rows = measuring.rows_of("grid", shape, times, dict.fromkeys(names, names[0]))
    peaks = dict(
        zip(names, (dict(full=full, forward=40.0 if full < 150 else 60.0) for full in (100.0, 110.0, 150.0, 120.0)))
    )
    grid.add_memory(rows, peaks, 20.0)
    found = {(row["name"], row["passes"]): row for row in rows}
    assert found["triton: Mixhead B", "full"]["memory_ratio"] == 1.5
    assert found["triton: Mixhead B", "full"]["memory_ratio_statistics"] == 1.25
    assert found["triton: Mixhead B", "forward"]["memory_ratio"] == 1.5
    assert "memory_ratio_statistics" not in found["triton: Mixhead B", "forward"]
    assert found["triton: Mixhead A", "full"]["memory_ratio"] == 1.2
    for name in ("triton: sigsoftmax", "triton: Mixhead A"):  # which hold no such gradient
        assert "memory_ratio_statistics" not in found[name, "full"]


def test_how_much_faster_than_the_formula_of_the_same_variant():
    shape = cases.Shape(16, 8, 1024, 64)
    chosen = [core.Core("flash", causal_flag=True), core.Core("eager"), core.Core("eager", mixing="B")]
    chosen += [core.Core("triton", mixing="B"), core.Core("triton", mixing="A")]
    times = dict(zip([c.name for c in chosen], [dict(full=[ms] * 3) for ms in (1.0, 3.0, 8.0, 2.0, 2.0)]))
    rows = measuring.rows_of("grid", shape, times, {c.name: grid.baseline(c, "cuda").name for c in chosen})
    grid.add_speedups(rows, times, chosen)
    found = {row["name"]: row.get("speedup_over_eager") for row in rows}
    assert found == {
        "flash: softmax, is_causal": 3.0,
        "eager: softmax": 1.0,
        "eager: Mixhead B": 1.0,
        "triton: Mixhead B": 4.0,
        "triton: Mixhead A": None,
    }


def test_what_has_no_measure_has_no_ratio():
    shape = cases.Shape(1, 1, 1, 1)
    (row,) = measuring.rows_of("grid", shape, {"triton: l2": {"full": [1.0, 2.0]}}, {"triton: l2": "flash: softmax"})
    assert "ratio" not in row and row["p50_ms"] == 1.5


TINY_STEP = [
    *"--device cpu --rounds 2 --step-batch 2 --step-tokens 24 --vocabulary 100 --step-flags".split(),
    "--decoder-layers 2 --decoder-embed-dim 32 --decoder-ffn-embed-dim 64 --decoder-attention-heads 2 "
    "--adaptive-input-cutoff 20,60 --adaptive-softmax-cutoff 20,60",
]


def test_training_steps_of_wikitext_103_are_measured_in_tokens(tmp_path):
    benchmark.main(["wiki103", *TINY_STEP, "--step-dtypes", "bfloat16", "float16", "--out", str(tmp_path)])
    rows = rows_in(tmp_path)
    assert {row["name"] for row in rows} == set(wiki103.VARIANTS)
    done = measured(rows)
    assert {row["name"] for row in done} == {"fairseq", "mixhead_plugin: Mixhead A", "mixhead_plugin: Mixhead B"}
    assert {row["dtype"] for row in done} == {"bfloat16"}
    assert {(row["batch"], row["heads"], row["length"], row["head_dim"]) for row in done} == {("2", "2", "24", "16")}
    for row in done:
        assert float(row["tokens_per_second"]) == pytest.approx(2 * 24 / float(row["p50_ms"]) * 1e3, rel=1e-2)
    reasons = {row["reason"] for row in rows if row["dtype"] == "float16"}
    assert reasons == {"fairseq trains in float16 on a GPU alone"}
    assert all(row["reason"] for row in rows if row["name"].endswith(", triton"))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_no_speed_is_told_of_wrong_training_steps(tmp_path, monkeypatch, dtype):
    from mixhead_plugin.modules import attention as module

    right = module.attention

    def wrong(*tensors, impl, **options):
        out = right(*tensors, impl=impl, **options)
        return out if impl == "reference" else out * 1.2

    monkeypatch.setattr(module, "attention", wrong)
    monkeypatch.delitem(wiki103.VARIANTS, "mixhead_plugin: Mixhead A")
    with pytest.raises(SystemExit, match="1 failed: mixhead_plugin: Mixhead B"):
        benchmark.main(["wiki103", *TINY_STEP, "--step-dtypes", dtype, "--out", str(tmp_path)])
    assert [row["name"] for row in measured(rows_in(tmp_path))] == ["fairseq"]


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
    assert {row["measured_by"] for row in measured(rows)} == {"fairseq"}
    assert {row["name"] for row in rows if row["reason"]} == {
        f"mixhead_plugin: {mixing}, triton" for mixing in ("no mixing", "Mixhead A", "Mixhead B")
    }
    assert "mixhead_plugin: Mixhead B" in {row["name"] for row in rows}


@pytest.mark.slow
def test_memory_is_that_of_a_fresh_process(tmp_path):
    sizes = "--memory-lengths 1024 --tokens 512".split()
    benchmark.main(["memory", *sizes, "--out", str(tmp_path)])
    rows = rows_in(tmp_path)
    assert {row["level"] for row in rows} == {"core memory", "module memory", "step memory"}
    assert all(row["reason"] for row in rows if "triton" in row["name"])
    rows = measured(rows)
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
        (["cores"], "cores: levels are grid, core, module"),
        (["gpu", "core"], "gpu core: gpu stands for grid, module, wiki103, and alone"),
        (["grid", "--batch", "0"], "--batch 0: must be at least 1"),
        (["grid", "--providers", "trition"], "invalid choice: 'trition'"),
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


def test_gpu_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        benchmark.main(["gpu"])
    assert "--device cuda: no CUDA device is visible; with --device cpu, what needs one" in capsys.readouterr().err
    options = benchmark.parse(["gpu", "--device", "cpu", "--rounds", "5"])
    assert (options.levels, options.dtype, options.rounds) == (["grid", "module", "wiki103"], "bfloat16", 5)
    assert (options.batch, options.grid_lengths, options.grid_head_dims) == (16, [1024, 4096], [64, 128])


def test_levels_that_need_fairseq_say_so(monkeypatch, capsys):
    monkeypatch.setattr(cases, "HAS_FAIRSEQ", False)
    with pytest.raises(SystemExit):
        benchmark.main(["module"])
    assert "module: needs fairseq" in capsys.readouterr().err
    options = benchmark.parse([])
    assert options.levels == ["core", "memory"]
    assert options.left_out == dict.fromkeys(["module", "step", "decoding"], "needs fairseq, which is not installed")
    assert benchmark.parse(["--dtype", "bfloat16"]).left_out["step"].startswith("needs fairseq")


@pytest.mark.slow
@pytest.mark.parametrize("normalizer", ["softmax", "sigsoftmax", "l2"])
def test_flex_attention_is_told_the_same_formula(normalizer):
    query, key, value = torch.randn(3, 1, 2, 33, 32)
    future = torch.full((33, 33), float("-inf")).triu(1)
    expected = core.eager(query, key, value, None, normalizer, future, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        torch.testing.assert_close(core.flex(query, key, value, normalizer), expected)


@pytest.mark.slow
@pytest.mark.parametrize("variant", core.VARIANTS)
def test_the_formula_is_compiled_as_a_whole_and_right(variant):
    core.CoreInputs(cases.Shape(2, 2, 48, 16), "cpu", torch.float32).check(core.Core("compiled", *variant))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_gpu_has_more_contenders_each_with_its_measure(dtype, monkeypatch):
    monkeypatch.setattr(core, "triton_problem", lambda device: "")  # as with a GPU
    on_cpu, on_gpu = ([c for c in core.cores(0.1) if not core.problem(c, device, dtype)] for device in ("cpu", "cuda"))
    assert {c.provider for c in on_cpu} >= {"torch", "eager", "mixhead_plugin"}
    assert {c.provider for c in on_gpu} >= {"torch", "eager", "mixhead_plugin", "compiled", "flex", "triton"}
    assert ("flash" in {c.provider for c in on_gpu}) == (dtype == "bfloat16")
    names = [c.name for c in on_gpu]
    assert len(set(names)) == len(names)
    assert {core.baseline(c, "cuda", dtype).name for c in on_gpu} <= set(names)


def test_the_grid_on_a_gpu_lacks_only_what_cannot_be(monkeypatch):
    monkeypatch.setattr(core, "triton_problem", lambda device: "")  # as with a GPU
    chosen = grid.cores(0.1, grid.PROVIDERS)
    lacking = {c.name for c in chosen if core.problem(c, "cuda", "bfloat16")}
    assert lacking == {"flex: Mixhead A", "flex: Mixhead B"}
    plain = {c.name for c in chosen if not c.dropout_p}
    for provider in grid.PROVIDERS:
        assert {f"{provider}: {v}" for v in ("softmax", "sigsoftmax", "l2", "Mixhead A", "Mixhead B")} <= plain
    assert {grid.baseline(c, "cuda").name for c in chosen} <= {c.name for c in chosen}
    (alone,) = {c.provider for c in grid.cores(0.1, ["triton"])} - {"flash", "torch"}
    assert alone == "triton"


@pytest.mark.gpu
def test_the_grid_on_a_gpu(tmp_path):
    sizes = "--batch 2 --grid-lengths 256 --grid-head-dims 64 --heads 8 --rounds 3".split()
    providers = "--providers eager blockwise triton".split()
    benchmark.main(["grid", *sizes, *providers, *"--device cuda --dtype bfloat16 --out".split(), str(tmp_path)])
    rows = rows_in(tmp_path)
    assert [row["name"] for row in rows if row["reason"]] == []
    assert {row["provider"] for row in rows} == {"torch", "flash", "eager", "blockwise", "triton"}
    for row in rows:
        assert float(row["p50_ms"]) > 0 and float(row["peak_mib"]) > 0 and float(row["memory_ratio"]) > 0
