"""A sentence of one main clause, and what may open it."""

from dataclasses import dataclass

from ..clauses import Clause, Part, join
from ..dice import Dice
from ..english_clauses import english_main
from ..german_clauses import german_main, german_subordinate
from ..lexicon.adverbs import FRONTABLE_FREQUENCIES
from ..lexicon.entries import Pair


@dataclass(frozen=True)
class Sentence:
    """Both sides, without a capital and a full stop."""

    de: str
    en: str
    mark: str = "."


def main_pair(clause: Clause, front: Part | None = None) -> Pair:
    """The main clause in both languages, opened by the subject or by ``front``."""
    return german_main(clause, front), english_main(clause, front)


def subordinate_pair(clause: Clause, opening: Pair) -> Pair:
    """The clause in both languages after a conjunction or a question word."""
    return german_subordinate(clause, opening[0]), join(opening[1], english_main(clause))


def plain(clause: Clause, front: Part | None = None) -> Sentence:
    return Sentence(*main_pair(clause, front))


def with_dependent(main: Pair, dependent: Pair, mark: str = ".") -> Sentence:
    """A dependent clause after its main clause: only German has a comma."""
    return Sentence(f"{main[0]}, {dependent[0]}", join(main[1], dependent[1]), mark)


def frontable(part: Part, clause: Clause) -> bool:
    if part.role == "frequency":
        return part.de in FRONTABLE_FREQUENCIES
    if part.role == "place":
        return not clause.denies and clause.verb.de != "wohnen"
    return part.role in ("time", "comment", "cause") or (part.role == "now" and part.de != "gerade")


def draw_front(dice: Dice, clause: Clause, probability: float = 0.45) -> Part | None:
    """A part to open a main clause with, if any."""
    parts = [p for p in clause.parts if frontable(p, clause)]
    return dice.pick(parts) if parts and dice.chance(probability) else None


def main_clauses(dice: Dice, clause: Clause, front: float = 0.45) -> Pair:
    """The main clause in both languages, at times with another opening than the subject."""
    return main_pair(clause, draw_front(dice, clause, front))


def main_sentence(dice: Dice, clause: Clause, front: float = 0.45) -> Sentence:
    return Sentence(*main_clauses(dice, clause, front))
