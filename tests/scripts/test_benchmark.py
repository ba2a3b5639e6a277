"""Benchmarks check results before they time them.

They compare every contender with both yardsticks.
"""

import itertools
import shlex

import benchmark
import pytest
from benchmarks import core, factors, measure, model, module, nanogpt, shares

from mixhead_plugin.fairseq.attention import MixheadAttention

SLOW = ["compiled", "flex"]  # need a compiler, and seconds or minutes for each
TINY = ["--rounds", "2", "--sizes", "3x2x24x8", "--tokens", "64"]


def rows(*words):
    return benchmark.main([*words, *TINY])


REFUSED = {
    "cores": f"cores: cases are {', '.join(benchmark.BENCHES)}",
    "core shares --device cuda": "shares: runs on a CPU only, so leave out --device cuda",
    "shares --dtype bfloat16": "shares: runs in float32 only, so leave out --dtype bfloat16",
    "step --dropout 0": "step: has no such dropout, so leave out --dropout 0",
    "--rounds 0": "--rounds 0: must be at least 1",
    "--tokens 63": "--tokens 63: must be at least 64",
}
for size in ("4x8x512", "axbxcxd", "4x0x512x64", "4x8x512x64x1", ""):
    why = f"{size}: must be four numbers from 1 up, such as 4x8x512x64"
    REFUSED[f"--sizes 4x8x512x64 '{size}'"] = f"argument --sizes: {why}"


@pytest.mark.parametrize("words", REFUSED)
def test_words_that_cannot_be_meant_are_refused_in_one_line(words, capsys):
    with pytest.raises(SystemExit):
        benchmark.parse(shlex.split(words))
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.partition(": error: ")[2] == REFUSED[words]


WITHOUT_CASES = {
    "--device cuda": {"core", "module", "variants", "training", "decoding"},
    "--dtype bfloat16": {"core", "step", "module", "variants", "training", "decoding", "memory"},
    "--dropout 0": {"core", "module", "variants", "memory"},
    "--dropout 0 --device cuda": {"core", "module", "variants"},
    "--dtype float32": {*benchmark.BENCHES},
}


@pytest.mark.parametrize("words", WITHOUT_CASES)
def test_without_cases_all_run_that_take_the_flags(words):
    assert set(benchmark.parse(words.split()).cases) == WITHOUT_CASES[words]


def test_without_words_all_cases_run_in_their_order():
    assert benchmark.parse([]).cases == list(benchmark.BENCHES)


@pytest.fixture(scope="module")
def without_dropout():
    """Return the rows of the core without dropout."""
    return rows("core", "--without", *SLOW, "--dropout", "0")


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_every_contender_is_timed_beside_upstream_and_the_plugins_softmax(dtype, capsys):
    found = rows("core", "--dtype", dtype, "--without", *SLOW)
    expected = {
        (c.name, p)
        for p in (0.0, 0.1)
        for c in core.cores("cpu", dtype, p, SLOW)
        if "checkp" not in c.name
    }
    assert {(row["name"], float(row["size"].split()[-1])) for row in found} == expected
    for row in found:
        assert (
            row["ms_min"] <= row["ms"] <= row["ms_max"]
            and row["by_upstream"] > 0
            and row["by_softmax"] > 0
        )
    assert {row["by_softmax"] for row in found if row["name"] == "auto: softmax"} == {1.0}
    assert "auto: Mixhead B" in capsys.readouterr().out


def test_checkpointing_stands_beside_the_loop_that_it_changes(without_dropout):
    found = {row["name"]: row for row in without_dropout if row["case"] == "core"}
    assert {name for name, row in found.items() if "ms_checkpointed" in row} == {
        f"loop {block}: Mixhead {mixing}" for block in (64, 128, 256) for mixing in "AB"
    }


def test_a_loop_that_is_timed_with_checkpointing_alone_has_a_row_of_its_own():
    names = ["loop 64, checkpointed: Mixhead A", "loop 128: Mixhead A"]
    rows_of_both = [{"name": name, "ms": 1.0, "peak_mib": 2.0} for name in names]
    assert core.beside_checkpointed(rows_of_both) == rows_of_both


