"""Cut the contexts of SQuAD into windows: [CLS] question [SEP] context [SEP]."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from fairseq.data import Dictionary
from tokenizers import Tokenizer
from torch import Tensor

from bert.bases import SizedDataset
from bert.squad_data import Squad, locate
from bert.wordpiece import characters_of

SPECIAL = 3  # [CLS] and two [SEP]
IGNORED = -100  # the target of an unknown answer; torch's ignore_index


class Sizes(NamedTuple):
    """Sizes of the windows, with the defaults of Devlin et al. (2019)."""

    max_seq_length: int = 384  # tokens of a window, with the question and special tokens
    doc_stride: int = 128  # tokens of a context between the beginnings of two windows
    max_query_length: int = 64  # tokens of a question; longer ones are cut

    @property
    def least_room(self) -> int:
        """Return how many tokens of the context fit beside the longest question."""
        return self.max_seq_length - self.max_query_length - SPECIAL


class Pieces(NamedTuple):
    """A tokenised text."""

    ids: np.ndarray  # int32 [n]
    characters: np.ndarray  # int32 [n, 2]: the first character of each piece, and its last + 1

    def covering(self, start: int, end: int) -> Optional[tuple[int, int]]:
        """Return the first and the last piece of the characters start to end - 1.

        None if no piece has any.
        """
        first = int(np.searchsorted(self.characters[:, 1], start, side="right"))
        last = int(np.searchsorted(self.characters[:, 0], end, side="left")) - 1
        return (first, last) if first <= last else None


def windows_of(length: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Return the beginning and the length of each window of a text of `length` tokens.

    There is at least one.

    The library `tokenizers` would take the overlap of two windows instead, which depends on the
    question's length.
    """
    starts = range(0, max(length - room, 0) + stride, stride)
    return [(start, min(room, length - start)) for start in starts]


def has_most_context(windows: Sequence[tuple[int, int]], number: int) -> np.ndarray:
    """Return which tokens of a window have more context in it than in any other window.

    The result is bool, [length of the window].

    The context of a token is the smaller of its distances to both ends, plus a hundredth of the
    window's length. The first of equal windows wins. By this rule of Devlin et al. an answer may
    start at a token in one window only.
    """
    start, length = windows[number]
    tokens = start + np.arange(length)
    begins, sizes = np.array(windows).T[:, :, None]  # [W, 1] each
    context = np.minimum(tokens - begins, begins + sizes - 1 - tokens) + 0.01 * sizes  # [W, length]
    context[(tokens < begins) | (tokens >= begins + sizes)] = -np.inf
    return context.argmax(0) == number


