"""Test the report on a machine."""

import json

import pytest
import torch

from mixhead_plugin import __main__
from mixhead_plugin.check import command, judging, variants
from mixhead_plugin.check.text import as_text
from mixhead_plugin.ops import NORMALIZERS, accuracy, api


@pytest.fixture
def report(monkeypatch, capsys):
    """Return the exit status and the output of `mixhead check` over a part of the variants."""
    monkeypatch.setattr(
        variants, "NORMALIZERS", {name: NORMALIZERS[name] for name in ("softmax", "l2")}
    )
    names = ("causal", "mask by head", "sink, causal")
    monkeypatch.setattr(variants, "MASKS", {name: variants.MASKS[name] for name in names})
    monkeypatch.setattr(accuracy, "DRAWS", 2)
    monkeypatch.setattr(judging, "ROWS", 16)  # two draws of 8 heads
    monkeypatch.setattr(command, "speed", lambda device: {"torch's attention": 1.0})

    def run(*flags):
        monkeypatch.setattr("sys.argv", ["mixhead", "check", "--device", "cpu", *flags])
        status = __main__.main()
        return status, capsys.readouterr()

    return run


def test_every_variant_of_this_machine_is_right(report):
    status, said = report("--json")
    found = json.loads(said.out)
    assert status == 0 and len(found["variants"]) == 2 * 7 * 3 * 2
    assert {row["auto"] for row in found["variants"]} == {"fused", "blockwise"}
    assert all(0 < row["error"] < 1 and not row["fault"] for row in found["variants"])
    assert "mixhead check: 20 of 84 variants" in said.err  # progress, with --json too


@pytest.fixture
def few_report(report, monkeypatch):
    """Return `report` over eight variants: two normalizers, two mixings, a mask and two dtypes."""
    names = ("none", "position-wise")
    monkeypatch.setattr(variants, "MIXED", {name: variants.MIXED[name] for name in names})
    monkeypatch.setattr(variants, "MASKS", {"causal": {"causal": True}})
    return report


def test_the_report_says_what_is_not_tried(few_report):
    _, said = few_report()
    *_, not_tried, verdict = said.out.splitlines()
    assert not_tried == (
        "Not tried: scores of distances (--relative-position t5, Transformer-XL); "
        "gains of distances (--relative-gain)"
    )
    assert verdict == "0 of 8 variants are wrong"


def test_a_wrong_result_is_named_and_is_the_exit_status(few_report, monkeypatch):
    original = api.attend
    monkeypatch.setattr(
        api, "attend", lambda call, impl: original(call, impl) * (1 if call.mixes() else 1.5)
    )
    status, said = few_report()
    assert status == 1 and said.out.count("WRONG: ") == 4
    assert "4 of 8 variants are wrong" in said.out


def refuse_constant(name):
    raise AssertionError(f"{name} is no JSON")


def test_what_is_not_a_number_is_null_in_json_and_a_dash_in_the_text(few_report, monkeypatch):
    original = api.attend
    monkeypatch.setattr(api, "attend", lambda call, impl: original(call, impl) * float("nan"))
    status, said = few_report("--json")
    found = json.loads(said.out, parse_constant=refuse_constant)
    rows = found["variants"]
    assert status == 1 and {row["error"] for row in rows} == {None}
    assert all("is wrong by nan times" in row["fault"] for row in rows)
    assert as_text(found).count("     -  WRONG: ") == len(rows)


def test_a_variant_without_room_in_memory_is_skipped_and_not_wrong(few_report, monkeypatch):
    original = api.attend

    def attend(call, impl):
        if call.normalizer == "l2":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return original(call, impl)

    monkeypatch.setattr(api, "attend", attend)
    status, said = few_report()
    assert status == 0 and said.out.count("     -  skipped: out of memory") == 4
    assert said.out.endswith("0 of 8 variants are wrong, 4 were skipped\n")


def test_a_gpu_that_does_not_work_is_named(monkeypatch):
    def broken(*shape, **options):
        raise RuntimeError("CUDA driver initialization failed\nat some place")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", broken)
    with pytest.raises(
        SystemExit, match=r"^mixhead check: --device cuda: CUDA driver init.* failed$"
    ):
        command.main(None, 2, 4, False)


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


def test_a_check_that_is_interrupted_gives_the_threads_back(monkeypatch):
    def interrupted(kind):
        assert torch.get_num_threads() == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "judge", interrupted)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    threads = [3]
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    with pytest.raises(KeyboardInterrupt):
        command.check(torch.device("cpu"), 2, 4)
    assert threads == [3, 1, 3]
