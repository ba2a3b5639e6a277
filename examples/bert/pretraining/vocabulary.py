"""Learn a WordPiece vocabulary from a text."""

from collections.abc import Callable, Iterable, Iterator

from bert.wordpiece import CONTINUATION, LONGEST_WORD, SPECIAL, normalizer
from common.messages import fail
from tokenizers import Tokenizer, models, pre_tokenizers, trainers


def learn(lines: Callable[[], Iterable[str]], size: int, lowercase: bool) -> list[str]:
    """Return the pieces of a vocab.txt.

    They are special ones, all characters, and the first merges of byte-pair encoding.

    Args:
        lines: a function that yields the text, from its beginning with every call
        size: the size of the vocabulary
        lowercase: whether to fold case and strip accents
    """
    clean = normalizer(lowercase)
    split = pre_tokenizers.BertPreTokenizer()

    def words() -> Iterator[list[str]]:
        """Yield the words of each line."""
        for line in lines():
            with_places = split.pre_tokenize_str(clean.normalize_str(line))
            yield [word for word, _ in with_places if len(word) <= LONGEST_WORD]

    characters = _characters_of(words())
    if not characters:
        fail(f"--learn-vocab {size}: the training text has no words")

    # As special tokens the characters come first, and in this order.
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=[*SPECIAL, *sorted(characters)], show_progress=False
    )
    learnt = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learnt.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    spaced = (" ".join(line) for line in words())
    learnt.train_from_iterator(spaced, trainer)

    pieces = sorted(learnt.get_vocab().items(), key=lambda item: item[1])
    if len(pieces) != size:
        least = len(SPECIAL) + len(characters)
        if size < least:
            fail(f"--learn-vocab {size}: must be at least {least:,} for this text")
        fail(f"--learn-vocab {size}: must be at most {len(pieces):,} for this text")
    return [piece for piece, _ in pieces]


def _characters_of(lines: Iterable[list[str]]) -> set[str]:
    """Return the pieces of one character that spell all words."""
    characters: set[str] = set()
    for line in lines:
        for word in line:
            characters.add(word[0])
            characters.update(CONTINUATION + character for character in word[1:])
    # A letter or digit of the text can stand anywhere in a word.
    letters = {character[-1] for character in characters if character[-1].isalnum()}
    characters |= letters
    characters |= {CONTINUATION + letter for letter in letters}
    return characters
