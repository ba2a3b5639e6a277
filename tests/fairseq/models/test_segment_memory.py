"""Test the memory of Transformer-XL."""

import copy
import logging

import pytest
import torch
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema.ema import EMA
from fairseq.utils import move_to_cpu

from mixhead_plugin.fairseq.models.transformer_xl import segment_memory
from mixhead_plugin.fairseq.models.transformer_xl.segment_memory import SegmentMemory
from tests.transformer_xl import build_xl, log_probs, text

L, C, LENGTH, WINDOW = 2, 3, 5, 4


def states(rows=2, length=WINDOW):
    return [torch.randn(length, rows, C) for _ in range(L)]


def fed(window=0, rows=2, memory=None):
    """Return a memory that has just kept a window, and the window."""
    memory = memory or SegmentMemory(LENGTH, WINDOW)
    kept = states(rows)
    memory.keep(window, [], kept)
    return memory, kept


def empty(memory, window, rows=2):
    return memory.recall(window, torch.zeros(WINDOW, rows, C)) == []


def test_only_the_next_window_of_as_many_rows_sees_the_one_before():
    memory, first = fed(window=3)
    torch.testing.assert_close(memory.recall(4, first[0]), first, rtol=0, atol=0)
    assert empty(memory, 4, rows=1)
    assert all(empty(memory, window) for window in (0, 3, 5))
    again = states()
    memory.keep(4, memory.recall(4, first[0]), again)
    # a window that is computed again
    torch.testing.assert_close(memory.recall(4, again[0]), first, rtol=0, atol=0)


def test_a_window_longer_than_the_memory_is_cut_and_nothing_larger_is_kept_alive():
    memory = SegmentMemory(LENGTH, WINDOW)
    long = states(length=9)
    memory.keep(0, [], long)
    (found, _) = memory.recall(1, long[0])
    assert torch.equal(found, long[0][-LENGTH:])
    assert found.untyped_storage().nbytes() == LENGTH * 2 * C * 4


def test_memory_has_no_graph_and_the_dtype_of_the_window():
    memory = SegmentMemory(LENGTH, WINDOW)
    memory.keep(0, [], [s.requires_grad_() for s in states()])
    for dtype in (torch.float16, torch.float32):
        (found, _) = memory.recall(1, torch.zeros(WINDOW, 2, C, dtype=dtype))
        assert not found.requires_grad and found.dtype == dtype


def test_evaluation_and_training_do_not_see_each_other():
    memory, kept = fed(window=3)
    memory.eval()
    assert empty(memory, 4)
    fed(window=7, memory=memory)
    assert not empty(memory.eval(), 8)  # fairseq says eval() before every batch
    assert torch.equal(memory.train().recall(4, kept[0])[0], kept[0])
    assert empty(memory.eval(), 8)


@pytest.mark.parametrize("forget", [SegmentMemory.reset, SegmentMemory.make_generation_fast_])
def test_a_reset_forgets_both(forget):
    memory, _ = fed()
    fed(memory=memory.eval())
    forget(memory)
    assert empty(memory, 1) and empty(memory.train(), 1)


def loaded(state, length=LENGTH, window_length=WINDOW):
    memory = SegmentMemory(length, window_length)
    memory.load_state_dict(copy.copy(state), strict=True)
    return memory


@pytest.mark.parametrize("length", [LENGTH, 2])
def test_a_checkpoint_has_the_memory_of_training_whose_end_a_shorter_one_takes(length, tmp_path):
    memory, kept = fed(window=3)
    torch.save(move_to_cpu(memory.half().state_dict()), tmp_path / "memory.pt")
    again = loaded(torch.load(tmp_path / "memory.pt", weights_only=True), length)
    assert torch.equal(again.recall(4, kept[0])[0], kept[0][-length:])
    assert empty(again, 3) and empty(again.eval(), 4)


def test_a_checkpoint_has_states_and_place_under_the_names_of_older_ones():
    memory = SegmentMemory(LENGTH, WINDOW)
    kept = states(length=3)
    memory.keep(7, [], kept)
    state = memory.state_dict()
    assert list(state) == ["version_1.states", "version_1.place"]
    before = torch.zeros(L, LENGTH - 3, 2, C)
    assert torch.equal(state["version_1.states"], torch.cat([before, torch.stack(kept)], 1))
    # the window, the positions held, the workers, the tokens in a window
    assert state["version_1.place"].tolist() == [7, 3, 1, WINDOW]


def test_a_checkpoint_of_other_windows_or_without_memory_empties_it(caplog):
    memory, _ = fed(window=3)
    with caplog.at_level(logging.INFO):
        assert empty(loaded(memory.state_dict(), window_length=WINDOW + 1), 4)
    assert "memory: empty" in caplog.text
    memory.load_state_dict({}, strict=True)
    assert empty(memory, 4)


@pytest.mark.parametrize("rank", [0, 1])
def test_it_is_the_first_workers_alone(rank, monkeypatch, caplog):
    monkeypatch.setattr(segment_memory, "_workers", lambda: 2)
    monkeypatch.setattr(segment_memory.distributed, "get_data_parallel_rank", lambda: rank)
    memory, _ = fed(window=3)
    with caplog.at_level(logging.INFO):
        assert empty(loaded(memory.state_dict()), 4) == (rank == 1)
    assert caplog.text.count("memory: of the first worker") == 1


def test_a_moving_average_of_the_model_leaves_memory_out():
    model = build_xl().train()
    ema = EMA(model, EMAConfig(store_ema=True, ema_decay=0.5))
    for window, part in enumerate(text(40).split(8, 1)):
        model(part, window=window)
        ema.step(model, window)
    averaged = ema.get_model()
    assert not any(".memory." in name for name in averaged.state_dict())
    assert torch.isfinite(log_probs(averaged.eval(), text(8), 0)).all()
