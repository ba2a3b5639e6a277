"""The corpus: sentences of all kinds until there are enough different ones."""

import re
from collections.abc import Callable, Iterator

from .dice import Dice
from .lexicon.entries import Pair
from .sentences.commands import command
from .sentences.comparison import comparison
from .sentences.infinitives import infinitive
from .sentences.location import location
from .sentences.passive import passive_sentence
from .sentences.questions import indirect_question, question
from .sentences.relative import relative_clause
from .sentences.reported import reported
from .sentences.schedule import schedule
from .sentences.sentence import Sentence
from .sentences.statements import fronted_object, statement
from .sentences.subordinate import condition, consequence, reason, temporal

# Every kind of sentence and its weight.
KINDS: dict[Callable[[Dice], Sentence], float] = {
    statement: 20,
    fronted_object: 3,
    reason: 11,
    condition: 5,
    consequence: 9,
    temporal: 8,
    reported: 8,
    indirect_question: 7,
    relative_clause: 12,
    infinitive: 12,
    question: 9,
    command: 5,
    passive_sentence: 8,
    location: 6,
    comparison: 5,
    schedule: 9,
}
SHORTEST, LONGEST = 4, 22  # in words


def spell(words: str, mark: str) -> str:
    """Capitalise and punctuate: a clause comma in front of another mark goes."""
    words = re.sub(r"\s*,(?:\s*,)*", ",", words).rstrip(", ")
    return words[0].upper() + words[1:] + mark


def sentences(seed: int) -> Iterator[Pair]:
    """An endless stream of pairs, repetitions included."""
    dice = Dice(seed)
    while True:
        sentence = dice.weighted(KINDS)(dice)
        pair = spell(sentence.de, sentence.mark), spell(sentence.en, sentence.mark)
        if all(SHORTEST <= len(side.split()) <= LONGEST for side in pair):
            yield pair


def generate(seed: int = 1, train: int = 22000, valid: int = 600, test: int = 600) -> dict[str, list[Pair]]:
    """The three splits; no German and no English sentence occurs twice in all of them."""
    german: set[str] = set()
    english: set[str] = set()
    pairs: list[Pair] = []
    stream = sentences(seed)
    while len(pairs) < train + valid + test:
        de, en = next(stream)
        if de not in german and en not in english:
            german.add(de)
            english.add(en)
            pairs.append((de, en))
    return {"train": pairs[:train], "valid": pairs[train : train + valid], "test": pairs[train + valid :]}
