"""BERT's WordPiece tokeniser (Wu et al. 2016, section 4.1).

Its ids are those of fairseq's dictionary.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fairseq.data import Dictionary
from tokenizers import Encoding, Tokenizer, models, normalizers, pre_tokenizers

from mixhead_plugin.errors import OptionError

# The names of the special pieces in fairseq's dictionary: four open it, [MASK] closes it.
OPENING = {"[CLS]": "<s>", "[PAD]": "<pad>", "[SEP]": "</s>", "[UNK]": "<unk>"}
CLOSING = {"[MASK]": "<mask>"}
SPECIAL = {**OPENING, **CLOSING}
CONTINUATION = "##"
LONGEST_WORD = 100  # characters; a longer word is unknown

# BERT drops the control characters U+000B, U+000C and U+0085; to it they are no white space.
_NO_SPACES = re.compile(r"[^\t\n\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*")


def normalizer(lowercase: bool) -> normalizers.Normalizer:
    """Clean the text and set ideographs apart.

    With `lowercase` also fold case and strip accents.
    """
    return normalizers.BertNormalizer(lowercase=lowercase)


def wordpiece(dictionary: Dictionary, lowercase: bool) -> Tokenizer:
    """Build the tokeniser of a dictionary.

    A special token in a text, such as '[SEP]', is text to it.

    Args:
        dictionary: fairseq's, of the pieces of a vocab.txt
        lowercase: the vocabulary is uncased
    """
    model = models.WordPiece(
        vocab=dict(dictionary.indices),
        unk_token=dictionary.unk_word,
        max_input_chars_per_word=LONGEST_WORD,
        continuing_subword_prefix=CONTINUATION,
    )
    tokeniser = Tokenizer(model)
    tokeniser.normalizer = normalizer(lowercase)
    tokeniser.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokeniser


def characters_of(text: str, encoding: Encoding) -> list[tuple[int, int]]:
    """Return for each piece of a text a pair: its first character, and one past its last.

    Accents and invisible characters that the tokeniser drops belong to the piece before them.
    """
    starts = [start for start, _ in encoding.offsets]
    pairs = []
    for start, end in encoding.offsets:
        # not the next piece: several pieces can share a character
        following = bisect_left(starts, end)
        limit = starts[following] if following < len(starts) else len(text)
        pairs.append((start, _NO_SPACES.match(text, end, limit).end()))
    return pairs


def read_vocabulary(path: str | Path) -> list[str]:
    """Read the pieces of a vocab.txt in their order.

    Raises:
        OptionError: the file is not UTF-8, or lacks a special piece
    """
    try:
        # not splitlines: some pieces are line breaks to it
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise OptionError(f"{path}: is not UTF-8") from error
    words = lines[:-1] if lines[-1] == "" else lines
    if missing := [word for word in SPECIAL if word not in words]:
        raise OptionError(f"{path}: has no {', '.join(missing)}; must be the vocab.txt of a BERT")
    return words


def write_dictionary(words: Sequence[str], path: Path, source: str | Path) -> Dictionary:
    """Write fairseq's dictionary of a vocabulary, in its order.

    The special symbols that fairseq adds are left out.

    Args:
        words: the pieces of a vocab.txt
        path: the file to write
        source: the name of the vocabulary in errors

    Raises:
        OptionError: fairseq reads something else than was written
    """
    own = [word for word in words if word not in SPECIAL]
    path.write_text("".join(f"{word} 1\n" for word in own), encoding="utf-8")
    problem = f"{source}: fairseq cannot tell the words of this vocabulary apart"
    if twice := [word for word, number in Counter(words).items() if number > 1]:
        raise OptionError(f"{problem} ({twice[0]!r} is there twice)")
    try:
        dictionary = Dictionary.load(str(path))
    except (RuntimeError, ValueError, OptionError) as error:
        raise OptionError(f"{problem} ({str(error).splitlines()[0]})") from error
    dictionary.add_symbol(SPECIAL["[MASK]"])
    if dictionary.symbols != [*OPENING.values(), *own, *CLOSING.values()]:
        raise OptionError(problem)
    return dictionary
