"""Clauses at random."""

from collections.abc import Sequence
from dataclasses import replace

from .clauses import (
    FUTURE,
    MODALS,
    NOW,
    PERFECT,
    PLANNED,
    PRESENT,
    PRETERITE,
    RESULT,
    Clause,
    Part,
    Tense,
    acc_part,
    dat_part,
    join,
    place_part,
)
from .dice import Dice
from .lexicon.adverbs import MANNERS
from .lexicon.entries import Frame, Place, word_list
from .lexicon.frames import FRAMES
from .lexicon.names import SURNAMES
from .lexicon.places import PLACES
from .lexicon.pools import POOLS
from .lexicon.verbs import VERBS
from .nominals import different, draw_thing, other_person
from .phrases import BARE, NO, A, Name, Nominal, NounPhrase, prepositional
from .pronouns import SECOND_PERSON
from .times import DAILY, daily_time, draw_frequency, draw_time, habit_time

INTENDED = [f for f in FRAMES if f.intended and not f.stative]
LASTING = [f for f in INTENDED if f.command and not f.punctual]
WITH_THING = [f for f in FRAMES if f.acc and not any(POOLS[k][0].human for k in f.acc.split())]
WITH_THING = [f for f in WITH_THING if f.det not in ("bare", "plain")]
ENJOYED = word_list("lesen vorlesen hören kochen backen spielen singen sammeln besuchen helfen füttern üben")


def past_tense(dice: Dice, subject: Nominal) -> Tense:
    """Perfect or preterite; the second person does not take the preterite of full verbs."""
    return PERFECT if subject.ref in SECOND_PERSON or dice.chance(0.55) else PRETERITE


def draw_object(dice: Dice, kinds: str, frame: Frame, subject: Nominal) -> Nominal:
    """Somebody or something of one of the kinds."""
    if all(POOLS[kind][0].human for kind in kinds.split()):
        return other_person(dice, kinds, subject)
    kind = dice.pick(kinds.split())
    return other_person(dice, kind, subject) if POOLS[kind][0].human else draw_thing(dice, kind, frame.det, subject)


def draw_place(dice: Dice, groups: str) -> Place:
    group = dice.pick(groups.split())
    return dice.pick([p for p in PLACES if group in p.group.split()])


def prepositional_part(
    dice: Dice, preposition: str, case: str, en_preposition: str, kinds: str, frame: Frame, subject: Nominal
) -> Part:
    nominal = draw_object(dice, kinds, frame, subject)
    en = "" if en_preposition == "-" else en_preposition
    return Part(
        "pp",
        prepositional(preposition, nominal, case),
        join(en, nominal.english()),
        nominal=nominal,
        preposition=(preposition, en),
        case=case,
    )


def complements(dice: Dice, frame: Frame, subject: Nominal) -> tuple[Part, ...]:
    parts = []
    if frame.reflexive:
        index = ("acc", "dat").index(frame.reflexive)
        reflexive = subject.ref.reflexive if subject.ref else ("sich", "sich")
        parts.append(Part("reflexive", reflexive[index], ""))
    recipient = other_person(dice, frame.dat, subject) if frame.dat else None
    if isinstance(recipient, Name):  # a title tells the recipient from the subject beside it
        recipient = different(lambda: Name(dice.pick(SURNAMES), dice.chance(0.5), titled=True), subject)
    if frame.acc:
        parts.append(acc_part(draw_object(dice, frame.acc, frame, subject), frame.en_prep))
    if recipient:
        parts.append(dat_part(recipient, frame.en_dat))
    if frame.pp:
        preposition, case, en_preposition, *kinds = frame.pp.split()
        parts.append(prepositional_part(dice, preposition, case, en_preposition, " ".join(kinds), frame, subject))
    if frame.fixed[0]:
        parts.append(Part("fixed", *frame.fixed))
    if frame.goal:
        parts.append(place_part(draw_place(dice, frame.goal), "goal"))
    return tuple(parts)


def draw_companion(dice: Dice, subject: Nominal) -> Part:
    nominal = other_person(dice, "family person", subject)
    return Part(
        "company",
        prepositional("mit", nominal, "dat"),
        f"with {nominal.english()}",
        nominal=nominal,
        preposition=("mit", "with"),
        case="dat",
    )


def draw_clause(dice: Dice, subject: Nominal, frame: Frame, tense: Tense, extras: bool = True) -> Clause:
    """A clause of one frame, at times with a place, a companion or a manner."""
    parts = list(complements(dice, frame, subject))
    if (extras and frame.place and dice.chance(0.4 if frame.acc or frame.dat else 0.7)) or frame.verb == "wohnen":
        parts.append(place_part(draw_place(dice, frame.place), "place"))
    if frame.verb == "besprechen" or (extras and frame.company and dice.chance(0.22)):
        parts.append(draw_companion(dice, subject))
    elif extras and frame.manner and dice.chance(0.25):
        german = dice.pick(frame.manner.split())
        parts.append(Part("manner", german, MANNERS[german]))
    return Clause(subject, VERBS[frame.verb], tense, tuple(parts))


def negate(clause: Clause) -> Clause:
    """kein for an indefinite object, else nicht; clauses that take neither stay as they are."""
    acc = clause.part("acc")
    if clause.has("fixed", "manner", "frequency", "aspect"):
        return clause
    if acc is None or acc.definite:
        return replace(clause, negated=True)
    if not isinstance(acc.nominal, NounPhrase) or acc.nominal.det not in (A, BARE) or acc.nominal.noun.kind == "topic":
        return clause
    phrase = replace(acc.nominal, det=NO)
    kein = acc_part(phrase, acc.preposition[1])
    return replace(clause.exchange(acc, kein), negated_en=True)


