"""SQuAD's files, and the metrics on the cases that the official evaluation decides in its own way."""

import json
import math

import pytest

from mixhead_plugin.data.squad import (
    Answer,
    Question,
    SquadError,
    exact_match,
    f1,
    locate,
    normalise,
    read_squad,
    score,
)
from tests.squad import TEXTS, content

# Prediction, gold answer, exact match, F1: worked out by hand from the definition.
CASES = [
    ("The Eiffel Tower!", "eiffel tower", 1, 1),  # articles, punctuation, case
    ("a  b\t\nc", "B C", 1, 1),  # an article between words, white space
    ("Theatre", "atre", 0, 0),  # no article: part of a word
    ("the-atre", "theatre", 1, 1),  # punctuation goes first, and leaves no gap
    ("U.S.", "US", 1, 1),
    ("an the", "a", 1, 0),  # nothing is left of both: they match, and share no word
    ("", "", 1, 0),
    ("", "Oslo", 0, 0),
    ("in Oslo", "Oslo", 0, 2 / 3),
    ("Oslo Oslo", "Oslo", 0, 2 / 3),  # a word counts as often as it is in both
    ("Oslo, Rome", "Rome and Oslo", 0, 0.8),
    ("“Oslo”", "Oslo", 0, 0),  # typographic quotes are no ASCII punctuation
    ("José", "jose", 0, 0),  # accents stay
    ("$300", "300", 1, 1),
    ("1,000", "1000", 1, 1),
]


@pytest.mark.parametrize("prediction, gold, exact, overlap", CASES)
def test_the_metrics_of_a_pair(prediction, gold, exact, overlap):
    assert exact_match(prediction, gold) == exact
    assert f1(prediction, gold) == pytest.approx(overlap)
    assert f1(gold, prediction) == pytest.approx(overlap)


def test_articles_are_removed_after_the_punctuation():
    assert normalise("A-Team, the 'an' and a.") == "ateam and"


def question(name, *gold):
    return Question(name, "?", 0, tuple(Answer(text, 0) for text in gold))


def test_the_best_of_several_gold_answers_counts_for_each_metric():
    questions = [question("1", "Oslo", "in the Oslo of Norway"), question("2", "Rome")]
    result = score(questions, {"1": "in Oslo of Norway", "2": "Paris"})
    assert result == (50.0, 50.0)
    assert score(questions, {"1": "Oslo in", "2": "Rome"}) == (50.0, pytest.approx(100 * (2 / 3 + 1) / 2))


def test_a_question_without_a_prediction_is_wrong_and_one_without_answers_is_not_asked():
    assert score([question("1", "Oslo"), question("2", "Rome"), question("3")], {"1": "Oslo", "3": "x"}) == (50, 50)
    assert all(math.isnan(value) for value in score([question("3")], {"3": "x"}))


def test_a_file_is_read(tmp_path):
    (tmp_path / "train.json").write_text(json.dumps(content()), encoding="utf-8")
    squad = read_squad(tmp_path / "train.json")
    assert squad.contexts == list(TEXTS)
    assert [(q.context, q.text, q.gold) for q in squad.questions] == [
        (number, text, answers)
        for number, questions in enumerate(TEXTS.values())
        for text, answers in questions.items()
    ]
    for asked in squad.questions:
        start, end = locate(squad.contexts[asked.context], asked.answers)
        assert squad.contexts[asked.context][start:end] == asked.gold[0]


def test_an_answer_that_is_not_where_it_says_is_not_found():
    assert locate("in Oslo", [Answer("Oslo", 3)]) == (3, 7)
    assert locate("in Oslo", [Answer("Oslo", 2), Answer("in", 0)]) == (0, 2)
    for answer in (Answer("Oslo", 2), Answer("Oslo", -4), Answer("", 0), Answer("o", 99)):
        assert locate("in Oslo", [answer]) is None


def spoilt(change):
    broken = content()
    change(broken["data"][0]["paragraphs"][0])
    return broken


@pytest.mark.parametrize(
    "value, message",
    [
        ([], "the file: must be an object"),
        ({"version": "1.1"}, "the file: has no data"),
        ({"data": {}}, "the file: data must be a list"),
        ({"data": [{"title": "x"}]}, "data[0]: has no paragraphs"),
        (spoilt(lambda p: p.pop("context")), "data[0].paragraphs[0]: has no context"),
        (spoilt(lambda p: p["qas"][1].update(id=3)), "data[0].paragraphs[0].qas[1]: id must be a string"),
        (spoilt(lambda p: p["qas"][1].update(id="0-0")), "data[0].paragraphs[0].qas[1]: the id '0-0' was there before"),
        (
            spoilt(lambda p: p["qas"][0].update(is_impossible=True)),
            "data[0].paragraphs[0].qas[0]: is_impossible is of SQuAD 2.0, this is for 1.1",
        ),
        (
            spoilt(lambda p: p["qas"][0]["answers"][0].update(answer_start="0")),
            "data[0].paragraphs[0].qas[0].answers[0]: answer_start must be a whole number",
        ),
    ],
)
def test_what_is_no_squad_is_refused_with_its_place(value, message, tmp_path):
    path = tmp_path / "train.json"
    path.write_text(json.dumps(value))
    with pytest.raises(SquadError) as refused:
        read_squad(path)
    assert str(refused.value) == f"{path}: {message}"


@pytest.mark.parametrize("text", ["", "{", b"\xff"])
def test_what_is_no_json_is_refused_in_one_line(text, tmp_path):
    path = tmp_path / "train.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SquadError) as refused:
        read_squad(path)
    assert str(refused.value).startswith(f"{path}: ") and "\n" not in str(refused.value)


def test_a_file_without_answers_can_be_read(tmp_path):
    asked = spoilt(lambda p: p["qas"][0].pop("answers"))
    (tmp_path / "test.json").write_text(json.dumps(asked))
    assert read_squad(tmp_path / "test.json").questions[0].answers == ()
