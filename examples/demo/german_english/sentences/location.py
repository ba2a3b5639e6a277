"""Where things are and where they are put."""

from dataclasses import replace

from ..activities import past_tense
from ..clauses import FUTURE, MODALS, NOW, PERFECT, PRESENT, PRETERITE, Clause, Part, acc_part
from ..dice import Dice
from ..lexicon.verbs import VERBS
from ..nominals import draw_adjectives, draw_noun, draw_thing, someone
from ..phrases import THE, THIS, NounPhrase, prepositional
from ..times import draw_time
from .sentence import Sentence, main_clauses, main_sentence, subordinate_pair, with_dependent

# Things, the verbs of rest and motion, and where: preposition, English, kinds of landmark.
POSITIONS = (
    ("small", "liegen", "legen", (("auf", "on", "surface"), ("in", "in", "inside"), ("unter", "under", "surface"))),
    ("small", "liegen", "legen", (("neben", "next to", "upright"), ("auf", "on", "surface"))),
    (
        "upright",
        "stehen",
        "stellen",
        (("auf", "on", "tabletop"), ("in", "in", "cupboard"), ("neben", "next to", "device")),
    ),
    ("seat", "stehen", "stellen", (("neben", "next to", "doorway"), ("vor", "in front of", "door"))),
    ("container", "stehen", "stellen", (("hinter", "behind", "doorway"), ("vor", "in front of", "wardrobe"))),
    ("art", "hängenintr", "hängen", (("an", "on", "wall"), ("über", "above", "surface"))),
    ("coat", "hängenintr", "hängen", (("in", "in", "wardrobe"), ("neben", "next to", "doorway"))),
)


def location(dice: Dice) -> Sentence:
    """Two-way prepositions: rest with the dative, motion with the accusative."""
    items, rest, motion, targets = dice.pick(POSITIONS)
    preposition, english, kinds = dice.pick(targets)
    landmark = draw_landmark(dice, kinds)
    if dice.chance(0.45):
        item = draw_thing(dice, items, "the")
        tense = dice.pick((NOW, PRETERITE))
        place = Part("goal", prepositional(preposition, landmark, "dat"), f"{english} {landmark.english()}")
        clause = Clause(item, VERBS[rest], tense, (place,))
        if tense is PRETERITE or dice.chance(0.2):
            return main_sentence(dice, clause)
        follow = why_there(dice, item)
        main = main_clauses(dice, clause)
        return with_dependent(main, subordinate_pair(follow, ("weil", "because"))) if follow else Sentence(*main)
    subject = someone(dice)
    item = draw_thing(dice, items, "own" if dice.chance(0.4) else "the", subject)
    target = Part("goal", prepositional(preposition, landmark, "acc"), f"{english} {landmark.english()}")
    mood = dice.pick(("past", "past", "future", "modal"))
    tense = past_tense(dice, subject) if mood == "past" else FUTURE if mood == "future" else PRESENT
    clause = Clause(subject, VERBS[motion], tense, (acc_part(item), target))
    if mood == "modal":
        clause = replace(clause, modal=MODALS[dice.pick(("müssen", "wollen", "sollen", "können"))])
    if mood == "past" and dice.chance(0.5):
        clause = clause.with_parts(draw_time(dice, True))
    return main_sentence(dice, clause)


def why_there(dice: Dice, item: NounPhrase) -> Clause | None:
    """Why a thing is where it is, at times."""
    putter = someone(dice)
    if dice.chance(0.5):
        return None
    forgot = Clause(putter, VERBS["vergessen"], PERFECT, (acc_part(item.ref),))
    unneeded = Clause(putter, VERBS["brauchen"], PRESENT, (acc_part(item.ref),), negated=True)
    return dice.pick((forgot, None, unneeded))


def draw_landmark(dice: Dice, kinds: str) -> NounPhrase:
    noun = draw_noun(dice, kinds)
    return NounPhrase(noun, dice.weighted({THE: 6, THIS: 1}), adjectives=draw_adjectives(dice, noun, 0.3))
