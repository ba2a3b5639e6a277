"""The passive."""

from ..activities import WITH_THING
from ..clauses import MODALS, NOW, PLANNED, PRESENT, PRETERITE, RESULT, Clause, Part
from ..dice import Dice
from ..lexicon.verbs import VERBS
from ..nominals import draw_relation, draw_role, draw_thing, someone
from ..phrases import possessive, prepositional
from ..pronouns import ICH
from ..times import draw_time
from .reported import report_clause
from .sentence import Sentence, main_sentence

PASSIVES = [f for f in WITH_THING if f.passive and not (f.goal or f.dat or f.en_prep or f.stative or f.det == "own")]


def passive_sentence(dice: Dice) -> Sentence:
    clause = passive_clause(dice)
    if dice.chance(0.15):
        matrix = Clause(someone(dice, third=True), VERBS[dice.pick(("sagen", "wissen", "glauben"))], PRESENT)
        return report_clause(matrix, clause)
    return main_sentence(dice, clause)


def passive_clause(dice: Dice) -> Clause:
    frame = dice.pick(PASSIVES)
    subject = draw_thing(dice, frame.acc, "made" if frame.det == "made" else "the" if dice.chance(0.8) else "any")
    parts: tuple[Part, ...] = ()
    kind = dice.pick(("past", "past", "now", "result", "modal", "future", "modal-past"))
    tense, modal = PRETERITE, None
    if kind == "past":
        parts = (draw_time(dice, True, frame.distant),)
    elif kind == "now":
        tense, parts = (
            NOW,
            (dice.pick((Part("now", "gerade", "right now"), Part("now", "im Moment", "at the moment"))),),
        )
        if frame.punctual:
            kind, tense, parts = "past", PRETERITE, ()
    elif kind == "result":
        tense = RESULT
        german, english = dice.pick((("schon", "already"), ("noch nicht", "yet"), ("gerade erst", "just")))
        parts = (Part("aspect", german, english),)
    elif kind == "future":
        tense, parts = PLANNED, (draw_time(dice, False, frame.distant),)
    else:
        modal = MODALS[dice.pick(("müssen", "können", "sollen") if kind == "modal" else ("müssen",))]
        tense = PRETERITE if kind == "modal-past" else PRESENT
        parts = (draw_time(dice, tense is PRETERITE, frame.distant),) if dice.chance(0.6) else ()
    if kind in ("past", "result", "now") and dice.chance(0.4) and not (parts and parts[0].en == "yet"):
        agent = draw_relation(dice, possessive(ICH), plural=0.1) if dice.chance(0.4) else draw_role(dice)
        parts += (Part("company", prepositional("von", agent, "dat"), f"by {agent.english()}"),)
    denied = any(p.en == "yet" for p in parts)
    return Clause(subject, VERBS[frame.verb], tense, parts, modal, negated_en=denied, passive=True)
