"""Statements of one clause."""

from ..activities import WITH_THING, activity, is_outdoors
from ..clauses import Part
from ..dice import Dice
from ..english_clauses import english_main
from ..german_clauses import german_main
from ..nominals import someone
from ..phrases import THE, THIS, NounPhrase
from ..times import draw_comment
from .sentence import Sentence, main_sentence, plain

HINDRANCES = (
    ("wegen des Regens", "because of the rain"),
    ("wegen des schlechten Wetters", "because of the bad weather"),
)
NO_HINDRANCES = (
    ("trotz des Regens", "despite the rain"),
    ("trotz der Kälte", "despite the cold"),
    ("trotz der Hitze", "despite the heat"),
    ("während der Ferien", "during the holidays"),
)


def statement(dice: Dice) -> Sentence:
    clause = activity(dice, someone(dice))
    if dice.chance(0.12) and not clause.has("aspect", "frequency"):
        comment = draw_comment(dice)
        if comment.en != "probably" or not clause.denies:
            clause = clause.with_parts(comment)
            front = comment if dice.chance(0.5) else None
            return plain(clause, front)
    if is_outdoors(clause) and dice.chance(0.4):
        german, english = dice.pick(HINDRANCES if clause.denies else NO_HINDRANCES)
        clause = clause.with_parts(Part("cause", german, english))
    return main_sentence(dice, clause)


def fronted_object(dice: Dice) -> Sentence:
    """Den Schlüssel hat der Nachbar gefunden: the case alone tells who did it."""
    while True:
        clause = activity(dice, someone(dice, third=True), WITH_THING, ("past", "result", "future"))
        acc = clause.part("acc")
        distinct = clause.subject.plural != acc.nominal.plural or clause.subject.person != 3
        masculine = acc.nominal.noun.gender == "m" and not acc.nominal.plural
        if acc.definite and not clause.negated and (masculine or distinct) and unowned(acc.nominal):
            return Sentence(german_main(clause, acc), english_main(clause))


def unowned(phrase: NounPhrase) -> bool:
    """No possessive that would open the sentence before its owner."""
    return phrase.det in (THE, THIS) and phrase.owner is None
