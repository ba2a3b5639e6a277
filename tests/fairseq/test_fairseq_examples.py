"""A fairseq without its examples is no fault; a fault inside them is one."""

import runpy
import sys

import pytest

from mixhead_plugin.fairseq import fairseq_examples

EXAMPLE = "fairseq.examples.truncated_bptt.transformer_xl_model"


def test_without_examples_there_is_no_task(monkeypatch):
    monkeypatch.setitem(sys.modules, EXAMPLE, None)  # as if it were not there
    found = runpy.run_path(fairseq_examples.__file__)
    assert found["TruncatedBPTTLMTask"] is None


def test_examples_that_need_a_missing_module_are_not_taken_for_missing(monkeypatch):
    monkeypatch.delitem(sys.modules, EXAMPLE)  # it is imported anew
    monkeypatch.setitem(sys.modules, "fairseq.modules.checkpoint_activations", None)
    with pytest.raises(ModuleNotFoundError, match="checkpoint_activations"):
        runpy.run_path(fairseq_examples.__file__)
