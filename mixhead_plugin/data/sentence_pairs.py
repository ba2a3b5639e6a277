"""Pairs of segments for BERT's pre-training: in half of them B goes on where A ends (Devlin et al., 2018)."""

from typing import Any, Dict, List, NamedTuple, Tuple

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset, data_utils
from torch import Tensor

SPECIAL = 3  # [CLS] a [SEP] b [SEP]
TRIES = 10  # to find a random B that is long enough
FOLLOWS, RANDOM = 0, 1  # what segment B is; the classes of published checkpoints


class Masking(NamedTuple):
    """Which words the language model has to find again, and what it sees in their places."""

    mask: int  # the index of [MASK]
    probability: float = 0.15  # of all tokens
    keep: float = 0.1  # of those, seen as they are
    replace: float = 0.1  # of those, seen as a random word

    def apply(self, tokens: np.ndarray, maskable: np.ndarray, words: range, rng: np.random.Generator) -> np.ndarray:
        """Hide some of `tokens`, int64 [N], in place.

        Args:
            maskable: the positions that may be chosen
            words: the indices of random words

        Returns:
            the chosen positions, at least one; the number is that of BERT's own code, a share of all tokens
        """
        number = min(len(maskable), max(1, round(len(tokens) * self.probability)))
        chosen = rng.choice(maskable, number, replace=False)
        fate = rng.random(number)
        hidden = chosen[fate >= self.keep + self.replace]
        random = chosen[(fate >= self.keep) & (fate < self.keep + self.replace)]
        tokens[hidden] = self.mask
        tokens[random] = rng.integers(words.start, words.stop, len(random))
        return chosen


