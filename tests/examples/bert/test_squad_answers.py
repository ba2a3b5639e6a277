"""Logits become the n best answers of a question."""

import math

import pytest
import torch
from bert.answers import NBestFile, Span, best_spans, n_best, predictions, read_spans, spans_of
from bert.squad_data import Answer, Question, Squad, SquadError


def every_span(logits, starts, ends, longest):
    """Return all allowed spans, sorted by the sum of both log-probabilities: the definition."""
    scores = logits.log_softmax(0)
    found = []
    for first in range(len(logits)):
        for last in range(first, min(first + longest, len(logits))):
            if starts[first] and ends[last]:
                score = float(scores[first, 0] + scores[last, 1])
                found.append((score, first, last))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("longest", [1, 3, 50])
def test_the_best_spans_are_the_best_of_all(longest):
    logits = torch.randn(4, 9, 2)
    starts = torch.rand(4, 9) > 0.3
    ends = torch.rand(4, 9) > 0.3
    scores, first, last = best_spans(logits, starts, ends, 20, longest)
    for row in range(4):
        expected = every_span(logits[row], starts[row], ends[row], longest)[:20]
        found = list(zip(scores[row].tolist(), first[row].tolist(), last[row].tolist()))
        assert [span[1:] for span in found if span[0] > -math.inf] == [
            span[1:] for span in expected
        ]
        torch.testing.assert_close(
            scores[row][: len(expected)], torch.tensor([span[0] for span in expected])
        )


def sample(starts, places):
    return {"starts": starts, "ends": starts, "places": places}


def test_a_window_without_a_start_has_no_spans():
    starts = torch.tensor([[False, True, True], [False, False, False]])
    places = torch.tensor([[[0, 0], [4, 6], [7, 9]]]).expand(2, 3, 2)
    found = spans_of(sample(starts, places), torch.randn(2, 3, 2), 20, 30)
    assert sorted(span[:2] for span in found[0]) == [(4, 6), (4, 9), (7, 9)]
    assert found[1] == []


def test_the_n_best_answers_of_all_windows():
    context = "Rome, Oslo, Rome"
    spans = [Span(6, 10, -2.0), Span(0, 4, -3.0), Span(12, 16, -1.0), Span(0, 10, -4.0)]
    assert n_best(spans, context, 2) == [
        # the same text counts once, with its best span
        {"text": "Rome", "probability": math.exp(-1.0)},
        {"text": "Oslo", "probability": math.exp(-2.0)},
    ]
    assert [answer["text"] for answer in n_best(spans, context, 20)] == [
        "Rome",
        "Oslo",
        "Rome, Oslo",
    ]
    assert n_best([], context, 20) == [{"text": "", "probability": 0.0}]


SQUAD = Squad(
    ["in Oslo"], [Question(name, "where?", 0, (Answer("Oslo", 3),)) for name in ("a", "b")]
)


def batch(*names):
    """Return a batch of windows by name.

    They are "a1" and "a2" of question "a", and "b", the only one of its question.
    """
    windows = {"a1": (0, 2), "a2": (1, 2), "b": (0, 1)}
    return {
        "question_ids": [name[0] for name in names],
        "windows": [windows[name] for name in names],
    }


def test_what_is_written_is_read(tmp_path):
    file = NBestFile(tmp_path / "spans")
    file.write(batch("a1", "b"), [[Span(3, 7, -0.5)], []])
    file.write(batch("a2"), [[Span(0, 2, -0.25)]])
    spans = read_spans(tmp_path / "spans", SQUAD.questions)
    assert spans == {"a": [Span(3, 7, -0.5), Span(0, 2, -0.25)], "b": []}
    best = {name: answers[0]["text"] for name, answers in predictions(SQUAD, spans, 20).items()}
    assert best == {"a": "in", "b": ""}


def test_a_question_without_all_its_windows_is_refused(tmp_path):
    NBestFile(tmp_path / "spans").write(batch("a1", "a1", "b"), [[]] * 3)
    with pytest.raises(SquadError, match="lacks windows of 1 questions"):
        read_spans(tmp_path / "spans", SQUAD.questions)
