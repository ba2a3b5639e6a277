"""An epoch that other workers, or another --update-freq, began: every sentence is seen once."""

import itertools
import logging
from collections import Counter

import pytest
from fairseq import options, tasks
from fairseq.data.iterators import EpochBatchIterator, GroupedEpochBatchIterator, GroupedIterator

from mixhead_plugin.fairseq.repairs import shared_epoch
from tests.fairseq.repairs.trainings import SaysTheEpoch
from tests.own_process import in_own_process

BATCHES = [[i] for i in range(53)]  # a prime number of sentences


class Sentences(SaysTheEpoch):
    def __getitem__(self, index):
        return index

    def __len__(self):
        return len(BATCHES)


class Workers:
    """The iterators of all workers of a training."""

    def __init__(
        self,
        number,
        update_freq=1,
        state=None,
        *,
        chosen=BATCHES,
        kind=EpochBatchIterator,
        data_workers=0,
        **settings,
    ):
        data, self.update_freq = Sentences(), update_freq
        settings = {"num_shards": number, "num_workers": data_workers, **settings}
        self.all = [
            kind(data, data.collater, chosen, shard_id=rank, **settings) for rank in range(number)
        ]
        for epochs in self.all:
            shared_epoch._epoch_state(epochs).update_freq = update_freq
            if state is not None:
                epochs.load_state_dict(state)
        self.groups = [GroupedIterator(epochs.next_epoch_itr(), update_freq) for epochs in self.all]

    def see(self, updates=None):
        """Make updates, all that the epoch has left by default; return the sentences seen."""
        seen = []
        for group in self.groups:
            batches = group if updates is None else itertools.islice(group, updates)
            for update in batches:
                seen += itertools.chain.from_iterable(update)
        assert len({group.n for group in self.groups}) == 1
        return seen

    def state(self):
        first, *others = [epochs.state_dict() for epochs in self.all]
        assert all(state == first for state in others)
        return first


def seen_by(*parts, **settings):
    """Return the sentences that an epoch shows.

    Args:
        parts: (workers, --update-freq, updates until the next part) of each part of the epoch
    """
    seen = []
    state = None
    for number, update_freq, updates in parts:
        workers = Workers(number, update_freq, state, **settings)
        seen += workers.see(updates)
        state = workers.state()
    assert state["epoch"] == 2
    assert state["iterations_in_epoch"] == 0
    return seen


GEOMETRIES = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("after", GEOMETRIES, ids=str)
@pytest.mark.parametrize("before", GEOMETRIES, ids=str)
def test_each_sentence_is_seen_once(before, after, share):
    updates = max(1, int(share * len(BATCHES) / (before[0] * before[1])))
    seen = seen_by((*before, updates), (*after, None))
    assert sorted(seen) == list(range(len(BATCHES)))


def test_each_sentence_is_seen_once_after_several_changes():
    for first, second, last in itertools.permutations(GEOMETRIES, 3):
        seen = seen_by((*first, 3), (*second, 3), (*last, None))
        assert sorted(seen) == list(range(len(BATCHES)))


def test_fairseq_skips_and_repeats_sentences(monkeypatch):
    """Without the repair: two workers make 7 updates, one goes on."""
    for name in ("state_dict", "load_state_dict", "ordered_batches"):
        monkeypatch.setattr(EpochBatchIterator, name, getattr(EpochBatchIterator, name).__wrapped__)
    assert max(Counter(seen_by((2, 1, 7), (1, 1, None))).values()) == 2
    assert len(set(seen_by((1, 1, 13), (2, 1, None)))) < len(BATCHES)


def test_the_same_workers_resume_as_in_fairseq(monkeypatch):
    state = Workers(2, 3).state()
    for updates in (1, 5):
        first = Workers(2, 3)
        first.see(updates)
        state = first.state()
        expected = first.see()
        assert Workers(2, 3, state).see() == expected
        monkeypatch.setattr(
            EpochBatchIterator, "load_state_dict", EpochBatchIterator.load_state_dict.__wrapped__
        )
        assert Workers(2, 3, state).see() == expected
        monkeypatch.undo()


@in_own_process
def test_data_workers_share_the_rest_too():
    for before, after in (((2, 1), (3, 1)), ((1, 2), (2, 1))):
        for buffer_size in (0, 4):
            settings = {"data_workers": 2, "buffer_size": buffer_size, "reuse_dataloader": True}
            assert sorted(seen_by((*before, 6), (*after, None), **settings)) == list(
                range(len(BATCHES))
            )


TASKS = {
    "translation": ["--task", "translation"],
    "language_modeling": (
        "--task language_modeling --sample-break-mode none --tokens-per-sample 7"
    ).split(),
    "masked_lm": "--task masked_lm --sample-break-mode complete --tokens-per-sample 9".split(),
}


