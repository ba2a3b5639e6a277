"""SQuAD's metrics are those of the official evaluation."""

import pytest
from bert.squad_data import Answer, Question, exact_match, f1, locate, score

# Prediction, gold answer, exact match, F1, computed by hand from the definition.
CASES = [
    ("The Eiffel Tower!", "eiffel tower", 1, 1),  # articles, punctuation, case
    ("a  b\t\nc", "B C", 1, 1),  # an article between words, white space
    ("Theatre", "atre", 0, 0),  # no article: part of a word
    ("the-atre", "theatre", 1, 1),  # punctuation goes first, and leaves no gap
    ("an the", "a", 1, 0),  # nothing is left of both: they match, and share no word
    ("Oslo Oslo", "Oslo", 0, 2 / 3),  # a word counts as often as it is in both
    ("Oslo, Rome", "Rome and Oslo", 0, 0.8),
    ("Élan\u2003the a_b", "élan ab", 1, 1),  # accents stay; any white space parts
    ("“Oslo”", "Oslo", 0, 0),  # no sign of ASCII
]


@pytest.mark.parametrize("prediction, gold, exact, overlap", CASES)
def test_the_metrics_of_a_pair(prediction, gold, exact, overlap):
    assert exact_match(prediction, gold) == exact
    assert f1(prediction, gold) == pytest.approx(overlap)
    assert f1(gold, prediction) == pytest.approx(overlap)


def question(name, *gold):
    return Question(name, "?", 0, tuple(Answer(text, 0) for text in gold))


def test_the_score_is_the_mean_over_questions_of_the_best_over_answers():
    """A question without a prediction scores 0; a question without answers does not count."""
    asked = [question("best", "Rome", "in Oslo"), question("none", "Rome"), question("no answers")]
    assert score(asked, {"best": "Oslo", "no answers": "Oslo"}) == pytest.approx(
        (0, 100 * (2 / 3) / 2)
    )
    assert score(asked[:1], {"best": "rome"}) == (100, 100)


def test_an_answer_that_is_not_where_it_says_is_not_found():
    assert locate("in Oslo", [Answer("Oslo", 3)]) == (3, 7)
    assert locate("in Oslo", [Answer("Oslo", 2), Answer("in", 0)]) == (0, 2)
    for answer in (Answer("Oslo", 2), Answer("Oslo", -4), Answer("", 0), Answer("o", 99)):
        assert locate("in Oslo", [answer]) is None
