"""Turn logits into answers: the best spans of each window, then of all windows of a question."""

import json
import math
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bert.squad_data import Question, Squad, SquadError


class Span(NamedTuple):
    """A possible answer: the characters from start to before end of a context."""

    start: int
    end: int
    score: float  # its log-probability in its window


def best_spans(
    logits: Tensor, starts: Tensor, ends: Tensor, number: int, longest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the most probable spans of each window, the best first.

    Within a window the sum of both logits decides (Devlin et al. 2019, section 4.2). Between
    windows only probabilities can be compared: a window without the answer gives its probability to
    [CLS].

    Args:
        logits: [B, N, 2], for the first and the last token; -inf for padding
        starts: bool [B, N], where a span may begin
        ends: bool [B, N], where a span may end
        number: how many spans to return
        longest: the most tokens of a span

    Returns:
        scores: float32 [B, K], log-probabilities, K <= number; -inf where a window has fewer spans
        first, last: int64 [B, K], the first and the last token of each span
    """
    first, last = logits.float().log_softmax(1).unbind(-1)  # [B, N] each
    first = first.masked_fill(~starts, -math.inf)
    last = last.masked_fill(~ends, -math.inf)
    longest = min(longest, first.shape[1])

    # Row n of a window has the ends that a span from token n on may have.
    ahead = F.pad(last, (0, longest - 1), value=-math.inf).unfold(1, longest, 1)  # [B, N, L]
    total = (first.unsqueeze(-1) + ahead).flatten(1)  # [B, N * L]
    scores, places = total.topk(min(number, total.shape[1]))  # [B, K]

    begin = places // longest
    return scores, begin, begin + places % longest


def spans_of(sample: dict[str, Any], logits: Tensor, number: int, longest: int) -> list[list[Span]]:
    """Return the best spans of every window of a batch as characters of its context.

    Args:
        sample: a batch of SquadWindows
        logits: [B, N, 2]; -inf for padding
        number: the most spans of a window
        longest: the most tokens of a span
    """
    scores, first, last = best_spans(logits, sample["starts"], sample["ends"], number, longest)
    rows = torch.arange(len(scores), device=scores.device).unsqueeze(-1)
    last = last.clamp(max=logits.shape[1] - 1)  # where a window has fewer spans
    starts = sample["places"][rows, first, 0]  # [B, K]
    ends = sample["places"][rows, last, 1]  # [B, K]

    of_windows = []
    for row in zip(starts.tolist(), ends.tolist(), scores.tolist()):
        spans = [Span(start, end, score) for start, end, score in zip(*row)]
        of_windows.append([span for span in spans if span.score > -math.inf])
    return of_windows


class NBestFile:
    """A file of JSON lines, one for each window.

    A line has the question's id, the window's number and the best spans.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        # empties an old file, and fails at once if the path is impossible
        self.path.write_bytes(b"")

    def write(self, sample: dict[str, Any], spans: Iterable[list[Span]]) -> None:
        """Append the spans of a batch, as `spans_of` returns them."""
        with self.path.open("a", encoding="utf-8") as file:
            for name, window, best in zip(sample["question_ids"], sample["windows"], spans):
                file.write(json.dumps({"id": name, "window": window, "spans": best}) + "\n")


def read_spans(path: str | Path, questions: Iterable[Question]) -> dict[str, list[Span]]:
    """Read the file of an NBestFile: the spans of all windows of each question.

    Raises:
        SquadError: the file has other questions, or lacks windows
    """
    windows: dict[str, dict[int, list[Span]]] = {}  # by question and number
    expected: dict[str, int] = {}  # the windows of each question
    for name, number, total, spans in _lines(path):
        windows.setdefault(name, {})[number] = spans
        expected[name] = total

    wanted = {question.id for question in questions}
    missing = len(wanted - windows.keys())
    strange = len(windows.keys() - wanted)
    if missing or strange:
        raise SquadError(
            f"{path}: lacks {missing:,} of {len(wanted):,} questions; {strange:,} are of other data"
        )
    partly = [name for name, total in expected.items() if len(windows[name]) != total]
    if partly:
        raise SquadError(
            f"{path}: lacks windows of {len(partly):,} questions; give "
            "--required-batch-size-multiple 1, or fairseq leaves out the last windows"
        )
    return {name: list(chain.from_iterable(spans.values())) for name, spans in windows.items()}


def _lines(path: str | Path) -> Iterator[tuple[str, int, int, list[Span]]]:
    """Yield the question's id, the window's number, how many there are, and the spans."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                content = json.loads(line.decode("utf-8"))
                window, windows = content["window"]
                spans = [Span(*span) for span in content["spans"]]
                yield content["id"], window, windows, spans
            except (ValueError, TypeError, KeyError):
                raise SquadError(
                    f"{path}: line {number} was not written by fairseq-validate --nbest-file"
                ) from None


def n_best(spans: Iterable[Span], context: str, number: int) -> list[dict[str, Any]]:
    """Return text and probability of the best answers of a question, the best first.

    Each text occurs once, with its best span. Without spans there is one answer, and it is empty.
    """
    scores: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: -span.score):
        scores.setdefault(context[span.start : span.end], span.score)
    if not scores:
        scores[""] = -math.inf
    best = list(scores.items())[:number]
    return [{"text": text, "probability": math.exp(score)} for text, score in best]


def predictions(
    squad: Squad, spans: dict[str, list[Span]], number: int
) -> dict[str, list[dict[str, Any]]]:
    """Return for each question what `n_best` finds."""
    answers = {}
    for question in squad.questions:
        context = squad.contexts[question.context]
        answers[question.id] = n_best(spans.get(question.id, []), context, number)
    return answers
