"""Questions of SQuAD with as much of their context as a model sees at once: [CLS] question [SEP] context [SEP]."""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset
from torch import Tensor

from mixhead_plugin.data.squad import Squad, locate
from mixhead_plugin.data.wordpiece import UNKNOWN, WordPiece

SPECIAL = 3  # [CLS] and two [SEP]
IGNORED = -100  # a target that is not known; torch's ignore_index


class Sizes(NamedTuple):
    """As in Devlin et al. (2019)."""

    max_seq_length: int = 384  # tokens of a window, with the question and special tokens
    doc_stride: int = 128  # tokens between the beginnings of two windows of a context
    max_query_length: int = 64  # tokens of a question; longer ones are cut

    @property
    def least_room(self) -> int:
        """Tokens of the context that a window has room for at least."""
        return self.max_seq_length - self.max_query_length - SPECIAL


class Pieces(NamedTuple):
    """A tokenised text."""

    ids: np.ndarray  # int32 [n]
    places: np.ndarray  # int32 [n, 2]: first character and last + 1 of each

    def covering(self, start: int, end: int) -> Optional[Tuple[int, int]]:
        """First and last piece of the characters start to end - 1; None if no piece has any of them."""
        first = int(np.searchsorted(self.places[:, 1], start, side="right"))
        last = int(np.searchsorted(self.places[:, 0], end, side="left")) - 1
        return (first, last) if first <= last else None


def windows_of(length: int, room: int, stride: int) -> List[Tuple[int, int]]:
    """Beginning and length of the windows of a text of `length` tokens, each of at most `room`; at least one."""
    found = []
    start = 0
    while True:
        found.append((start, min(room, length - start)))
        if start + room >= length:
            return found
        start += stride


def has_most_context(windows: Sequence[Tuple[int, int]], number: int) -> np.ndarray:
    """Which tokens of window `number` have more context in it than in any other window; bool [its length].

    Context is the smaller of a token's distances to both ends; a longer window counts a little more, and the first of
    equals wins: Devlin et al.'s 'max context', by which a token is a start in exactly one window.
    """
    start, length = windows[number]
    tokens = start + np.arange(length)
    best, winner = np.full(length, -np.inf), np.full(length, -1)
    for i, (begin, size) in enumerate(windows):
        context = np.minimum(tokens - begin, begin + size - 1 - tokens) + 0.01 * size
        context[(tokens < begin) | (tokens >= begin + size)] = -np.inf
        winner[context > best] = i
        best = np.maximum(best, context)
    return winner == number


