"""A WordPiece vocabulary, learnt from a text."""

import io
import unicodedata
from collections.abc import Callable, Iterable, Iterator

import sentencepiece
from common.archives import fail
from common.prepare import ending_at_once

from mixhead_plugin.data.wordpiece import CONTINUATION, SPECIAL, UNKNOWN, WordPiece

BEGINNING = "\u2581"  # where BERT marks the pieces that continue a word, sentencepiece marks those that begin one
LONGEST = 1 << 24  # bytes of a line; longer ones would be left out


def learn(lines: Callable[[], Iterable[str]], size: int, lowercase: bool) -> list[str]:
    """The pieces of a vocab.txt: the special ones, every character, and what byte-pair encoding merges first.

    Args:
        lines: the text, from its beginning with every call
        size: of the vocabulary
        lowercase: fold case and strip accents
    """
    seen: set[str] = set()
    spelling = WordPiece(_letters(lines(), lowercase), lowercase)

    def words() -> Iterator[str]:
        for line in lines():
            pieces = [piece for piece in spelling.tokenise(line) if piece != UNKNOWN]
            seen.update(pieces)
            yield " ".join(pieces).replace(f" {CONTINUATION}", "")

    model = io.BytesIO()
    try:
        with ending_at_once():
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=words(),
                model_writer=model,
                model_type="bpe",
                # more than is wanted: it counts a character and its form at the beginning of a word as two, too
                vocab_size=size + 2 * len(spelling.vocabulary),
                hard_vocab_limit=False,
                character_coverage=1.0,
                normalization_rule_name="identity",
                max_sentence_length=LONGEST,
                bos_id=-1,
                eos_id=-1,
                minloglevel=2,
            )
    except RuntimeError as error:
        reason = str(error).splitlines()[0] if seen else "it has no words"
        fail(f"--learn-vocab {size}: sentencepiece cannot learn that from the training text ({reason})")
    learnt = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    seen |= {_other(piece) for piece in seen if piece[-1].isalnum()}
    pieces = [*SPECIAL, *sorted(seen)]
    for number in range(learnt.get_piece_size()):
        piece = learnt.id_to_piece(number)
        begins = piece.startswith(BEGINNING)
        if len(piece) > 1 + begins and not learnt.is_unknown(number):  # a merge
            pieces.append(piece[1:] if begins else CONTINUATION + piece)
    if not len(SPECIAL) + len(seen) <= size <= len(pieces):
        fail(f"--learn-vocab {size}: of this text {len(SPECIAL) + len(seen):,} to {len(pieces):,} pieces can be learnt")
    return pieces[:size]


def _letters(lines: Iterable[str], lowercase: bool) -> set[str]:
    """All characters that can be left of the text, as pieces that begin a word and that continue one."""
    found: set[str] = set()
    for line in lines:
        found.update(line)
    if lowercase:
        found = {letter for c in found for part in unicodedata.normalize("NFD", c) for letter in part.lower()}
    found.discard(BEGINNING)
    return found | {CONTINUATION + letter for letter in found}


def _other(piece: str) -> str:
    return piece.removeprefix(CONTINUATION) if piece.startswith(CONTINUATION) else CONTINUATION + piece
