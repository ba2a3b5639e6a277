"""From sentences to the numbers of a model's dictionary."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from common.archives import fail

if TYPE_CHECKING:  # fairseq takes seconds to import, for nothing where only flags are read
    from fairseq.data import Dictionary

Encoder = Callable[[str], list[int]]


class Layout(NamedTuple):
    """How a model's input is put together: <s> a </s>, or <s> a </s> b </s> (RoBERTa: <s> a </s></s> b </s>)."""

    separators: int  # </s> between two texts

    def room(self, texts: int, length: int) -> int:
        """Pieces of `texts` texts that fit `length` tokens."""
        return length - (2 if texts == 1 else 2 + self.separators)


LAYOUTS = {"bert": Layout(1), "roberta": Layout(2)}


def encoder(model: str, folder: Path, lowercase: bool) -> Encoder:
    """From a text to numbers, without <s> and </s>.

    Args:
        model: bert or roberta
        folder: has dict.txt and FILES[model]
        lowercase: for bert: of an uncased vocabulary
    """
    from fairseq.data import Dictionary
    from fairseq.data.encoders.gpt2_bpe_utils import get_encoder

    dictionary = Dictionary.load(str(folder / "dict.txt"))
    if model == "bert":
        return _wordpiece(dictionary, folder / "vocab.txt", lowercase)
    bpe = get_encoder(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
    return lambda text: [dictionary.index(str(piece)) for piece in bpe.encode(text)]


def _wordpiece(dictionary: "Dictionary", path: Path, lowercase: bool) -> Encoder:
    from mixhead_plugin.data.wordpiece import SPECIAL, WordPiece

    pieces = WordPiece.from_file(path, lowercase)
    if missing := sorted(piece for piece in pieces.vocabulary - SPECIAL.keys() if piece not in dictionary):
        fail(f"{path}: has {len(missing):,} pieces that dict.txt beside it lacks, such as {missing[0]!r}")
    # not Dictionary.index: [UNK] is not in there, and is found as <unk>, which it means
    numbers = dictionary.indices
    return lambda text: [numbers.get(piece, dictionary.unk()) for piece in pieces.tokenise(text)]


def shorten(texts: Sequence[list[int]], room: int) -> list[list[int]]:
    """Cut off the ends of the longer text, and then of both in turn, until they fit, as BERT does."""
    excess = sum(map(len, texts)) - room
    if excess <= 0:
        return list(texts)
    if len(texts) == 1:
        return [texts[0][:room]]
    first, second = map(len, texts)
    cut = min(abs(first - second), excess)
    rest = excess - cut
    first, second = (first - cut, second) if first > second else (first, second - cut)
    # of two that are as long the second gives first
    return [texts[0][: first - rest // 2], texts[1][: second - (rest - rest // 2)]]