class SquadWindows(SizedDataset):
    """All windows of all questions.

    Args:
        squad: the questions
        dictionary: bos is [CLS], eos is [SEP]
        tokeniser: cuts texts into pieces, which are symbols of `dictionary`
        sizes: the sizes of the windows; with a stride above `sizes.least_room`, some tokens would
            be in no window
        first_question: the number of the first question, for a task with several data sets
        seed: the seed of the order, which changes from epoch to epoch; None sorts the windows by
            length

    Attributes:
        unlocated: the number of questions whose answers are not where the file says; the loss
            ignores them
        cut: the number of questions that were too long
    """

    def __init__(
        self,
        squad: Squad,
        dictionary: Dictionary,
        tokeniser: Tokenizer,
        sizes: Sizes,
        first_question: int = 0,
        seed: Optional[int] = None,
    ):
        super().__init__()
        self.squad = squad
        self.dictionary = dictionary
        self.tokeniser = tokeniser
        self.first_question = first_question
        self.seed = seed
        self.epoch = 1
        self.contexts = [self._pieces(context) for context in squad.contexts]
        self.queries: list[np.ndarray] = []
        self.answers: list[Optional[tuple[int, int]]] = []  # first and last piece of the context
        self.unlocated = 0
        self.cut = 0
        self._first_window = [0]

        windows: list[tuple[int, int, int]] = []
        for number, question in enumerate(squad.questions):
            query = self._pieces(question.text).ids
            if len(query) > sizes.max_query_length:
                query = query[: sizes.max_query_length]
                self.cut += 1
            self.queries.append(query)

            context = self.contexts[question.context]
            place = locate(squad.contexts[question.context], question.answers)
            answer = None if place is None else context.covering(*place)
            if question.answers and answer is None:
                self.unlocated += 1
            self.answers.append(answer)

            room = sizes.max_seq_length - len(query) - SPECIAL
            for start, length in windows_of(len(context.ids), room, sizes.doc_stride):
                windows.append((number, start, length))
            self._first_window.append(len(windows))

        # [W, 3]: question, first piece, pieces
        self._windows = np.array(windows, dtype=np.int64).reshape(-1, 3)
        queries = np.array([len(query) for query in self.queries], dtype=np.int64)
        self.sizes = queries[self._windows[:, 0]] + self._windows[:, 2] + SPECIAL

    def _pieces(self, text: str) -> Pieces:
        encoding = self.tokeniser.encode(text, add_special_tokens=False)
        characters = np.array(characters_of(text, encoding), dtype=np.int32).reshape(-1, 2)
        return Pieces(np.array(encoding.ids, dtype=np.int32), characters)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        return self.seed is None  # a training that resumes within an epoch must find its batches

    def ordered_indices(self) -> np.ndarray:
        if self.seed is None:
            return np.argsort(self.sizes, kind="stable")
        return np.random.default_rng([self.seed, self.epoch]).permutation(len(self))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one window of n tokens.

        Returns:
            tokens: int64 [n]
            segments: int64 [n], 1 after the first [SEP]
            target: int64 [2], first and last token of the answer; 0 and 0, [CLS], if the window
                lacks a part of it; IGNORED if the answer is unknown
            starts: bool [n], where an answer may begin
            ends: bool [n], where an answer may end: the context
            places: int64 [n, 2], for a token of the context its first character and its last + 1
            question: the number of the question, counted from `first_question`
            question_id: the id of the question in the file
            window: the number of this window among the question's, from 0 on, and how many there
                are
        """
        number, first, length = map(int, self._windows[index])
        query = self.queries[number]
        question = self.squad.questions[number]
        context = self.contexts[question.context]

        # [CLS] query [SEP] pieces [SEP]
        before = len(query) + 2
        n = before + length + 1
        inside = slice(before, before + length)  # of the window
        pieces = slice(first, first + length)  # of the context
        tokens = torch.full((n,), self.dictionary.eos(), dtype=torch.long)
        tokens[0] = self.dictionary.bos()
        tokens[1 : before - 1] = torch.from_numpy(query)
        tokens[inside] = torch.from_numpy(context.ids[pieces])
        segments = torch.zeros(n, dtype=torch.long)
        segments[before:] = 1

        siblings = slice(self._first_window[number], self._first_window[number + 1])
        windows = self._windows[siblings, 1:]
        starts = torch.zeros(n, dtype=torch.bool)
        starts[inside] = torch.from_numpy(has_most_context(windows, index - siblings.start))
        ends = torch.zeros(n, dtype=torch.bool)
        ends[inside] = True
        places = torch.zeros(n, 2, dtype=torch.long)
        places[inside] = torch.from_numpy(context.characters[pieces]).long()
        return {
            "index": index,
            "tokens": tokens,
            "segments": segments,
            "target": self._target(number, first, length, before),
            "starts": starts,
            "ends": ends,
            "places": places,
            "question": self.first_question + number,
            "question_id": question.id,
            "window": (int(index) - siblings.start, len(windows)),
        }

    def _target(self, number: int, first: int, length: int, before: int) -> Tensor:
        """Return the target of `__getitem__`.

        Args:
            number: the number of the question
            first: the first piece of the context that is in the window
            length: how many pieces are
            before: tokens of the window before its context
        """
        answer = self.answers[number]
        if answer is None:
            return torch.full((2,), IGNORED)
        if answer[0] < first or answer[1] >= first + length:
            return torch.zeros(2, dtype=torch.long)
        return torch.tensor(answer) - first + before

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch of B windows, padded on the right to N tokens.

        Padding is no start and no end.
        """
        if not samples:
            return {}

        def of_all(name: str) -> list[Any]:
            return [sample[name] for sample in samples]

        def padded(name: str, value: Any) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(of_all(name), True, value)

        lengths = torch.tensor([len(tokens) for tokens in of_all("tokens")])
        return {
            "id": torch.tensor(of_all("index")),
            "net_input": {
                "src_tokens": padded("tokens", self.dictionary.pad()),  # [B, N]
                "src_lengths": lengths,
                "segments": padded("segments", 0),  # [B, N]
            },
            "target": torch.stack(of_all("target")),  # [B, 2]
            "starts": padded("starts", False),  # [B, N]
            "ends": padded("ends", False),  # [B, N]
            "places": padded("places", 0),  # [B, N, 2]
            "question": torch.tensor(of_all("question")),
            "question_ids": of_all("question_id"),
            "windows": of_all("window"),
            "nsentences": len(samples),
            "ntokens": int(lengths.sum()),
        }
