"""Turn texts into the numbers of a model's dictionary."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bert.pretrained import FILES
from bert.wordpiece import read_vocabulary, wordpiece
from common.messages import fail
from fairseq.data import Dictionary
from tokenizers import Tokenizer, models, pre_tokenizers

from mixhead_plugin.errors import OptionError


class Layout(NamedTuple):
    """The layout of an example: <s> a </s>, or <s> a </s> b </s>.

    RoBERTa has <s> a </s></s> b </s>.
    """

    separators: int  # </s> between two texts

    def room(self, texts: int, length: int) -> int:
        """Return how many pieces of `texts` texts fit into `length` tokens."""
        return length - (2 if texts == 1 else 2 + self.separators)


LAYOUTS = {"bert": Layout(1), "roberta": Layout(2)}


class Encoder:
    """Turn texts into numbers, without <s> and </s>.

    Args:
        model: bert or roberta
        folder: the folder of dict.txt and FILES[model]
        lowercase: whether bert's vocabulary is uncased
    """

    def __init__(self, model: str, folder: Path, lowercase: bool):
        self.dictionary = Dictionary.load(str(folder / "dict.txt"))
        if model == "bert":
            _check_vocabulary(folder / "vocab.txt", self.dictionary)
            self.tokeniser = wordpiece(self.dictionary, lowercase)
            self.numbers = range(len(self.dictionary))
        else:
            files = [str(folder / name) for name in FILES[model]]
            self.tokeniser = Tokenizer(models.BPE.from_file(*files))
            self.tokeniser.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            # dict.txt has GPT-2's numbers as words.
            pieces = range(self.tokeniser.get_vocab_size())
            self.numbers = [self.dictionary.index(str(piece)) for piece in pieces]

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = []
        for encoding in self.tokeniser.encode_batch_fast(list(texts), add_special_tokens=False):
            encoded.append([self.numbers[piece] for piece in encoding.ids])
        return encoded


def _check_vocabulary(path: Path, dictionary: Dictionary) -> None:
    try:
        words = read_vocabulary(path)
    except OptionError as error:
        fail(str(error))
    special = {"[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"}
    strange = sorted(set(words) - set(dictionary.symbols) - special)
    if strange:
        fail(
            f"{path}: has {len(strange):,} pieces that dict.txt beside it lacks, such as "
            f"{strange[0]!r}"
        )


def shorten(texts: Sequence[list[int]], room: int) -> list[list[int]]:
    """Cut the end of the longer text, and then of both in turn, until they fit, as BERT does."""
    excess = sum(map(len, texts)) - room
    if excess <= 0:
        return list(texts)
    if len(texts) == 1:
        return [texts[0][:room]]
    first, second = map(len, texts)
    of_longer = min(abs(first - second), excess)
    if first > second:
        first -= of_longer
    else:
        second -= of_longer

    # Now both are equally long, or they fit. The second one is cut first.
    rest = excess - of_longer
    first -= rest // 2
    second -= rest - rest // 2
    return [texts[0][:first], texts[1][:second]]