def test_the_factors_of_a_mixing_stand_beside_its_matrix():
    found = rows("factors")
    names = {"torch's softmax", factors.SOFTMAX, "low-rank, M built", "low-rank, by factors"}
    assert {(row["name"], row["size"]) for row in found} == {
        (name, f"3x2x24x8, rank {rank}") for name in names for rank in (2, 4)
    }


def test_the_forward_pass_is_timed_alone(without_dropout):
    alone = {row["name"] for row in without_dropout if row["case"] == "core, forward pass alone"}
    assert alone >= {
        "is_causal: softmax",
        "auto: Mixhead A",
        "loop 64: Mixhead B",
        "formula: Mixhead A",
    }


def test_a_share_is_that_of_the_operations_which_a_call_needs(monkeypatch):
    # The product of matrices takes 1 s, each forward pass 1 s, and both passes 3 s.
    durations = [1, *[1, 3] * len(shares.CONTENDERS)]
    steps = []
    for duration in durations:
        steps += [0, duration]  # the clock is read before and after
    clock = itertools.accumulate(itertools.cycle(steps))
    monkeypatch.setitem(shares.CLOCKS, "wall", lambda: next(clock))
    found = {row["name"]: row for row in rows("shares")}
    pairs = 3 * 2 * 24 * 25 / 2  # sentences, heads, and 24 queries that see 1 to 24 keys
    assert found["is_causal: softmax, forward"]["gflop"] == pairs * 2 * (8 + 8) / 1e9
    assert found["blockwise: Mixhead B, backward"]["gflop"] == pairs * 2 * (4 * 8 + 2 * 2) / 1e9
    backward = found["blockwise: Mixhead A, backward"]
    # 2 heads, 2 products, 2 operations a multiplication, 64 queries of a block
    of_machine = 2 * 2 * 2 * 64 * 24 * 8 / 1e9
    assert backward["share_of_mm"] == pytest.approx(backward["gflop"] / 2 / of_machine)


def test_a_step_of_decoding_is_timed_beside_torchs():
    assert {row["name"] for row in rows("step")} == {"torch", "softmax", "Mixhead A", "Mixhead B"}


@pytest.mark.slow
def test_kept_weights_are_in_the_memory_of_a_training_step():
    words = ["layers", "--sizes", "2x8x512x8"]
    found = {row["name"]: row["peak_mib"] for row in benchmark.main(words)}
    kept = 12 * 2 * 8 * 512 * (512 + 64) / 2 * 4 / 2**20
    for letter in "AB":
        more = found[f"Mixhead {letter}, weights kept"] - found[f"Mixhead {letter}, nothing kept"]
        assert abs(more - kept) < 0.2 * kept


TINY_GPT = nanogpt.Sizes(2, 7, 160, 2, 2, 8)  # more positions than a block


@pytest.fixture
def tiny_gpt(monkeypatch):
    monkeypatch.setattr(nanogpt, "SIZES", {"tiny": TINY_GPT})


@pytest.mark.slow
def test_a_training_step_of_nanogpt_has_time_and_memory(tiny_gpt):
    found = rows("nanogpt")
    assert [row["name"] for row in found] == list(nanogpt.CONTENDERS)
    assert all(row["by_upstream"] > 0 and row["peak_mib"] >= 0 for row in found)


@pytest.mark.parametrize("fault", ["loss", "head_mixing"])
def test_no_speed_is_printed_of_a_loop_that_is_not_mixed_alike(fault, tiny_gpt, monkeypatch):
    """The one fault forgets M, the other its gradient."""
    right = nanogpt.loop
    wrong = {
        "loss": lambda call, *rest: right(call._replace(mixing=None), *rest),
        "head_mixing": lambda call, *rest: right(call._replace(mixing=call.mixing.detach()), *rest),
    }
    nanogpt.check(TINY_GPT)
    monkeypatch.setattr(nanogpt, "loop", wrong[fault])
    with pytest.raises(SystemExit, match=f"loop 128: Mixhead A: .*{fault}.* differs from nn.mix"):
        rows("nanogpt")