class SquadWindows(FairseqDataset):
    """All windows of all questions.

    Args:
        squad: the questions
        dictionary: its pieces are the vocabulary; bos is [CLS], eos is [SEP]
        tokeniser: of the same vocabulary
        sizes: of the windows; the stride must be at most `sizes.least_room`, or tokens between windows are in none
        first_question: the number of the first question, for a task that has several data sets
        seed: of the order, which is another in each epoch; None for the shortest first

    Attributes:
        unlocated: questions that have answers, none of which stands where the file says; they count in no loss
        cut: questions that were too long
    """

    def __init__(
        self,
        squad: Squad,
        dictionary: Dictionary,
        tokeniser: WordPiece,
        sizes: Sizes,
        first_question: int = 0,
        seed: Optional[int] = None,
    ):
        super().__init__()
        self.squad = squad
        self.dictionary = dictionary
        self.first_question = first_question
        self.seed, self.epoch = seed, 1
        self._tokeniser = tokeniser
        self._contexts = [self._pieces(context) for context in squad.contexts]
        self._queries: List[np.ndarray] = []
        self._answers: List[Optional[Tuple[int, int]]] = []  # first and last piece of the context
        self._first_window = []
        self.unlocated = self.cut = 0
        windows: List[Tuple[int, int, int]] = []
        for number, question in enumerate(squad.questions):
            query, context = self._pieces(question.text).ids, self._contexts[question.context]
            self.cut += len(query) > sizes.max_query_length
            self._queries.append(query[: sizes.max_query_length])
            place = locate(squad.contexts[question.context], question.answers)
            self._answers.append(context.covering(*place) if place else None)
            self.unlocated += bool(question.answers) and self._answers[-1] is None
            self._first_window.append(len(windows))
            room = sizes.max_seq_length - len(self._queries[-1]) - SPECIAL
            windows += [(number, *window) for window in windows_of(len(context.ids), room, sizes.doc_stride)]
        self._first_window.append(len(windows))
        self._windows = np.array(windows, dtype=np.int64).reshape(-1, 3)  # question, first piece, pieces
        queries = np.array([len(query) for query in self._queries], dtype=np.int64)
        self.sizes = queries[self._windows[:, 0]] + self._windows[:, 2] + SPECIAL

    def _pieces(self, text: str) -> Pieces:
        pieces = self._tokeniser.pieces(text)
        numbers, unknown = self.dictionary.indices, self.dictionary.unk()
        ids = np.array([unknown if name == UNKNOWN else numbers[name] for name, _, _ in pieces], dtype=np.int32)
        return Pieces(ids, np.array([places for _, *places in pieces], dtype=np.int32).reshape(-1, 2))

    def __len__(self) -> int:
        return len(self._windows)

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        return self.sizes[indices]

    def size(self, index: int) -> int:
        return int(self.sizes[index])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        return self.seed is None  # training resumed in an epoch must find its batches

    def ordered_indices(self) -> np.ndarray:
        if self.seed is None:
            return np.argsort(self.sizes, kind="stable")
        return np.random.default_rng([self.seed, self.epoch]).permutation(len(self))

    @property
    def supports_prefetch(self) -> bool:
        return False

    def __getitem__(self, index: int) -> Dict[str, Any]:
        """One window of n tokens.

        Returns:
            tokens: int64 [n]
            segments: int64 [n], 1 after the first [SEP]
            target: int64 [2], first and last token of the answer; 0, [CLS], where this window does not have it all;
                IGNORED where it is not known
            starts: bool [n], where an answer may begin
            ends: bool [n], where it may end: the context
            places: int64 [n, 2], for a token of the context its first character and last + 1
            question: the number of the question, from `first_question` on
            question_id: what the file calls it
            window: which of the question's windows it is, from 0 on, and of how many
        """
        number, first, length = map(int, self._windows[index])
        query, question = self._queries[number], self.squad.questions[number]
        context = self._contexts[question.context]
        before = len(query) + 2  # tokens of the window before its context
        inside, pieces = slice(before, before + length), slice(first, first + length)
        n = before + length + 1
        tokens = torch.full((n,), self.dictionary.eos(), dtype=torch.long)
        tokens[0] = self.dictionary.bos()
        tokens[1 : before - 1] = torch.from_numpy(query)
        tokens[inside] = torch.from_numpy(context.ids[pieces])
        segments = torch.zeros(n, dtype=torch.long)
        segments[before:] = 1
        siblings = slice(self._first_window[number], self._first_window[number + 1])
        windows = [(int(begin), int(size)) for _, begin, size in self._windows[siblings]]
        starts, ends = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
        starts[inside] = torch.from_numpy(has_most_context(windows, index - siblings.start))
        ends[inside] = True
        places = torch.zeros(n, 2, dtype=torch.long)
        places[inside] = torch.from_numpy(context.places[pieces]).long()
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
        answer = self._answers[number]
        if answer is None:
            return torch.full((2,), IGNORED)
        if answer[0] < first or answer[1] >= first + length:
            return torch.zeros(2, dtype=torch.long)
        return torch.tensor(answer) - first + before

    def collater(self, samples: List[Dict[str, Any]]) -> Dict[str, Any]:
        """A batch of B windows, padded on the right to N tokens; what is padded is no start and no end."""
        if not samples:
            return {}

        def padded(name: str, value: Any) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence([sample[name] for sample in samples], True, value)

        lengths = torch.tensor([len(sample["tokens"]) for sample in samples])
        return {
            "id": torch.tensor([sample["index"] for sample in samples]),
            "net_input": {
                "src_tokens": padded("tokens", self.dictionary.pad()),  # [B, N]
                "src_lengths": lengths,
                "segments": padded("segments", 0),  # [B, N]
            },
            "target": torch.stack([sample["target"] for sample in samples]),  # [B, 2]
            "starts": padded("starts", False),  # [B, N]
            "ends": padded("ends", False),  # [B, N]
            "places": padded("places", 0),  # [B, N, 2]
            "question": torch.tensor([sample["question"] for sample in samples]),
            "question_ids": [sample["question_id"] for sample in samples],
            "windows": [sample["window"] for sample in samples],
            "nsentences": len(samples),
            "ntokens": int(lengths.sum()),
        }
