"""Windows cover a question's context; each knows its target and where its tokens come from."""

import json

import numpy as np
import pytest
from bert.squad_data import Answer, Question, Squad, read_squad
from bert.squad_windows import IGNORED, Sizes, SquadWindows, has_most_context
from bert.wordpiece import characters_of, wordpiece
from tokenizers import processors

from tests.squad import content, dictionary

SIZES = Sizes(max_seq_length=40, doc_stride=12, max_query_length=16)


def windows(squad, sizes=SIZES, **settings):
    return SquadWindows(
        squad, dictionary(), wordpiece(dictionary(), lowercase=True), sizes, **settings
    )


@pytest.fixture(scope="module")
def squad(tmp_path_factory):
    path = tmp_path_factory.mktemp("squad") / "train.json"
    path.write_text(json.dumps(content()), encoding="utf-8")
    return read_squad(path)


def of_question(data, number):
    return [
        sample for sample in map(data.__getitem__, range(len(data))) if sample["question"] == number
    ]


def test_every_token_has_most_context_in_one_window():
    """Apply the rule of Devlin et al. token by token."""
    found = [(0, 10), (3, 10), (6, 8)]
    for token in range(14):
        scores = [
            min(token - begin, begin + size - 1 - token) + 0.01 * size
            if begin <= token < begin + size
            else -1
            for begin, size in found
        ]
        holders = [
            number
            for number, (begin, size) in enumerate(found)
            if begin <= token < begin + size and has_most_context(found, number)[token - begin]
        ]
        assert holders == [scores.index(max(scores))]


def test_windows_are_those_of_the_tokeniser(squad):
    """Let the library cut a pair of texts into windows, with an overlap in place of our stride."""
    data = windows(squad)
    assert data.unlocated == 0
    tokeniser = wordpiece(dictionary(), lowercase=True)
    tokeniser.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 0))
    for number, question in enumerate(squad.questions):
        context = squad.contexts[question.context]
        samples = of_question(data, number)
        ends = [end for _, end in tokeniser.encode(question.text, add_special_tokens=False).offsets]
        ends = ends[: SIZES.max_query_length]
        room = SIZES.max_seq_length - 3 - len(ends)
        tokeniser.enable_truncation(
            SIZES.max_seq_length, stride=room - SIZES.doc_stride, strategy="only_second"
        )
        first = tokeniser.encode(question.text[: ends[-1]], context)
        tokeniser.no_truncation()
        expected = [first, *first.overflowing]
        assert [sample["tokens"].tolist() for sample in samples] == [
            window.ids for window in expected
        ]
        assert [sample["segments"].tolist() for sample in samples] == [
            window.type_ids for window in expected
        ]
        answer = question.answers[0].start, question.answers[0].start + len(question.gold[0])
        starts = []
        for sample, window in zip(samples, expected):
            inside = [i for i, part in enumerate(window.sequence_ids) if part == 1]
            assert sample["places"][inside, 0].tolist() == [window.offsets[i][0] for i in inside]
            assert sample["ends"].nonzero().flatten().tolist() == inside
            covered = [
                i
                for i in inside
                if window.offsets[i][0] < answer[1] and window.offsets[i][1] > answer[0]
            ]
            edges = [window.offsets[i] for i in covered[:1] + covered[-1:]]
            has_all = bool(edges) and edges[0][0] <= answer[0] and edges[1][1] >= answer[1]
            assert sample["target"].tolist() == ([covered[0], covered[-1]] if has_all else [0, 0])
            starts += sample["places"][sample["starts"]].tolist()
        # Every token of the context is a start in exactly one window.
        everything = tokeniser.encode(context, add_special_tokens=False)
        assert sorted(starts) == sorted(map(list, characters_of(context, everything)))


def test_an_answer_that_is_not_there_is_left_out_of_the_loss_and_counted():
    """Ask for a misplaced answer, for none, for one in an empty context,
    and for one within a word.
    """
    asked = [(0, (Answer("Oslo", 0),)), (0, ()), (1, (Answer("x", 0),)), (0, (Answer("slo", 4),))]
    questions = [
        Question(str(i), "who?", context, answers) for i, (context, answers) in enumerate(asked)
    ]
    data = windows(Squad(["in Oslo", " \t\n"], questions))
    assert data.unlocated == 2
    assert [sample["target"].tolist() for sample in data] == [[IGNORED] * 2] * 3 + [[6, 8]]
    assert not data[2]["starts"].any()


def test_a_batch_is_padded_where_nothing_begins_or_ends(squad):
    data = windows(squad, first_question=100)
    samples = [data[index] for index in (0, len(data) - 1)]
    batch = data.collater(samples)
    pad = data.dictionary.pad()
    for row, sample in enumerate(samples):
        n = len(sample["tokens"])
        assert batch["net_input"]["src_tokens"][row, :n].equal(sample["tokens"])
        assert batch["net_input"]["src_tokens"][row, n:].eq(pad).all()
        assert not batch["starts"][row, n:].any() and not batch["ends"][row, n:].any()
        assert batch["places"][row, :n].equal(sample["places"])
    assert batch["question"].tolist() == [100, 111]
    assert batch["question_ids"] == ["0-0", "3-1"]
    assert batch["ntokens"] == sum(len(sample["tokens"]) for sample in samples)


def test_training_has_another_order_in_each_epoch_and_validation_sorts(squad):
    orders = []
    for seed, epoch in ((1, 1), (1, 2), (2, 1), (1, 1)):
        data = windows(squad, seed=seed)
        data.set_epoch(epoch)
        orders.append(data.ordered_indices().tolist())
    assert orders[0] == orders[3]
    assert len({tuple(order) for order in orders}) == 3
    assert sorted(orders[0]) == list(range(len(data)))
    in_order = windows(squad)
    assert (np.diff(in_order.sizes[in_order.ordered_indices()]) >= 0).all()
