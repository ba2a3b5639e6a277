"""Why, although or if."""

from dataclasses import replace

from .activities import INTENDED, LASTING, draw_clause, is_outdoors, negate, past_tense
from .clauses import MODALS, NOW, PAST_NOW, PERFECT, PLUPERFECT, PRESENT, PRETERITE, Clause, Part, pred
from .dice import Dice
from .german import HABEN, SEIN
from .lexicon.pools import POOLS
from .lexicon.verbs import VERBS
from .nominals import draw_relation
from .phrases import Nominal, NounPhrase, possessive
from .pronouns import ES
from .times import draw_time

# How often each sort of circumstance is drawn.
CIRCUMSTANCES = {
    "obstacle": {"regnen": 0.5, "spät": 1, "wetter": 0.5, "feeling": 3, "possession": 3, "duty": 4},
    "motive": {"wichtig": 1, "possession": 1, "lust": 1, "asked": 3},
    "concession": {"regnen": 1, "schneien": 0.5, "spät": 1, "wetter": 1, "feeling": 3, "possession": 2, "lust": 1.5},
    "condition": {"wetter": 1, "feeling": 1, "possession": 2, "lust": 1},
}
OUTDOOR_KINDS = ("regnen", "schneien", "wetter")
WEATHER = {
    "obstacle": (("schlecht", "bad"), ("sehr schlecht", "very bad")),
    "concession": (("schlecht", "bad"), ("nicht besonders gut", "not particularly good")),
    "condition": (("schön", "nice"), ("gut", "good")),
}
FEELINGS = {
    "obstacle": (("müde", "tired"), ("krank", "ill"), ("zu müde", "too tired"), ("sehr beschäftigt", "very busy")),
    "concession": (("müde", "tired"), ("krank", "ill"), ("nervös", "nervous"), ("sehr beschäftigt", "very busy")),
    "condition": (("nicht zu müde", "not too tired"), ("wieder gesund", "well again"), ("allein", "alone")),
}
POSSESSIONS = {
    "obstacle": (("keine Zeit", "no time"), ("viel Arbeit", "a lot of work"), ("Kopfschmerzen", "a headache")),
    "motive": (("genug Zeit", "enough time"), ("nichts zu tun", "nothing to do")),
    "concession": (("wenig Zeit", "little time"), ("viel Arbeit", "a lot of work"), ("Kopfschmerzen", "a headache")),
    "condition": (("Zeit", "time"), ("genug Zeit", "enough time"), ("nichts zu tun", "nothing to do")),
}


def draw_circumstance(dice: Dice, clause: Clause, past: bool, mood: str) -> Clause:
    """A short clause about the subject or, of something done outdoors, the weather: why, although or if it is done."""
    ref, tense = clause.subject.ref, PRETERITE if past else PRESENT
    outdoors = is_outdoors(clause)
    kind = dice.weighted({k: w for k, w in CIRCUMSTANCES[mood].items() if outdoors or k not in OUTDOOR_KINDS})
    if kind in ("regnen", "schneien"):
        return Clause(ES, VERBS[kind], PAST_NOW if past else NOW)
    if kind == "spät":
        late = ("schon spät", "already late") if mood == "concession" else ("zu spät", "too late")
        return Clause(ES, SEIN, tense, (pred(*late),))
    if kind == "wichtig":
        return Clause(ES, SEIN, tense, (pred("wichtig", "important"),))
    if kind == "wetter":
        weather = NounPhrase(next(n for n in POOLS["meal"] if n.de == "Wetter"))
        german, english = dice.pick(WEATHER[mood])
        return Clause(weather, SEIN, tense, (pred(german, english),))
    if kind == "feeling":
        return Clause(ref, SEIN, tense, (pred(*dice.pick(FEELINGS[mood])),))
    if kind == "possession":
        german, english = dice.pick(POSSESSIONS[mood])
        return Clause(ref, HABEN, tense, (Part("acc", german, english, definite=False),))
    if kind == "lust":
        like = Part("predicate", "Lust dazu" if mood != "concession" else "keine Lust dazu", "like it")
        return Clause(ref, VERBS["habenLust"], tense, (like,), negated_en=mood == "concession")
    if kind == "asked":
        asker = draw_relation(dice, possessive(ref), "elder", plural=0)
        parts = (Part("acc", ref.german("acc"), ref.english(), light=True), Part("predicate", "darum", "to"))
        return Clause(asker, VERBS["bitten"], PLUPERFECT if past else PERFECT, parts)
    clause = draw_clause(dice, ref, dice.pick(LASTING), tense, extras=False)
    return replace(clause, modal=MODALS["müssen"])


def hindered(dice: Dice, subject: Nominal, past: bool) -> Clause:
    """Something not done, or that cannot be done."""
    while True:
        frame = dice.pick(INTENDED)
        clause = draw_clause(dice, subject, frame, past_tense(dice, subject) if past else PRESENT, extras=False)
        if not past or dice.chance(0.5):
            name = dice.pick(("können", "wollen"))
            clause = replace(clause, tense=PRETERITE if past else PRESENT, modal=MODALS[name])
        denied = negate(clause)
        if denied is not clause:
            if past and dice.chance(0.4):
                return denied.with_parts(draw_time(dice, True))
            return denied