@pytest.mark.parametrize("name", TASKS)
def test_real_data_are_seen_once(name, translation_data, text_data):
    data = translation_data if name == "translation" else text_data
    parser = options.get_training_parser()
    words = [str(data), *TASKS[name], "--arch", "transformer", "--max-tokens", "40", "--cpu"]
    task = tasks.setup_task(options.parse_args_and_arch(parser, words))
    task.load_dataset("train")
    sentences = task.dataset("train")

    def workers(number, state=None):
        settings = {"max_tokens": 40, "num_shards": number, "disable_iterator_cache": True}
        all_epochs = [
            task.get_batch_iterator(sentences, shard_id=rank, **settings) for rank in range(number)
        ]
        for epochs in all_epochs:
            if state is not None:
                epochs.load_state_dict(state)
        return all_epochs, [epochs.next_epoch_itr() for epochs in all_epochs]

    def identities(iterators, number=None):
        """Return the sentences of the next batches of all workers; None for all that are left."""
        found = []
        for batches in iterators:
            for batch in itertools.islice(batches, number):
                if batch:
                    found += batch["id"].tolist()
        return found

    for before, after in ((1, 2), (3, 2), (2, 1)):
        all_epochs, iterators = workers(before)
        seen = identities(iterators, 2)
        _, iterators = workers(after, all_epochs[0].state_dict())
        seen += identities(iterators)
        assert sorted(seen) == list(range(len(sentences)))


# ---- where nobody can say what is left ---------------------------------------------------------


class InParts(EpochBatchIterator):
    """Another order of batches, such as those of several corpora."""


def said(caplog):
    return [record.message for record in caplog.records if record.name == shared_epoch.__name__]


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"chosen": BATCHES[:-1]}, "the data have changed"),
        ({"chosen": [*BATCHES[:-2], [52], [51]]}, "the data have changed"),
        ({"chosen": [[0, 1], *BATCHES[1:]]}, "the data have changed"),
        ({"seed": 5}, "--seed or the data have changed"),
        ({"kind": InParts}, "binds data to workers, of which there were 2, now 1"),
        ({"grouped_shuffling": True}, "bind data to workers (2, now 1)"),
        ({"skip_remainder_batch": True}, "--skip-remainder-batch leaves out other batches"),
    ],
    ids=["number", "order", "sizes", "seed", "parts", "groups", "remainder"],
)
def test_other_batches_begin_the_epoch_anew_with_one_line(settings, reason, caplog):
    first = Workers(2)
    first.see(4)
    with caplog.at_level(logging.INFO):
        again = Workers(1, state=first.state(), **settings)
    assert [line.startswith("epoch 1 begins anew") and reason in line for line in said(caplog)] == [
        True
    ]
    left_out = settings.get("skip_remainder_batch", False)  # the last batch, of one sentence
    assert len(again.see()) == sum(map(len, settings.get("chosen", BATCHES))) - left_out


def test_batches_in_groups_have_an_order_too():
    """As those of fairseq's multilingual tasks."""
    orders = [
        shared_epoch._order(
            GroupedEpochBatchIterator(Sentences(), list, [BATCHES[:9], BATCHES[first:]])
        )
        for first in (9, 9, 10)
    ]
    assert orders[0] == orders[1] != orders[2]


def test_data_that_the_task_binds_to_workers_begin_the_epoch_anew(caplog):
    """In truncated_bptt_lm, each worker has its own texts.

    It is the only one to share its batches.
    """
    first = Workers(1)
    shared_epoch._epoch_state(first.all[0]).workers = 4
    first.see(4)
    for workers, line in (
        (4, None),
        (2, "the task binds data to workers, of which there were 4, now 2"),
    ):
        epochs = EpochBatchIterator(Sentences(), list, BATCHES)
        shared_epoch._epoch_state(epochs).workers = workers
        with caplog.at_level(logging.INFO):
            epochs.load_state_dict(first.state())
        assert (line is None) == (not said(caplog)) and (
            line is None or said(caplog)[-1].endswith(line)
        )
        assert len(list(epochs.next_epoch_itr())) == len(BATCHES) - (4 if line is None else 0)


def test_a_checkpoint_of_fairseq_goes_on_as_in_fairseq(caplog):
    first = Workers(3)
    first.see(5)
    state = {name: value for name, value in first.state().items() if name != shared_epoch.SHARDS}
    with caplog.at_level(logging.INFO):
        left = Workers(3, state=state).see()
        assert len(Workers(20, state=state).see()) == len(BATCHES)
    # Now, because a command that ran in this process may have let the logger say more later.
    assert "goes on after 5 batches" in said(caplog)[0] and "begins anew" in said(caplog)[-1]
    assert sorted(left) == sorted(Workers(3, state=first.state()).see())
    # of a version without numbers, at the end of an epoch
    old = {"epoch": 1, "iterations_in_epoch": 18}
    assert Workers(3, state=old).all[0].epoch == 2
