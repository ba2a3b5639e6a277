"""Two clauses joined by a conjunction."""

from dataclasses import replace

from ..activities import INTENDED, LASTING, draw_clause, draw_place, past_tense, present_or_past
from ..circumstances import draw_circumstance, hindered
from ..clauses import (
    FUTURE,
    MODALS,
    PAST_NOW,
    PLUPERFECT,
    PRESENT,
    PRETERITE,
    RESULT,
    Clause,
    Part,
    Tense,
    place_part,
)
from ..dice import Dice
from ..english_clauses import english_main
from ..german_clauses import german_main, german_question
from ..lexicon.entries import Pair, Verb
from ..lexicon.verbs import VERBS
from ..nominals import different, someone
from ..phrases import Nominal
from ..times import draw_time
from .sentence import Sentence, draw_front, main_clauses, subordinate_pair, with_dependent


def reason(dice: Dice) -> Sentence:
    subject = someone(dice)
    past = dice.chance(0.55)
    if dice.chance(0.45):
        clause, mood = hindered(dice, subject, past), "obstacle"
    else:
        moods = ("past",) if past else ("modal", "future", "now")
        clause = present_or_past(dice, subject, moods, past)
        mood = dice.pick(("motive", "concession"))
    circumstance = draw_circumstance(dice, clause, past, mood)
    conjunction = ("obwohl", "although") if mood == "concession" else ("weil", "because")
    return attach(dice, clause, circumstance, conjunction)


def attach(dice: Dice, clause: Clause, sub: Clause, conjunction: Pair, first: float = 0.3) -> Sentence:
    """A subordinate clause after or before its main clause."""
    if dice.chance(first):
        # the full noun phrase comes first, the pronoun second
        lead = replace(sub, subject=clause.subject) if sub.subject is clause.subject.ref else sub
        follow = replace(clause, subject=clause.subject.ref) if lead is not sub or clause.subject.light else clause
        german, english = subordinate_pair(lead, conjunction)
        return Sentence(f"{german}, {german_question(follow)}", f"{english}, {english_main(follow)}")
    return with_dependent(main_clauses(dice, clause, 0.3), subordinate_pair(sub, conjunction))


def condition(dice: Dice) -> Sentence:
    subject = someone(dice)
    clause = present_or_past(dice, subject, ("modal", "future", "gern"), False)
    return attach(dice, clause, draw_circumstance(dice, clause, False, "condition"), ("wenn", "if"), 0.6)


def consequence(dice: Dice) -> Sentence:
    """Main clauses joined by deshalb, trotzdem, denn, aber or und."""
    subject = someone(dice)
    past = dice.chance(0.5)
    kind = dice.pick(("deshalb", "trotzdem", "denn", "aber", "und"))
    if kind == "und":
        return sequence(dice, subject)
    if kind == "aber":
        return contrast(dice, subject, past)
    moods = ("past",) if past else ("modal", "future")
    follow = hindered(dice, subject, past) if kind == "deshalb" else present_or_past(dice, subject, moods, past)
    mood = {"deshalb": "obstacle", "trotzdem": "concession", "denn": "motive"}[kind]
    lead = draw_circumstance(dice, follow, past, mood)
    if kind == "denn":
        german, english = main_clauses(dice, follow, 0.3)
        return Sentence(f"{german}, denn {german_main(lead)}", f"{english}, for {english_main(lead)}")
    lead = replace(lead, subject=subject) if lead.subject is subject.ref else lead
    named_now = lead.subject is subject
    follow = replace(follow, subject=subject.ref) if named_now else follow
    german = f"{german_main(lead)}, {german_question(follow, kind)}"
    if kind == "deshalb":
        return Sentence(german, f"{english_main(lead)}, so {english_main(follow)}")
    still = Part("aspect", "", "still")
    return Sentence(german, f"{english_main(lead)}, but {english_main(follow.with_parts(still))}")


def sequence(dice: Dice, subject: Nominal) -> Sentence:
    """Two things done by one person; the second clause goes without its subject."""
    tense = past_tense(dice, subject)
    first = draw_clause(dice, subject, dice.pick(INTENDED), tense, extras=False).with_parts(draw_time(dice, True))
    second = draw_clause(dice, subject.ref, dice.pick(INTENDED), tense, extras=False)
    opening = draw_front(dice, first, 0.3)
    german = f"{german_main(first, opening)}, und dann {german_question(second)}"
    return Sentence(german, f"{english_main(first, opening)}, and then {english_main(second)}")


def contrast(dice: Dice, subject: Nominal, past: bool) -> Sentence:
    wish = draw_clause(dice, subject, dice.pick(INTENDED), PRETERITE if past else PRESENT, extras=False)
    wish = replace(wish, modal=MODALS["wollen" if past else "möchten"])
    lead = draw_circumstance(dice, wish, past, "obstacle")
    return Sentence(f"{german_main(wish)}, aber {german_main(lead)}", f"{english_main(wish)}, but {english_main(lead)}")


def temporal(dice: Dice) -> Sentence:
    subject = someone(dice, third=True)
    kind = dice.pick(("nachdem", "bevor", "während", "als", "sobald"))
    if kind == "nachdem":
        sub = draw_clause(dice, subject.ref, dice.pick(LASTING), PLUPERFECT, extras=False)
        main = draw_clause(dice, subject, dice.pick(INTENDED), PRETERITE)
        return attach(dice, main, sub, ("nachdem", "after"), 0.65)
    if kind == "bevor":
        tense = past_tense(dice, subject)
        sub = draw_clause(dice, subject.ref, dice.pick(INTENDED), tense, extras=False)
        return attach(dice, draw_clause(dice, subject, dice.pick(INTENDED), tense), sub, ("bevor", "before"), 0.4)
    if kind == "sobald":
        sub = draw_clause(dice, subject.ref, dice.pick(LASTING), RESULT, extras=False)
        main = draw_clause(dice, subject, dice.pick(INTENDED), FUTURE, extras=False)
        return attach(dice, main, sub, ("sobald", "as soon as"), 0.5)
    other = different(lambda: someone(dice, third=True), subject)
    while other.ref is subject.ref:
        other = different(lambda: someone(dice, third=True), subject)
    background = draw_clause(dice, other, dice.pick(LASTING), PAST_NOW, extras=False)
    if kind == "während":
        main = draw_clause(dice, subject, dice.pick(INTENDED), PRETERITE)
        return attach(dice, main, background, ("während", "while"), 0.5)
    arrival = Clause(subject, *draw_arrival(dice))
    main = background.with_parts(Part("now", "gerade", ""))
    return attach(dice, main, arrival, ("als", "when"), 0.7)


def draw_arrival(dice: Dice) -> tuple[Verb, Tense, tuple[Part, ...]]:
    if dice.chance(0.35):
        return VERBS["kommen"], PRETERITE, (Part("goal", "nach Hause", "home"),)
    if dice.chance(0.4):
        return VERBS["ankommen"], PRETERITE, (place_part(draw_place(dice, "station city"), "place"),)
    if dice.chance(0.5):
        return VERBS["anrufen"], PRETERITE, ()
    return VERBS["zurückkommen"], PRETERITE, ()
