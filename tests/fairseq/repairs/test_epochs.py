"""Which data an epoch has, in data workers and after a resumption; no thread outlives its use."""

import threading
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from fairseq.data import iterators
from fairseq.trainer import Trainer

from tests.fairseq.repairs.trainings import SaysTheEpoch
from tests.own_process import in_own_process


def batches(number=2, workers=0, **settings):
    data = SaysTheEpoch()
    chosen = [[i % 3] for i in range(number - 1)] + [[1, 2]]
    return iterators.EpochBatchIterator(
        data, data.collater, chosen, num_workers=workers, **settings
    )


@in_own_process
def test_data_workers_know_the_epoch():
    # The last worker does not end by itself here. By default, torch waits five seconds for it.
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2
    for workers in (0, 1):
        epochs = batches(workers=workers, reuse_dataloader=True, persistent_workers=True)
        found = [sorted(epochs.next_epoch_itr(), key=len) for _ in range(3)]
        assert found == [[[epoch], [epoch, epoch]] for epoch in (1, 2, 3)]


def trainer_of(epochs=None, **dataset):
    """Return what Trainer's methods use of a trainer.

    Return also the epochs that it loads data and makes batches for.
    """
    loaded = []
    made = []

    def get_batch_iterator(**settings):
        made.append(settings["epoch"])
        return epochs or batches()

    trainer = MagicMock()
    trainer.task = SimpleNamespace(
        cfg=SimpleNamespace(),
        max_positions=lambda: None,
        dataset=lambda split: None,
        load_dataset=lambda *_, epoch, **__: loaded.append(epoch),
        get_batch_iterator=get_batch_iterator,
    )
    trainer.model.max_positions = lambda: None
    settings = {
        "train_subset": "train",
        "max_tokens": None,
        "batch_size": 1,
        "required_batch_size_multiple": 1,
        "update_ordered_indices_seed": False,
        "update_epoch_batch_itr": False,
        "num_workers": 0,
        "data_buffer_size": 1,
        "grouped_shuffling": False,
        "max_tokens_valid": None,
        "batch_size_valid": 1,
        "skip_invalid_size_inputs_valid_test": False,
    }
    trainer.cfg.dataset = SimpleNamespace(**{**settings, **dataset})
    return trainer, loaded, made


@pytest.mark.parametrize(
    "dataset, kwargs, expected",
    [
        ({}, {}, [1, 3]),
        ({"update_epoch_batch_itr": True}, {}, [3]),
        ({}, {"disable_iterator_cache": True}, [3]),
        ({}, {"load_dataset": False}, [3]),
    ],
    ids=["resumed", "batches of each epoch", "shards", "going on"],
)
def test_a_resumed_epoch_has_the_batches_of_the_first(dataset, kwargs, expected):
    trainer, loaded, made = trainer_of(**dataset)
    Trainer.get_train_iterator(trainer, 3, **kwargs)
    assert made == expected
    assert loaded == ([] if kwargs.get("load_dataset") is False else expected[:1])


def test_a_validation_that_stops_early_leaves_no_thread():
    epochs = batches(number=50, buffer_size=1)
    trainer, *_ = trainer_of(epochs, max_valid_steps=1)
    before = threading.active_count()
    for _ in range(3):
        next(
            Trainer.get_valid_iterator(trainer, "valid").next_epoch_itr(
                shuffle=False, set_dataset_epoch=False
            )
        )
    assert threading.active_count() == before