CASES = {
    "variants": {"fairseq", *module.every_variant()},
    "training": {*model.VARIANTS},
    "decoding": {"fairseq", "softmax", "Mixhead A", "Mixhead B"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_entry_of_the_tables_is_timed(case, monkeypatch):
    layers = (
        "--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16"
    )
    monkeypatch.setattr(model, "TRANSLATION", f"transformer {layers}")
    monkeypatch.setattr(model, "SMALL", model.SMALL.replace("512", "64").replace("2048", "64"))
    assert {row["name"] for row in rows(case)} == CASES[case]


def test_a_ratio_is_of_times_of_the_same_round(monkeypatch):
    times = iter([5, 5, 1, 2, 10, 5, 2, 30])  # of a and b in turn; the first round warms up
    monkeypatch.setattr(measure, "milliseconds", lambda function, clock, filler: next(times))
    a, b = measure.measure(measure.Case("x", "y", {"a": None, "b": None}, "b"), 3, "cpu")
    assert (a["ms"], b["ms"], b["by_upstream"], a["by_softmax"]) == (2, 5, 2.0, 0.5)


@pytest.mark.slow
def test_memory_is_that_of_a_fresh_process(monkeypatch):
    chosen = core.cores("cpu", "float32", 0.1)
    monkeypatch.setattr(core, "cores", lambda *_: [chosen[0], core.Core("auto", "softmax", "B")])
    found = {row["name"]: row["peak_mib"] for row in rows("memory", "--sizes", "1x2x1024x8")}
    assert found.keys() == {"is_causal: softmax", "auto: Mixhead B"} and min(found.values()) > 0


WRONG = {
    "values": (lambda call, right: right(call) + 0.1, "the output is wrong"),
    "NaN": (lambda call, right: right(call) * float("nan"), "a gradient comes from another"),
    "gradients": (
        lambda call, right: right(call._replace(value=call.value.detach() + 0 * call.value)),
        "the gradient of value is wrong",
    ),
}


@pytest.fixture
def spoil(monkeypatch):
    """Return a function that lets a fault into the plugin's attention and returns its message."""

    def spoil(fault):
        function, message = WRONG[fault]
        right = core.attend
        monkeypatch.setattr(
            core, "attend", lambda call, impl: function(call, lambda call: right(call, impl))
        )
        return message

    return spoil


@pytest.mark.parametrize("fault", WRONG)
def test_no_speed_is_printed_of_what_is_wrong(fault, spoil, capsys):
    message = spoil(fault)
    with pytest.raises(SystemExit, match=f"auto: softmax: {message}"):
        rows("core", "--without", *SLOW)
    assert " ms" not in capsys.readouterr().out


def test_no_share_is_printed_of_what_is_wrong(spoil):
    message = spoil("values")
    with pytest.raises(SystemExit, match=f"blockwise: softmax: {message}"):
        rows("shares")


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_no_speed_is_printed_of_a_wrong_update(dtype, monkeypatch):
    right = MixheadAttention.forward
    wrong = lambda self, *a, **k: tuple(  # noqa: E731
        t * 1.1 if t is not None and self.impl != "reference" else t for t in right(self, *a, **k)
    )
    monkeypatch.setattr(MixheadAttention, "forward", wrong)
    tiny = model.SMALL.replace("512", "16").replace("2048", "16").replace("layers 4", "layers 1")
    with pytest.raises(SystemExit, match=r"softmax: (loss|gradient) is wrong"):
        model.case(tiny, 64, 1, 16, "cpu", dtype)


@pytest.mark.gpu
def test_everything_runs_on_a_gpu():
    found = rows("core", "module", "--device", "cuda", "--without", *SLOW)
    assert {row["name"] for row in found} >= {"flash: softmax", "auto: Mixhead B", "fairseq"}
    assert all(row["peak_mib"] > 0 for row in found)