class SentencePairs(FairseqDataset):
    """Spans of documents, each cut in two; B is then sometimes taken from another document instead.

    The spans are the same in all epochs: as many whole lines of one document as fit, and the beginning of the next.
    Where a span is cut, what becomes of B and which words are masked is drawn from the seed, the epoch and the number
    of the span alone, so that it depends neither on the worker that asks nor on what was asked before.

    Neither the length of B nor where it ends tells its kind: both candidates are found first, ended within a line by
    the same rule, and cut to the shorter, where neither ends a line. A document's last line, where it is alone in its
    span, has no B that follows.

    Args:
        lines: binarised text, each line closed by </s>; those with nothing else end a document
        sizes: the lengths of `lines`
        dictionary: has `masking.mask` as its last symbol
        length: of a pair at most, with its special tokens
        masking: what is hidden
        seed: of everything random
        short_probability: share of spans that get a random smaller length
        lines_per_document: 0 for documents that end with an empty line; else each has this many lines
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
        self.lines, self.dictionary, self.masking, self.seed = lines, dictionary, masking, seed
        self.words = range(dictionary.nspecial, masking.mask)
        # shared with the workers that read, which stay from epoch to epoch
        self._epoch = torch.ones(1, dtype=torch.int64).share_memory_()
        self._cut_into_units(np.asarray(sizes, dtype=np.int64) - 1, (length - SPECIAL) // 2, lines_per_document)
        self._pack(length - SPECIAL, short_probability)

    def _cut_into_units(self, lengths: np.ndarray, longest: int, lines_per_document: int) -> None:
        """A unit is what is not cut any more: a line, or a part of one that is longer than half a pair."""
        number = -(-lengths // longest)  # of units in each line; an empty line has none
        self.unit_line = np.repeat(np.arange(len(lengths)), number)  # [U]
        nth = np.arange(len(self.unit_line)) - np.repeat(number.cumsum() - number, number)
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
        """Spans of units of one document, as many as fit into `longest` tokens or what a short span may have."""
        rng = np.random.default_rng([self.seed, 0])
        end = np.append(0, self.unit_length.cumsum())  # [U + 1], tokens before each unit
        # What a span would have if it began with this unit: following the chain then takes no search.
        units = len(self.unit_length)
        short = rng.random(units) < short_probability
        # a short span has one unit at least, and room for something of B
        limit = np.where(short, np.maximum(rng.integers(2, max(3, longest), units), self.unit_length + 1), longest)
        last = self.document_start[self.unit_document + 1]  # [U], the end of the document
        stop = np.minimum(np.searchsorted(end, end[:-1] + limit, side="right") - 1, last).tolist()
        starts, unit = [], 0
        while unit < units:
            starts.append(unit)
            unit = stop[unit]
        self.unit_end = end
        self.span_start = np.array(starts, dtype=np.int64)  # [S], in units
        self.span_stop = np.array([stop[start] for start in starts], dtype=np.int64)  # [S]
        self.span_limit = limit[self.span_start]  # [S], tokens of A and B
        # of A and B at most; a unit alone gets a B from elsewhere
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

    def __len__(self) -> int:
        return len(self.sizes)

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def size(self, index: int) -> int:
        return int(self.sizes[index])

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        return self.sizes[indices]

    def ordered_indices(self) -> np.ndarray:
        """By length, for batches with little padding; in random order where that is equal."""
        order = np.random.default_rng([self.seed, 1]).permutation(len(self))
        return order[np.argsort(self.sizes[order], kind="stable")]

    def _tokens(self, start: int, stop: int) -> np.ndarray:
        """The tokens of units from `start` to before `stop`, all of one document."""
        parts = []
        for unit in range(start, stop):
            line = self.lines[int(self.unit_line[unit])]
            begin = int(self.unit_start[unit])
            parts.append(line[begin : begin + int(self.unit_length[unit])].numpy())
        return np.concatenate(parts)

    def _candidate(self, start: int, room: int, rng: np.random.Generator) -> Tuple[int, int]:
        """What can be B from unit `start` on: the unit before which it stops, and its tokens, at most `room`.

        Where the document ends before that, B ends at random within its last unit, as it does elsewhere.
        """
        stop = int(np.searchsorted(self.unit_end, self.unit_end[start] + room))  # the first that fills it
        stop = min(stop, int(self.document_start[self.unit_document[start] + 1]))
        found = int(self.unit_end[stop] - self.unit_end[start])
        return stop, room if found >= room else found - int(rng.integers(self.unit_length[stop - 1]))

    def _elsewhere(self, document: int, room: int, rng: np.random.Generator) -> int:
        """A unit of another document, preferably with `room` tokens from it to the document's end."""
        start = 0
        for _ in range(TRIES):
            other = int(rng.integers(self.documents - 1))
            other += other >= document
            first, end = int(self.document_start[other]), int(self.document_start[other + 1])
            start = int(rng.integers(first, end))
            if self.unit_end[end] - self.unit_end[start] >= room:
                break
        return start

    def _segments(self, index: int, rng: np.random.Generator) -> Tuple[np.ndarray, np.ndarray, int]:
        """A, B and what B is."""
        start, stop = int(self.span_start[index]), int(self.span_stop[index])
        document = int(self.unit_document[start])
        middle = start + int(rng.integers(1, max(2, stop - start)))  # B begins with it
        first = self._tokens(start, middle)
        room = int(self.span_limit[index]) - len(first)
        can_follow = middle < self.document_start[document + 1]
        # where nothing follows B is as long as what follows elsewhere
        follows = middle if can_follow else int(rng.integers(len(self.unit_length)))
        begins = [self._elsewhere(document, room, rng), follows]
        ends, lengths = zip(*(self._candidate(begin, room, rng) for begin in begins))
        length = min(lengths)
        while length > 1 and any(self._ends_a_unit(begin, length) for begin in begins):
            length -= 1
        relation = FOLLOWS if can_follow and rng.random() < 0.5 else RANDOM
        begin, end = (follows, ends[1]) if relation == FOLLOWS else (begins[0], ends[0])
        return first, self._tokens(begin, end)[:length], relation

    def _ends_a_unit(self, start: int, length: int) -> bool:
        """Whether so many tokens from unit `start` on are whole units."""
        end = self.unit_end[start] + length
        return bool(self.unit_end[np.searchsorted(self.unit_end, end)] == end)

    def __getitem__(self, index: int) -> Dict[str, Any]:
        rng = np.random.default_rng([self.seed, 2, self.epoch, index])
        first, second, relation = self._segments(index, rng)
        cut = len(first)
        begin, separator = [self.dictionary.bos()], [self.dictionary.eos()]
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

    def collater(self, samples: List[Dict[str, Any]]) -> Dict[str, Any]:
        """A batch, padded on the right.

        Returns:
            `net_input`: `src_tokens` and `segments`; `target`, the masked words, padding elsewhere, all int64 [B, N];
            `next_sentence`, int64 [B], FOLLOWS or RANDOM; `id`, `nsentences`, `ntokens`
        """
        if not samples:
            return {}

        def merge(name: str, padding: int) -> Tensor:
            return data_utils.collate_tokens([sample[name] for sample in samples], padding)

        pad = self.dictionary.pad()
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "net_input": {"src_tokens": merge("tokens", pad), "segments": merge("segments", 0)},
            "target": merge("target", pad),
            "next_sentence": torch.tensor([sample["relation"] for sample in samples]),
            "nsentences": len(samples),
            "ntokens": sum(len(sample["tokens"]) for sample in samples),
        }
