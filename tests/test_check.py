"""Test the report on a machine."""

import json

import pytest
import torch

from mixhead_plugin import __main__, check
from mixhead_plugin.ops import NORMALIZERS, api


@pytest.fixture
def report(monkeypatch, capsys):
    """Return the exit status and the text of `mixhead check` over a part of the variants."""
    monkeypatch.setattr(check, "NORMALIZERS", {name: NORMALIZERS[name] for name in ("softmax", "l2")})
    monkeypatch.setattr(check, "DRAWS", 2)
    monkeypatch.setattr(check, "speed", lambda device: {"torch's attention": 1.0})

    def run(*flags):
        monkeypatch.setattr("sys.argv", ["mixhead", "check", "--device", "cpu", *flags])
        status, said = __main__.main(), capsys.readouterr()
        assert "mixhead check: 20 of " in said.err  # progress, with --json too
        return status, said.out

    return run


def test_every_variant_of_this_machine_is_right(report):
    status, text = report("--json")
    found = json.loads(text)
    assert status == 0 and len(found["variants"]) == 2 * 6 * 5 * 2
    assert {row["auto"] for row in found["variants"]} == {"fused", "blockwise"}
    assert all(0 < row["error"] < 1 and not row["fault"] for row in found["variants"])


def test_a_wrong_result_is_named_and_is_the_exit_status(report, monkeypatch):
    monkeypatch.setattr(check, "MASKS", {"causal": {"causal": True}})
    original = api.attend
    monkeypatch.setattr(api, "attend", lambda call, impl: original(call, impl) * (1.5 if call.mixing is None else 1))
    status, text = report()
    assert status == 1 and text.count("WRONG: ") == 12 and "12 of 24 variants are wrong" in text


@pytest.mark.parametrize("flag, value", [("--device", "abacus"), ("--heads", "0"), ("--head-dim", "-1")])
def test_what_cannot_be_checked_is_refused_in_one_line(flag, value, report):
    with pytest.raises(SystemExit, match=rf"^mixhead check: {flag} {value}: .*$"):
        report(flag, value)


def test_the_speed_of_every_mixing_is_measured(monkeypatch):
    monkeypatch.setattr(check, "SPEED_SHAPE", (1, 2, 16, 4))
    assert all(milliseconds > 0 for milliseconds in check.speed(torch.device("cpu"), 0.001).values())
