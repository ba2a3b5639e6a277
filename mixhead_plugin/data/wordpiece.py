"""BERT's tokeniser, with the place of every piece in the text.

Text is cleaned, cut into words (at white space, around punctuation and ideographs) and each word greedily into the
longest pieces that the vocabulary has (Devlin et al. 2019; Wu et al. 2016, section 4.1). The pieces are those of
`transformers`' BertTokenizerFast. What looks like a special token in a text, '[SEP]' say, is text here.
"""

import re
import unicodedata
from collections import Counter
from functools import cache, lru_cache
from pathlib import Path
from typing import Iterable, Iterator, List, NamedTuple, Sequence, Tuple, Union

from fairseq.data import Dictionary

from mixhead_plugin.errors import OptionError

UNKNOWN = "[UNK]"
# What fairseq's dictionary calls the special pieces of a vocabulary: four open it, [MASK] closes it.
OPENING = {"[CLS]": "<s>", "[PAD]": "<pad>", "[SEP]": "</s>", UNKNOWN: "<unk>"}
CLOSING = {"[MASK]": "<mask>"}
SPECIAL = {**OPENING, **CLOSING}
CONTINUATION = "##"
LONGEST_WORD = 100  # characters; a longer word is unknown

# Unicode's White_Space without U+000B, U+000C and U+0085, which BERT drops as control characters.
_BETWEEN_SPACES = re.compile(r"[^\t\n\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")
# The blocks that BERT counts as Chinese, first and last code point.
_IDEOGRAPHS = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class Piece(NamedTuple):
    """text[start:end] of the original text is what the piece stands for."""

    piece: str  # of the vocabulary
    start: int
    end: int


class WordPiece:
    """The tokeniser of one vocabulary.

    Args:
        vocabulary: the pieces; those that continue a word begin with '##'
        lowercase: of an uncased vocabulary: fold case and strip accents
    """

    def __init__(self, vocabulary: Iterable[str], lowercase: bool = True):
        self.vocabulary = frozenset(vocabulary)
        self.lowercase = lowercase
        self._longest = max(map(len, self.vocabulary), default=0)
        self._cached = lru_cache(maxsize=1 << 18)(self._tokenise)

    @classmethod
    def from_file(cls, path: Union[str, Path], lowercase: bool = True) -> "WordPiece":
        """Of a vocab.txt, one piece a line."""
        return cls(read_vocabulary(path), lowercase)

    def pieces(self, text: str) -> List[Piece]:
        """The pieces of `text` in order.

        Accents and invisible characters that the tokeniser drops belong to the piece of what they follow.
        """
        found = []
        for chunk in _BETWEEN_SPACES.finditer(text):
            start = chunk.start()
            found.extend(Piece(piece, start + first, start + last) for piece, first, last in self._cached(chunk[0]))
        return found

    def tokenise(self, text: str) -> List[str]:
        """The pieces alone."""
        return [piece for chunk in _BETWEEN_SPACES.findall(text) for piece, _, _ in self._cached(chunk)]

    def __getstate__(self) -> dict:
        return {"vocabulary": self.vocabulary, "lowercase": self.lowercase}

    def __setstate__(self, state: dict) -> None:
        self.__init__(**state)

    def _tokenise(self, chunk: str) -> Tuple[Tuple[str, int, int], ...]:
        """Of what stands between white space."""
        characters = self._normalised(chunk)
        ends = _ends(characters, len(chunk))
        found = []
        for first, last in _words(characters):
            word = "".join(character for character, _ in characters[first:last])
            for piece, begin, end in self._split(word):
                found.append((piece, characters[first + begin][1], ends[first + end - 1]))
        return tuple(found)

    def _normalised(self, chunk: str) -> List[Tuple[str, int]]:
        """The characters that are left of it, each with the place in `chunk` that it comes from."""
        characters = [
            (character, place)
            for place, character in enumerate(chunk)
            if character != "\ufffd" and not _is_control(character)
        ]
        if self.lowercase:
            # One character may become several, and none depends on another: final Σ is not treated apart.
            characters = [
                (lower, place)
                for character, place in characters
                for decomposed in unicodedata.normalize("NFD", character)
                if unicodedata.category(decomposed) != "Mn"
                for lower in decomposed.lower()
            ]
        return characters

    def _split(self, word: str) -> List[Tuple[str, int, int]]:
        """Its pieces and their places in it; the whole word is unknown if a part of it is."""
        unknown = [(UNKNOWN, 0, len(word))]
        if len(word) > LONGEST_WORD:
            return unknown
        found: List[Tuple[str, int, int]] = []
        start = 0
        while start < len(word):
            prefix = CONTINUATION if start else ""
            for end in range(min(len(word), start + self._longest), start, -1):
                if (piece := prefix + word[start:end]) in self.vocabulary:
                    break
            else:
                return unknown
            found.append((piece, start, end))
            start = end
        return found


def read_vocabulary(path: Union[str, Path]) -> List[str]:
    """The pieces of a vocab.txt in their order."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")  # not splitlines: some pieces are line breaks to it
    return lines[:-1] if lines[-1] == "" else lines


def write_dictionary(words: Sequence[str], path: Path, source: Union[str, Path]) -> Dictionary:
    """fairseq's dictionary of a vocabulary, in its order, without the special symbols, which fairseq has itself.

    Args:
        words: the pieces of a vocab.txt
        path: the file to write
        source: what errors call the vocabulary

    Raises:
        OptionError: fairseq reads something else than was written
    """
    lines = [f"{word} 1\n" for word in words if word not in SPECIAL]
    path.write_text("".join(lines), encoding="utf-8")
    problem = f"{source}: fairseq cannot tell the words of this vocabulary apart"
    if twice := [word for word, number in Counter(words).items() if number > 1]:
        raise OptionError(f"{problem} ({twice[0]!r} is there twice)")
    try:
        dictionary = Dictionary.load(str(path))
    except (RuntimeError, ValueError, OptionError) as error:
        raise OptionError(f"{problem} ({str(error).splitlines()[0]})") from error
    dictionary.add_symbol("<mask>")
    expected = [*OPENING.values(), *(word for word in words if word not in SPECIAL), *CLOSING.values()]
    if dictionary.symbols != expected:
        raise OptionError(problem)
    return dictionary


def _words(characters: List[Tuple[str, int]]) -> Iterator[Tuple[int, int]]:
    """First and last + 1 of each word; punctuation marks and ideographs are words of their own."""
    first = 0
    for place, (character, _) in enumerate(characters):
        if _stands_alone(character):
            if first < place:
                yield first, place
            yield place, place + 1
            first = place + 1
    if first < len(characters):
        yield first, len(characters)


def _ends(characters: List[Tuple[str, int]], length: int) -> List[int]:
    """For each character where what it stands for ends: the next one's place, whatever was dropped between."""
    ends = []
    following = length
    for place in range(len(characters) - 1, -1, -1):
        ends.append(following)
        here = characters[place][1]
        if place and characters[place - 1][1] != here:
            following = here
    return ends[::-1]


@cache
def _is_control(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Co")


@cache
def _stands_alone(character: str) -> bool:
    code = ord(character)
    ascii_mark = 33 <= code < 127 and not character.isalnum()  # $ + < = > ^ ` | ~ are no punctuation to Unicode
    ideograph = any(first <= code <= last for first, last in _IDEOGRAPHS)
    return ascii_mark or ideograph or unicodedata.category(character).startswith("P")
