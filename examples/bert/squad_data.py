"""SQuAD 1.1 (Rajpurkar et al., 2016): its files, and both metrics of the official evaluation."""

import json
import re
import string
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Optional


class SquadError(ValueError):
    """A file does not have SQuAD's layout; the message is one line."""


class Answer(NamedTuple):
    text: str
    start: int  # its first character in the context


class Question(NamedTuple):
    id: str
    text: str
    context: int  # the number of its context
    answers: tuple[Answer, ...]  # empty in a file to predict answers for

    @property
    def gold(self) -> tuple[str, ...]:
        return tuple(answer.text for answer in self.answers)


class Squad(NamedTuple):
    contexts: list[str]
    questions: list[Question]


def read_squad(path: str | Path) -> Squad:
    """Read a file of SQuAD 1.1, or one of the same layout, with or without answers.

    Raises:
        SquadError: the file has another layout; the message says where
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise SquadError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # no JSON, or no UTF-8
        raise SquadError(f"{path}: {error}") from error
    try:
        return _squad_of(content)
    except _Misplaced as error:
        raise SquadError(f"{path}: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse two values of one name; JSON would take the last."""
    content = dict(pairs)
    if len(content) < len(pairs):
        (most, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"an object has {most!r} twice")
    return content


class _Misplaced(Exception):
    """Say what is wrong, and where in the file."""


def _squad_of(content: Any) -> Squad:
    squad = Squad([], [])
    ids = set()
    for a, article in enumerate(_field(content, "data", list, "the file")):
        for p, paragraph in enumerate(_field(article, "paragraphs", list, f"data[{a}]")):
            place = f"data[{a}].paragraphs[{p}]"
            squad.contexts.append(_field(paragraph, "context", str, place))
            for q, value in enumerate(_field(paragraph, "qas", list, place)):
                question = _question(value, len(squad.contexts) - 1, f"{place}.qas[{q}]")
                if question.id in ids:
                    raise _Misplaced(f"{place}.qas[{q}]: the id {question.id!r} was there before")
                ids.add(question.id)
                squad.questions.append(question)
    return squad


def _question(value: Any, context: int, place: str) -> Question:
    name = _field(value, "id", str, place)
    text = _field(value, "question", str, place)
    if value.get("is_impossible"):
        raise _Misplaced(f"{place}: is_impossible is of SQuAD 2.0, this is for 1.1")
    answers = []
    for i, answer in enumerate(_field({"answers": [], **value}, "answers", list, place)):
        where = f"{place}.answers[{i}]"
        words = _field(answer, "text", str, where)
        start = _field(answer, "answer_start", int, where)
        answers.append(Answer(words, start))
    return Question(name, text, context, tuple(answers))


def _field(value: Any, name: str, kind: type, place: str) -> Any:
    if not isinstance(value, dict):
        raise _Misplaced(f"{place}: must be an object")
    if name not in value:
        raise _Misplaced(f"{place}: has no {name}")
    if type(value[name]) is not kind:  # isinstance would take a bool for an int
        kinds = {list: "a list", str: "a string", int: "a whole number"}
        raise _Misplaced(f"{place}: {name} must be {kinds[kind]}")
    return value[name]


def locate(context: str, answers: Iterable[Answer]) -> Optional[tuple[int, int]]:
    """Return where the first answer begins and ends of those that stand at their `start`.

    These are its first character, and the last + 1; None if no answer stands there.
    """
    for answer in answers:
        if answer.text and answer.start >= 0 and context.startswith(answer.text, answer.start):
            return answer.start, answer.start + len(answer.text)
    return None


# ---- the metrics -------------------------------------------------------------------------------

_ARTICLES = re.compile(r"\b(a|an|the)\b")
# ASCII alone, as the official evaluation has it
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(answer: str) -> str:
    """Fold case, remove punctuation and then articles, and put single spaces between words."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, gold: str) -> float:
    return float(normalise(prediction) == normalise(gold))


def f1(prediction: str, gold: str) -> float:
    """Return F1 of the bags of words.

    It is 0 if either is empty, even if both are and match exactly.
    """
    predicted = normalise(prediction).split()
    expected = normalise(gold).split()
    common = sum((Counter(predicted) & Counter(expected)).values())
    if common == 0:
        return 0.0
    precision = common / len(predicted)
    recall = common / len(expected)
    return 2 * precision * recall / (precision + recall)


class Score(NamedTuple):
    """Both metrics in percent; nan without a question to score."""

    exact_match: float
    f1: float


def score(questions: Iterable[Question], predictions: dict[str, str]) -> Score:
    """Return the means over all questions with gold answers.

    Where a question has several right answers, the score is that of the nearest one. A question
    without a prediction is wrong.
    """
    exact = 0.0
    overlap = 0.0
    number = 0
    for question in questions:
        if not question.answers:
            continue
        number += 1
        if question.id in predictions:
            prediction = predictions[question.id]
            exact += max(exact_match(prediction, gold) for gold in question.gold)
            overlap += max(f1(prediction, gold) for gold in question.gold)
    if number == 0:
        return Score(float("nan"), float("nan"))
    return Score(100 * exact / number, 100 * overlap / number)