def is_outdoors(clause: Clause) -> bool:
    """Whether the weather matters."""
    return clause.verb.de in ("gehen", "fahren", "laufen", "wandern")


def obliged(clause: Clause) -> bool:
    return clause.modal in (MODALS["müssen"], MODALS["sollen"], MODALS["dürfen"])


def moods_of(frame: Frame) -> dict[str, float]:
    """In which times and moods a frame makes sense, with weights."""
    moods = {"past": 5.0}
    if frame.stative and not frame.punctual:
        return {"past": 1.0, "habit": 3.0} if frame.habit else {"state": 1.0}
    if frame.habit:
        moods |= {"habit": 3.0}
        if frame.company or frame.verb in ENJOYED:
            moods["gern"] = 1.0
    if not frame.stative:
        if frame.intended:
            moods |= {"future": 2.5, "modal": 2.5, "result": 1.2}
        if not frame.punctual:
            moods["now"] = 1.8
    elif frame.habit:
        moods["habit"] = 4.0
    return moods


def mood_past(dice: Dice, subject: Nominal, frame: Frame) -> Clause:
    clause = draw_clause(dice, subject, frame, past_tense(dice, subject))
    if frame.verb in DAILY:
        return clause.with_parts(daily_time(dice, frame, "gestern", "yesterday"))
    if dice.chance(0.1):
        clause = negate(clause)
    return clause.with_parts(draw_time(dice, True, frame.distant)) if dice.chance(0.8) else clause


def mood_state(dice: Dice, subject: Nominal, frame: Frame) -> Clause:
    clause = draw_clause(dice, subject, frame, PRESENT)
    return negate(clause) if dice.chance(0.25) else clause


def mood_habit(dice: Dice, subject: Nominal, frame: Frame) -> Clause:
    clause = draw_clause(dice, subject, frame, PRESENT)
    if frame.verb in DAILY or dice.chance(0.5):
        return clause.with_parts(habit_time(dice, frame))
    return clause.with_parts(draw_frequency(dice))


def mood_gern(dice: Dice, subject: Nominal, frame: Frame) -> Clause:
    clause = draw_clause(dice, subject, frame, PRESENT)
    clause = clause.without_roles("manner")
    return replace(clause.with_parts(Part("frequency", "gern", "")), modal=MODALS["gern"])


def mood_now(dice: Dice, subject: Nominal, frame: Frame) -> Clause:
    clause = draw_clause(dice, subject, frame, NOW)
    adverbs = {"gerade": "right now", "jetzt": "now", "im Moment": "at the moment"}
    german = dice.pick([*adverbs, ""])
    return clause.with_parts(Part("now", german, adverbs[german])) if german else clause


def mood_future(dice: Dice, subject: Nominal, frame: Frame) -> Clause:
    planned = dice.chance(0.45)
    clause = draw_clause(dice, subject, frame, PLANNED if planned else FUTURE)
    if dice.chance(0.1):
        clause = negate(clause)
    return clause.with_parts(draw_time(dice, False, frame.distant)) if planned or dice.chance(0.8) else clause


def mood_modal(dice: Dice, subject: Nominal, frame: Frame) -> Clause:
    name = dice.weighted({"müssen": 4, "können": 3, "wollen": 3, "sollen": 1.5, "dürfen": 1, "möchten": 2})
    past = name not in ("sollen", "möchten") and dice.chance(0.4)
    clause = replace(draw_clause(dice, subject, frame, PRETERITE if past else PRESENT), modal=MODALS[name])
    # "could" of one past occasion is a denial in English
    if dice.chance(0.15) or (past and name == "können"):
        denied = negate(clause)
        clause = denied if denied is not clause or name != "können" else replace(clause, tense=PRESENT)
        past = clause.tense is PRETERITE
    return clause.with_parts(draw_time(dice, past, frame.distant)) if dice.chance(0.6) else clause


def mood_result(dice: Dice, subject: Nominal, frame: Frame) -> Clause:
    clause = draw_clause(dice, subject, frame, RESULT)
    clause = clause.without_roles("manner")
    acc = clause.part("acc")
    options = {("schon", "already"): 4, ("gerade erst", "just"): 1}
    if acc is None or acc.definite:
        options[("noch nicht", "yet")] = 3
    if frame.habit and not frame.punctual:
        options |= {("noch nie", "never"): 2, ("schon oft", "often"): 2, ("schon zweimal", "twice"): 1}
    german, english = dice.weighted(options)
    clause = clause.with_parts(Part("aspect", german, english))
    return replace(clause, negated_en=True) if english == "yet" else clause


MOODS = {
    "past": mood_past,
    "state": mood_state,
    "habit": mood_habit,
    "gern": mood_gern,
    "now": mood_now,
    "future": mood_future,
    "modal": mood_modal,
    "result": mood_result,
}


def activity(dice: Dice, subject: Nominal, frames: Sequence[Frame] = (), moods: Sequence[str] = ()) -> Clause:
    """A complete clause with tense, time and at times a negation or a modal verb."""
    while True:
        frame = dice.pick(frames or FRAMES)
        possible = {m: w for m, w in moods_of(frame).items() if not moods or m in moods}
        if possible:
            break
    return MOODS[dice.weighted(possible)](dice, subject, frame)


def present_or_past(dice: Dice, subject: Nominal, moods: Sequence[str], past: bool) -> Clause:
    """An intended activity, neither denied nor a duty, whose finite verb has the wanted time."""
    while True:
        clause = activity(dice, subject, INTENDED, moods)
        if (clause.tense.english == "past") == past and not clause.denies and not obliged(clause):
            return clause
