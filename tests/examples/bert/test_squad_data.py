"""SQuAD's metrics are those of the official evaluation."""

import math
from fractions import Fraction

import pytest
from bert.squad_data import (
    Answer,
    Question,
    exact_match,
    f1,
    locate,
    score,
)
from hypothesis import given, settings
from hypothesis import strategies as st

# Prediction, gold answer, exact match, F1, computed by hand from the definition.
CASES = [
    ("The Eiffel Tower!", "eiffel tower", 1, 1),  # articles, punctuation, case
    ("a  b\t\nc", "B C", 1, 1),  # an article between words, white space
    ("Theatre", "atre", 0, 0),  # no article: part of a word
    ("the-atre", "theatre", 1, 1),  # punctuation goes first, and leaves no gap
    ("an the", "a", 1, 0),  # nothing is left of both: they match, and share no word
    ("Oslo Oslo", "Oslo", 0, 2 / 3),  # a word counts as often as it is in both
    ("Oslo, Rome", "Rome and Oslo", 0, 0.8),
]


@pytest.mark.parametrize("prediction, gold, exact, overlap", CASES)
def test_the_metrics_of_a_pair(prediction, gold, exact, overlap):
    assert exact_match(prediction, gold) == exact
    assert f1(prediction, gold) == pytest.approx(overlap)
    assert f1(gold, prediction) == pytest.approx(overlap)


# ---- the official definition once more, letter by letter -------------------------------------------------------------


def letters_left(answer):
    """Return the letters in lower case, without ASCII's signs: four blocks of its table."""
    signs = [*range(33, 48), *range(58, 65), *range(91, 97), *range(123, 127)]
    return [letter for letter in answer.lower() if ord(letter) not in signs]


def words_left(answer):
    """Return the words: what stands between gaps. A run of letters and digits that spells an article is a gap."""
    words, word, run = [], [], []
    for letter in [*letters_left(answer), " "]:
        if letter.isalnum():
            run.append(letter)
            continue
        article = run in (["a"], ["a", "n"], ["t", "h", "e"])
        if not article:
            word += run
        if (article or letter.isspace()) and word:
            words.append("".join(word))
            word = []
        if not letter.isspace():
            word.append(letter)
        run = []
    return [*words, "".join(word)] if word else words


def by_hand(prediction, gold):
    """Return exact match, and F1: twice the pairs of equal words, divided by the words of both."""
    ours, theirs = words_left(prediction), words_left(gold)
    alone, pairs = list(theirs), 0
    for word in ours:
        if word in alone:
            alone.remove(word)
            pairs += 1
    return int(ours == theirs), Fraction(2 * pairs, len(ours) + len(theirs)) if pairs else 0


# Cases that the definition treats in its own way: articles, whole, glued and beside accents that are no
# letters; signs of ASCII and others; letters that become two in lower case; white space of all kinds.
PARTS = "a an the A The AN than Oslo oslo OSLO in 3 _ - . ' $ -the- a_b".split()
PARTS += "“ ” — é É e\u0301 a\u0301 ß İ Σ 東 京 ² ½ \u0f0b \u200b".split()
PARTS += [" ", "  ", "\t", "\n", "\u00a0", "\u2003", "\x1c", "\x85", ""]
ANSWERS = st.one_of(st.lists(st.sampled_from(PARTS), max_size=9).map("".join), st.text(max_size=12))
THOROUGH = settings(max_examples=200, deadline=None, database=None, derandomize=True)


@THOROUGH
@given(ANSWERS, ANSWERS)
def test_the_metrics_are_those_of_the_definition_letter_by_letter(prediction, gold):
    exact, overlap = by_hand(prediction, gold)
    assert exact_match(prediction, gold) == exact
    assert f1(prediction, gold) == pytest.approx(float(overlap), rel=1e-12)


@THOROUGH
@given(st.lists(st.tuples(st.none() | ANSWERS, st.lists(ANSWERS, max_size=3)), max_size=4))
def test_the_score_is_the_mean_over_questions_of_the_best_over_answers(rows):
    """Take None for a question without a prediction; a question without answers does not count."""
    asked = [question(str(number), *gold) for number, (_, gold) in enumerate(rows)]
    given_answers = {str(number): prediction for number, (prediction, _) in enumerate(rows) if prediction is not None}
    best = []
    for prediction, gold in rows:
        pairs = [by_hand(prediction, answer) for answer in gold if prediction is not None]
        best += [[max(values) for values in zip(*pairs)] or [0, 0]] if gold else []
    found = score(asked, given_answers)
    if not best:
        assert all(math.isnan(value) for value in found)
    else:
        assert found == pytest.approx([100 * float(sum(column)) / len(best) for column in zip(*best)])


def question(name, *gold):
    return Question(name, "?", 0, tuple(Answer(text, 0) for text in gold))


def test_an_answer_that_is_not_where_it_says_is_not_found():
    assert locate("in Oslo", [Answer("Oslo", 3)]) == (3, 7)
    assert locate("in Oslo", [Answer("Oslo", 2), Answer("in", 0)]) == (0, 2)
    for answer in (Answer("Oslo", 2), Answer("Oslo", -4), Answer("", 0), Answer("o", 99)):
        assert locate("in Oslo", [answer]) is None
