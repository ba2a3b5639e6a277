"""Test the report on a machine."""

import json

import pytest
import torch

from mixhead_plugin import __main__, check
from mixhead_plugin.ops import NORMALIZERS, accuracy, api
from mixhead_plugin.ops.call_kinds import CallKind
from mixhead_plugin.ops.triton import support


@pytest.fixture
def report(monkeypatch, capsys):
    """Return the exit status and the text of `mixhead check` over a part of the variants."""
    monkeypatch.setattr(
        check, "NORMALIZERS", {name: NORMALIZERS[name] for name in ("softmax", "l2")}
    )
    names = ("causal", "mask by head", "sink, causal")
    monkeypatch.setattr(check, "MASKS", {name: check.MASKS[name] for name in names})
    monkeypatch.setattr(accuracy, "DRAWS", 2)
    monkeypatch.setattr(check, "ROWS", 16)  # two draws of 8 heads
    monkeypatch.setattr(check, "speed", lambda device: {"torch's attention": 1.0})

    def run(*flags):
        monkeypatch.setattr("sys.argv", ["mixhead", "check", "--device", "cpu", *flags])
        status = __main__.main()
        said = capsys.readouterr()
        assert "mixhead check: 20 of " in said.err  # progress, with --json too
        return status, said.out

    return run


def test_every_variant_of_this_machine_is_right(report):
    status, text = report("--json")
    found = json.loads(text)
    assert status == 0 and len(found["variants"]) == 2 * 7 * 3 * 2
    assert {row["auto"] for row in found["variants"]} == {"fused", "blockwise"}
    assert all(0 < row["error"] < 1 and not row["fault"] for row in found["variants"])


def test_the_report_says_what_is_not_tried(report, monkeypatch):
    monkeypatch.setattr(check, "MASKS", {"causal": {"causal": True}})
    _, text = report()
    *_, not_tried, verdict = text.splitlines()
    assert not_tried == (
        "Not tried: scores of distances (--relative-position t5, Transformer-XL); "
        "gains of distances (--relative-gain)"
    )
    assert verdict == "0 of 28 variants are wrong"


def test_a_wrong_result_is_named_and_is_the_exit_status(report, monkeypatch):
    monkeypatch.setattr(check, "MASKS", {"causal": {"causal": True}})
    original = api.attend
    monkeypatch.setattr(
        api, "attend", lambda call, impl: original(call, impl) * (1 if call.mixes() else 1.5)
    )
    status, text = report()
    assert status == 1 and text.count("WRONG: ") == 12 and "12 of 28 variants are wrong" in text


def refuse_constant(name):
    raise AssertionError(f"{name} is no JSON")


def test_what_is_not_a_number_is_null_in_json_and_a_dash_in_the_text(report, monkeypatch):
    monkeypatch.setattr(check, "MASKS", {"causal": {"causal": True}})
    original = api.attend
    monkeypatch.setattr(api, "attend", lambda call, impl: original(call, impl) * float("nan"))
    status, printed = report("--json")
    rows = json.loads(printed, parse_constant=refuse_constant)["variants"]
    assert status == 1 and {row["error"] for row in rows} == {None}
    assert all("is wrong by nan times" in row["fault"] for row in rows)
    _, text = report()
    assert text.count("     -  WRONG: ") == len(rows)


def test_a_variant_without_room_in_memory_is_skipped_and_not_wrong(report, monkeypatch):
    monkeypatch.setattr(check, "MASKS", {"causal": {"causal": True}})
    original = api.attend

    def attend(call, impl):
        if call.normalizer == "l2":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return original(call, impl)

    monkeypatch.setattr(api, "attend", attend)
    status, text = report()
    assert status == 0 and text.count("     -  skipped: out of memory") == 14
    assert text.endswith("0 of 28 variants are wrong, 14 were skipped\n")


def test_kernels_without_room_for_their_trial_are_not_wrong(monkeypatch):
    pytest.importorskip("triton")
    from mixhead_plugin.ops.triton import verify

    def lack(kind):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(verify, "try_on_device", lack)
    monkeypatch.setattr(support, "machine_problem", lambda: "")
    monkeypatch.setattr(support, "call_problem", lambda inputs: "")
    judged = check.judge(CallKind("softmax", 2, 4, 4, torch.float32, torch.device("cpu")))
    assert judged.kernels == "cannot be tried now: CUDA out of memory"
    assert judged.fault == "" and 0 < judged.error < 1


