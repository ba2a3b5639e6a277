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
    tokeniser = wordpiece(dictionary(), lowercase=True)
    return SquadWindows(squad, dictionary(), tokeniser, sizes, **settings)


@pytest.fixture(scope="module")
def squad(tmp_path_factory):
    path = tmp_path_factory.mktemp("squad") / "train.json"
    path.write_text(json.dumps(content()), encoding="utf-8")
    return read_squad(path)


def of_question(data, number):
    samples = [data[index] for index in range(len(data))]
    return [sample for sample in samples if sample["question"] == number]


def test_every_token_has_most_context_in_one_window():
    """Apply the rule of Devlin et al. token by token."""
    found = [(0, 10), (3, 10), (6, 8)]
    for token in range(14):
        contexts = {}  # of the windows that have the token
        holders = []
        for number, (begin, size) in enumerate(found):
            if not begin <= token < begin + size:
                continue
            nearest_end = min(token - begin, begin + size - 1 - token)
            contexts[number] = nearest_end + 0.01 * size
            if has_most_context(found, number)[token - begin]:
                holders.append(number)
        assert holders == [max(contexts, key=contexts.get)]


def test_windows_are_those_of_the_tokeniser(squad):
    """Let the library cut a pair of texts into windows, with an overlap in place of our stride."""
    data = windows(squad)
    assert data.unlocated == 0
    tokeniser = wordpiece(dictionary(), lowercase=True)
    tokeniser.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 0))
    for number, question in enumerate(squad.questions):
        context = squad.contexts[question.context]
        samples = of_question(data, number)
        expected = windows_of_the_tokeniser(tokeniser, question.text, context)
        answer = question.answers[0]
        starts = []
        for sample, window in zip(samples, expected, strict=True):
            assert sample["tokens"].tolist() == window.ids
            assert sample["segments"].tolist() == window.type_ids
            inside = [i for i, part in enumerate(window.sequence_ids) if part == 1]
            assert sample["places"][inside, 0].tolist() == [window.offsets[i][0] for i in inside]
            assert sample["ends"].nonzero().flatten().tolist() == inside
            end = answer.start + len(answer.text)
            assert sample["target"].tolist() == covering(window, inside, answer.start, end)
            starts += sample["places"][sample["starts"]].tolist()
        # Every token of the context is a start in exactly one window.
        everything = tokeniser.encode(context, add_special_tokens=False)
        assert sorted(starts) == sorted(map(list, characters_of(context, everything)))


def windows_of_the_tokeniser(tokeniser, question, context):
    """Return the encodings of all windows, with a question that is cut to its longest size."""
    offsets = tokeniser.encode(question, add_special_tokens=False).offsets
    offsets = offsets[: SIZES.max_query_length]
    _, end_of_question = offsets[-1]
    room = SIZES.max_seq_length - 3 - len(offsets)
    overlap = room - SIZES.doc_stride
    tokeniser.enable_truncation(SIZES.max_seq_length, stride=overlap, strategy="only_second")
    first = tokeniser.encode(question[:end_of_question], context)
    tokeniser.no_truncation()
    return [first, *first.overflowing]


def covering(window, inside, start, end):
    """Return the first and the last token of the characters start to end - 1.

    They are [0, 0] if the window lacks a part of them.
    """
    covered = []
    for i in inside:
        first_character, after_last = window.offsets[i]
        if first_character < end and after_last > start:
            covered.append(i)
    if not covered:
        return [0, 0]
    begins = window.offsets[covered[0]][0] <= start
    ends = window.offsets[covered[-1]][1] >= end
    return [covered[0], covered[-1]] if begins and ends else [0, 0]


def test_an_answer_that_is_not_there_is_left_out_of_the_loss_and_counted():
    questions = [
        Question("misplaced", "who?", 0, (Answer("Oslo", 0),)),
        Question("none", "who?", 0, ()),
        Question("in an empty context", "who?", 1, (Answer("x", 0),)),
        Question("within a word", "who?", 0, (Answer("slo", 4),)),
    ]
    data = windows(Squad(["in Oslo", " \t\n"], questions))
    assert data.unlocated == 2
    unknown = [IGNORED, IGNORED]
    assert [sample["target"].tolist() for sample in data] == [unknown, unknown, unknown, [6, 8]]
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
        assert not batch["starts"][row, n:].any()
        assert not batch["ends"][row, n:].any()
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
