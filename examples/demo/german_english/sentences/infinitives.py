"""Infinitives with zu."""

from collections.abc import Sequence

from ..activities import INTENDED, LASTING, draw_clause, draw_place, past_tense
from ..clauses import FUTURE, NOW, PRESENT, PRETERITE, Clause, Part, acc_part, place_part, pred
from ..dice import Dice
from ..english_clauses import english_gerund, english_infinitive, english_main
from ..german import HABEN, SEIN
from ..german_clauses import german_infinitive, german_question
from ..lexicon.entries import Frame
from ..lexicon.frames import frames_of
from ..lexicon.verbs import VERBS
from ..nominals import other_person, someone
from ..phrases import Nominal
from ..pronouns import ES, THEY_FREE
from ..times import draw_time
from .sentence import Sentence, main_pair, with_dependent

EFFORTS = (
    ("schwierig", "difficult"),
    ("leicht", "easy"),
    ("wichtig", "important"),
    ("schön", "nice"),
    ("langweilig", "boring"),
    ("nicht einfach", "not simple"),
)
PURPOSES = {
    "shop": ("kaufen",),
    "abroad": ("besuchen", "besichtigen"),
    "study": ("lernen",),
    "station": ("abholen",),
    "meeting": ("treffen",),
    "hike": ("wandern", "ausruhen"),
    "swim": ("schwimmen",),
    "eat": ("essen", "frühstücken"),
}
LEFT_UNDONE = ("abschließen", "zumachen", "ausschalten", "mitnehmen", "aufräumen", "bezahlen", "begrüßen")


def infinitive(dice: Dice) -> Sentence:
    return dice.pick(KINDS)(dice)


def with_infinitive(main: Clause, sub: Clause, front: Part | None = None, german: str = "") -> Sentence:
    return with_dependent(main_pair(main, front), (german_infinitive(sub, german), english_infinitive(sub)))


def bare_clause(dice: Dice, controller: Nominal, frames: Sequence[Frame] = ()) -> Clause:
    return draw_clause(dice, controller, dice.pick(frames or INTENDED), PRESENT)


def infinitive_matrix(dice: Dice) -> Sentence:
    subject = someone(dice)
    verb, preterite = dice.pick((("versuchen", True), ("beschließen", True), ("anfangen", True), ("hoffen", False)))
    if dice.chance(0.3):
        verb, preterite = dice.pick((("vergessen", True), ("planen", False), ("versprechen", True)))
    tense = past_tense(dice, subject) if preterite else PRESENT
    frames = INTENDED
    if verb == "anfangen":
        frames = [f for f in LASTING if f.habit or f.distant]
    elif verb in ("hoffen", "planen"):
        frames = [f for f in INTENDED if f.distant]
    sub = bare_clause(dice, subject, frames)
    main = Clause(subject, VERBS[verb], tense)
    if preterite and verb != "anfangen" and dice.chance(0.4):
        main = main.with_parts(draw_time(dice, True))
    return with_infinitive(main, sub, main.part("time"))


def infinitive_evaluation(dice: Dice) -> Sentence:
    german, english = dice.pick(EFFORTS)
    main = Clause(ES, SEIN, dice.pick((PRESENT, PRETERITE)), (pred(german, english),))
    frames = [f for f in LASTING if not f.reflexive and f.det != "own" and "family" not in f.dat + f.acc + f.pp]
    sub = draw_clause(dice, THEY_FREE, dice.pick([f for f in frames if not f.company]), PRESENT)
    return with_infinitive(main, sub)


def infinitive_purpose(dice: Dice) -> Sentence:
    """Sie geht zum Markt, um Gemüse zu kaufen."""
    subject = someone(dice)
    group, verbs = dice.pick(list(PURPOSES.items()))
    frames = frames_of(*verbs)
    if group == "abroad":
        frame = dice.pick(frames_of("fahren", "fliegen", "reisen"))
        goal = place_part(draw_place(dice, "city country"), "goal")
    else:
        frame = dice.pick(frames_of("gehen", "fahren"))
        goal = place_part(draw_place(dice, group), "goal")
    past = dice.chance(0.55)
    tense = past_tense(dice, subject) if past else dice.pick((NOW, FUTURE))
    parts = (draw_time(dice, True) if past else None, goal)
    if tense is FUTURE:
        parts = (draw_time(dice, False), goal)
    main = Clause(subject, VERBS[frame.verb], tense, tuple(filter(None, parts)))
    # a market sells food
    frames = [f for f in frames if f.verb != "kaufen" or "food" in f.acc]
    sub = draw_clause(dice, subject.ref, dice.pick(frames), PRESENT, extras=False)
    return with_infinitive(main, sub, main.part("time"), german="um")


def infinitive_without(dice: Dice) -> Sentence:
    subject = someone(dice)
    tense = past_tense(dice, subject)
    main = draw_clause(dice, subject, dice.pick(frames_of("verlassen", "gehen", "mitnehmen")), tense, False)
    sub = bare_clause(dice, subject.ref, frames_of(*LEFT_UNDONE))
    return with_dependent(main_pair(main), (german_infinitive(sub, "ohne"), english_gerund(sub, "without")))


def infinitive_instead(dice: Dice) -> Sentence:
    subject = someone(dice)
    sub = draw_clause(dice, subject, dice.pick(INTENDED), PRESENT, extras=False)
    main = draw_clause(dice, subject, dice.pick(INTENDED), past_tense(dice, subject))
    german = f"{german_infinitive(sub, 'statt')}, {german_question(main)}"
    return Sentence(german, f"{english_gerund(sub, 'instead of')}, {english_main(main)}")


def infinitive_asked(dice: Dice) -> Sentence:
    """Sie hat mich gebeten, das Fenster zu öffnen."""
    subject = someone(dice, third=True)
    asked = other_person(dice, "family person", subject)
    sub = bare_clause(dice, asked)
    main = Clause(subject, VERBS["bitten"], past_tense(dice, subject), (acc_part(asked),))
    return with_infinitive(main, sub)


def infinitive_stop(dice: Dice) -> Sentence:
    subject = someone(dice)
    frames = [f for f in LASTING if f.habit and not f.acc and not f.goal]
    sub = draw_clause(dice, subject, dice.pick(frames), PRESENT)
    main = Clause(subject, VERBS["aufhören"], past_tense(dice, subject))
    return with_dependent(main_pair(main), (german_infinitive(sub), english_gerund(sub)))


def infinitive_time(dice: Dice) -> Sentence:
    subject = someone(dice)
    past = dice.chance(0.5)
    german, english = dice.pick((("keine Zeit", "no time"), ("genug Zeit", "enough time")))
    main = Clause(subject, HABEN, PRETERITE if past else PRESENT, (Part("acc", german, english, definite=False),))
    if dice.chance(0.5):
        main = main.with_parts(draw_time(dice, True) if past else Part("time", "heute", "today"))
    sub = bare_clause(dice, subject)
    return with_infinitive(main, sub, main.part("time"))


KINDS = (
    infinitive_matrix,
    infinitive_matrix,
    infinitive_evaluation,
    infinitive_purpose,
    infinitive_purpose,
    infinitive_purpose,
    infinitive_without,
    infinitive_instead,
    infinitive_asked,
    infinitive_stop,
    infinitive_time,
)
