"""Pairs of segments A and B for BERT's pre-training (Devlin et al. 2019).

Half of the B follow A in the text.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.data import Dictionary, data_utils
from torch import Tensor

from bert.bases import SizedDataset

SPECIAL = 3  # [CLS] A [SEP] B [SEP]
TRIES = 10  # for a random B that is long enough
# the kinds of B, numbered as in published checkpoints
FOLLOWS = 0
RANDOM = 1


class Masking(NamedTuple):
    """Chooses the words that the language model must restore, and what it sees instead."""

    mask: int  # the index of [MASK]
    probability: float = 0.15  # share of all tokens
    keep: float = 0.1  # share of those that stay as they are
    replace: float = 0.1  # share of those that a random word replaces

    def apply(
        self, tokens: np.ndarray, maskable: np.ndarray, words: range, rng: np.random.Generator
    ) -> np.ndarray:
        """Hide some of `tokens`, and return their positions, at least one.

        Args:
            tokens: int64 [N], changed in place
            maskable: int64, the positions that may be chosen
            words: the indices of random words
            rng: draws the positions, and what happens to each
        """
        number = min(len(maskable), max(1, round(len(tokens) * self.probability)))
        chosen = rng.choice(maskable, number, replace=False)
        fate = rng.random(number)
        hidden = chosen[fate >= self.keep + self.replace]
        replaced = chosen[(fate >= self.keep) & (fate < self.keep + self.replace)]
        tokens[hidden] = self.mask
        tokens[replaced] = rng.integers(words.start, words.stop, len(replaced))
        return chosen


class SentencePairs(SizedDataset):
    """Spans of documents, each cut into A and B; half of the B come from another document instead.

    The spans are the same in all epochs: as many whole lines of one document as fit, and the
    beginning of the next. The cut, the choice of B and the masked words are random. They depend on
    the seed, the epoch and the number of the span alone, not on the worker or on earlier calls.

    The length and the end of B do not reveal its kind. For each pair a following and a random B are
    found by the same rule. Both are cut to the same length, at which neither ends a line. The last
    line of a document has no B that follows if it is alone in its span.

    Args:
        lines: binarised text, each line closed by </s>; a line without words ends a document
        sizes: the lengths of `lines`
        dictionary: its last symbol is `masking.mask`
        length: the most tokens of a pair, with its special tokens
        masking: chooses the words that are hidden
        seed: the seed of all random choices
        short_probability: share of spans with a random smaller length
        lines_per_document: the lines of each document; 0 if an empty line ends a document
    """

    def __init__(
        self,
        lines: Any,
        sizes: np.ndarray,
        dictionary: Dictionary,
        length: int,
        masking: Masking,
        seed: int,
        short_probability: float = 0.1,
        lines_per_document: int = 0,
    ):
        super().__init__()
        self.lines = lines
        self.dictionary = dictionary
        self.masking = masking
        self.seed = seed
        self.words = range(dictionary.nspecial, masking.mask)
        # shared with the worker processes, which stay from epoch to epoch
        self._epoch = torch.ones(1, dtype=torch.int64).share_memory_()
        longest = length - SPECIAL
        words_of_lines = np.asarray(sizes, dtype=np.int64) - 1  # without </s>
        self._cut_into_units(words_of_lines, longest // 2, lines_per_document)
        self._pack(longest, short_probability)

    def _cut_into_units(self, lengths: np.ndarray, longest: int, lines_per_document: int) -> None:
        """Find the units, which are never cut.

        They are lines, and parts of lines that are longer than half a pair.
        """
        units = -(-lengths // longest)  # [lines], rounded up: an empty line has no unit
        self.unit_line = np.repeat(np.arange(len(lengths)), units)  # [U]
        # the number of each unit in its line
        nth = np.arange(len(self.unit_line)) - np.repeat(units.cumsum() - units, units)
        self.unit_start = nth * longest  # [U], in its line
        self.unit_length = np.minimum(longest, lengths[self.unit_line] - self.unit_start)  # [U]
        if lines_per_document:
            filled = (lengths > 0).cumsum() - 1  # numbers the lines that are not empty
            document = filled[self.unit_line] // lines_per_document
        else:
            document = (lengths == 0).cumsum()[self.unit_line]
        first = np.flatnonzero(np.diff(document, prepend=-1))
        self.document_start = np.append(first, len(document))  # [documents + 1], in units
        self.unit_document = np.repeat(np.arange(len(first)), np.diff(self.document_start))  # [U]

    def _pack(self, longest: int, short_probability: float) -> None:
        """Fill each span with units of one document, up to `longest` tokens.

        Some spans are short.
        """
        rng = np.random.default_rng([self.seed, 0])
        end = np.append(0, self.unit_length.cumsum())  # [U + 1], tokens before each unit
        # Every unit gets the end of a span that would begin there; then no search is needed.
        units = len(self.unit_length)
        short = rng.random(units) < short_probability
        # a short span has at least one unit, and room for a part of B
        drawn = rng.integers(2, max(3, longest), units)
        limit = np.where(short, np.maximum(drawn, self.unit_length + 1), longest)
        last = self.document_start[self.unit_document + 1]  # [U], the end of the document
        stop = np.minimum(np.searchsorted(end, end[:-1] + limit, side="right") - 1, last).tolist()
        starts = []
        unit = 0
        while unit < units:
            starts.append(unit)
            unit = stop[unit]
        self.unit_end = end
        self.span_start = np.array(starts, dtype=np.int64)  # [S], in units
        self.span_stop = np.array([stop[start] for start in starts], dtype=np.int64)  # [S]
        self.span_limit = limit[self.span_start]  # [S], tokens of A and B
        # the most tokens of A and B; a unit that is alone gets its B from elsewhere
        beyond = np.minimum(self.span_stop + 1, last[self.span_start])
        alone = beyond - self.span_start == 1
        length = np.where(alone, longest, end[beyond] - end[self.span_start])
        self.sizes = np.minimum(length, self.span_limit) + SPECIAL  # [S]

    @property
    def documents(self) -> int:
        return len(self.document_start) - 1

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def ordered_indices(self) -> np.ndarray:
        """Sort by length, for little padding; pairs of equal length are in random order."""
        order = np.random.default_rng([self.seed, 1]).permutation(len(self))
        return order[np.argsort(self.sizes[order], kind="stable")]

    def _tokens(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens of the units from `start` to before `stop`, all of one document."""
        parts = []
        for unit in range(start, stop):
            line = self.lines[int(self.unit_line[unit])]
            begin = int(self.unit_start[unit])
            parts.append(line[begin : begin + int(self.unit_length[unit])].numpy())
        return np.concatenate(parts)

    def _candidate(self, start: int, room: int, rng: np.random.Generator) -> tuple[int, int]:
        """Find a B of at most `room` tokens from unit `start` on.

        Return the unit that it stops before, and its length.

        If the document ends before that, B ends at random within the document's last unit.
        """
        # the first that fills the room
        stop = int(np.searchsorted(self.unit_end, self.unit_end[start] + room))
        stop = min(stop, int(self.document_start[self.unit_document[start] + 1]))
        length = int(self.unit_end[stop] - self.unit_end[start])
        if length >= room:
            return stop, room
        return stop, length - int(rng.integers(self.unit_length[stop - 1]))

    def _elsewhere(self, document: int, room: int, rng: np.random.Generator) -> int:
        """Choose a unit of another document, if possible with `room` tokens from it to the end."""
        start = 0
        for _ in range(TRIES):
            other = int(rng.integers(self.documents - 1))
            if other >= document:  # the number of this one is left out
                other += 1
            first = int(self.document_start[other])
            end = int(self.document_start[other + 1])
            start = int(rng.integers(first, end))
            if self.unit_end[end] - self.unit_end[start] >= room:
                break
        return start

    def _segments(self, index: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
        """Return A, B, and FOLLOWS or RANDOM."""
        start = int(self.span_start[index])
        stop = int(self.span_stop[index])
        document = int(self.unit_document[start])
        middle = start + int(rng.integers(1, max(2, stop - start)))  # B begins with it
        first = self._tokens(start, middle)
        room = int(self.span_limit[index]) - len(first)
        can_follow = middle < self.document_start[document + 1]
        # if nothing follows, the length comes from a random other place
        follows = middle if can_follow else int(rng.integers(len(self.unit_length)))
        elsewhere = self._elsewhere(document, room, rng)

        # Both candidates are cut to one length, whichever is taken: it must not tell which.
        end_elsewhere, length_elsewhere = self._candidate(elsewhere, room, rng)
        end_follows, length_follows = self._candidate(follows, room, rng)
        length = min(length_elsewhere, length_follows)
        while length > 1 and (
            self._ends_a_unit(elsewhere, length) or self._ends_a_unit(follows, length)
        ):
            length -= 1

        if can_follow and rng.random() < 0.5:
            return first, self._tokens(follows, end_follows)[:length], FOLLOWS
        return first, self._tokens(elsewhere, end_elsewhere)[:length], RANDOM

    def _ends_a_unit(self, start: int, length: int) -> bool:
        """Tell if `length` tokens from unit `start` on are whole units."""
        end = self.unit_end[start] + length
        return bool(self.unit_end[np.searchsorted(self.unit_end, end)] == end)

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng([self.seed, 2, self.epoch, index])
        first, second, relation = self._segments(index, rng)
        cut = len(first)
        begin = [self.dictionary.bos()]
        separator = [self.dictionary.eos()]
        pair = np.concatenate([begin, first, separator, second, separator]).astype(np.int64)  # [N]
        segments = np.repeat([0, 1], [cut + 2, len(second) + 1])  # [N]
        maskable = np.r_[1 : 1 + cut, cut + 2 : len(pair) - 1]
        seen = pair.copy()
        chosen = self.masking.apply(seen, maskable, self.words, rng)
        target = np.full_like(pair, self.dictionary.pad())
        target[chosen] = pair[chosen]
        return {
            "id": index,
            "tokens": torch.from_numpy(seen),
            "segments": torch.from_numpy(segments),
            "target": torch.from_numpy(target),
            "relation": relation,
        }

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch, padded on the right.

        Its tensors are `src_tokens`, `segments` and `target`, all int64 [B, N], and
        `next_sentence`, int64 [B], FOLLOWS or RANDOM. `target` has the masked words, and padding
        elsewhere.
        """
        if not samples:
            return {}

        def of_all(name: str) -> list[Any]:
            return [sample[name] for sample in samples]

        def merge(name: str, padding: int) -> Tensor:
            return data_utils.collate_tokens(of_all(name), padding)

        pad = self.dictionary.pad()
        return {
            "id": torch.tensor(of_all("id")),
            "net_input": {"src_tokens": merge("tokens", pad), "segments": merge("segments", 0)},
            "target": merge("target", pad),
            "next_sentence": torch.tensor(of_all("relation")),
            "nsentences": len(samples),
            "ntokens": sum(map(len, of_all("tokens"))),
        }