def test_a_gpu_that_does_not_work_is_named(monkeypatch):
    def broken(*shape, **options):
        raise RuntimeError("CUDA driver initialization failed\nat some place")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", broken)
    with pytest.raises(
        SystemExit, match=r"^mixhead check: --device cuda: CUDA driver init.* failed$"
    ):
        check.main(None, 2, 4, False)


@pytest.mark.parametrize("factor", ["left", "right", "diagonal"])
def test_a_wrong_gradient_of_a_factor_of_m_is_named(factor, monkeypatch):
    original = api.attend
    name = f"mixing_{factor}"

    def with_wrong_gradient(call, impl):
        given = getattr(call, name)
        return original(call.with_tensors({name: 3 * given - 2 * given.detach()}), impl)

    monkeypatch.setattr(api, "attend", with_wrong_gradient)
    fields = {"rank": 2, "mixing_dtype": torch.float32}
    judged = check.judge(CallKind("softmax", 4, 8, 8, torch.float32, torch.device("cpu"), **fields))
    assert judged.fault.startswith(f"the gradient of {name} is wrong by ")


@pytest.mark.parametrize(
    "flag, value, problem",
    [
        ("--device", "abacus", ".*"),
        ("--heads", "0", "must be at least 1"),
        ("--head-dim", "-1", "must be at least 1"),
        ("--heads", "100000", "must be at most 256, because .*"),
        ("--head-dim", "100000", "must be at most 1024, because .*"),
    ],
)
def test_what_cannot_be_checked_is_refused_in_one_line(flag, value, problem, report):
    with pytest.raises(SystemExit, match=rf"^mixhead check: {flag} {value}: {problem}$"):
        report(flag, value)


ALL_QUERIES = {"mixing_dim": 2, "causal": True}
BY_HEAD = {"mask_dtype": torch.float32, "mask_by": "head"}
RIGHT = {  # by what could make a right implementation look wrong
    "one number": (("unnormalized", 1, 1, torch.float32), ALL_QUERIES),
    "few terms of exp(s) make the sum": (("unnormalized", 8, 2, torch.float16), ALL_QUERIES),
    "quotients of small numbers": (("swish-l2", 2, 2, torch.float32), ALL_QUERIES),
    "differences of small numbers": (("softpick", 8, 2, torch.float32), ALL_QUERIES),
    "the largest of many parts": (("l2", 5, 1, torch.float32), BY_HEAD),
    "one score makes the error of all heads": (
        ("unnormalized", 2, 21, torch.float32),
        {"score_mixing_dim": 4, **BY_HEAD},
    ),
    "one number a row": (("swish-l2", 1, 1, torch.float32), {"rank": 2}),
    "a score beside the gradient's jump": (
        ("softpick", 8, 57, torch.float32),
        {"mixing_dim": 2, **BY_HEAD},
    ),
}


@pytest.mark.parametrize("why", RIGHT)
def test_right_results_are_not_called_wrong(why):
    (normalizer, heads, head_dim, dtype), fields = RIGHT[why]
    if "mixing_dim" in fields or "rank" in fields:
        fields = {**fields, "mixing_dtype": dtype}
    kind = CallKind(normalizer, heads, head_dim, head_dim, dtype, torch.device("cpu"), **fields)
    assert check.judge(kind).fault == ""


def test_a_draw_in_which_the_formula_is_not_finite_is_left_out():
    """In one of these draws the formula is NaN: the rounded weights of entmax do not sum to 1."""
    fields = {"mixing_dim": 4, "mixing_dtype": torch.bfloat16, "sink": True, "causal": True}
    judged = check.judge(
        CallKind("entmax15", 8, 2, 2, torch.bfloat16, torch.device("cpu"), **fields)
    )
    assert judged.fault == "" and 0 < judged.error < 1


def test_the_speed_of_every_mixing_is_measured(monkeypatch):
    monkeypatch.setattr(check, "SPEED_SHAPE", (1, 2, 16, 4))
    assert all(
        milliseconds > 0 for milliseconds in check.speed(torch.device("cpu"), 0.001).values()
    )


def test_a_check_that_is_interrupted_gives_the_threads_back(monkeypatch):
    def interrupted(kind):
        assert torch.get_num_threads() == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "judge", interrupted)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    threads = [3]
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    with pytest.raises(KeyboardInterrupt):
        check.check(torch.device("cpu"), 2, 4)
    assert threads == [3, 1, 3]
