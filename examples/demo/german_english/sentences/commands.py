"""Commands to du, ihr and Sie."""

from dataclasses import replace

from ..activities import draw_clause, negate
from ..clauses import PRESENT, Part, join
from ..dice import Dice
from ..english_clauses import english_infinitive
from ..german import german_imperative, german_present
from ..german_clauses import german_infinitive, middle_field
from ..lexicon.entries import Pair, Verb
from ..lexicon.frames import FRAMES
from ..lexicon.verbs import VERBS
from ..pronouns import DU, IHR, SECOND_PERSON, Pronoun
from .sentence import Sentence


def command(dice: Dice) -> Sentence:
    person = dice.pick(SECOND_PERSON)
    frame = dice.pick([f for f in FRAMES if f.command and not f.stative])
    clause = draw_clause(dice, person, frame, PRESENT)
    kind = dice.pick(("plain", "please", "please", "forget" if frame.en_prep else "not", "forget"))
    if kind == "forget":
        clause = clause.without_roles("manner")
        finite, _ = imperative(VERBS["vergessen"], person)
        return Sentence(
            f"{finite} nicht, {german_infinitive(clause)}", f"do not forget {english_infinitive(clause)}", "!"
        )
    if kind == "not":
        denied = negate(clause)
        if denied is clause:
            return command(dice)
        clause = denied
    if kind != "not" and dice.chance(0.35):
        time = dice.pick(
            (("heute", "today"), ("morgen", "tomorrow"), ("heute Abend", "this evening"), ("bald", "soon"))
        )
        clause = clause.with_parts(Part("time", *time))
    finite, prefix = imperative(clause.verb, person)
    please = "bitte" if kind == "please" else ""
    light = [p for p in clause.parts if p.role == "reflexive" or (p.light and p.role in ("acc", "dat"))]
    rest = tuple(p for p in clause.parts if p not in light)
    german = join(
        finite,
        *middle_field(replace(clause, parts=tuple(light), negated=False)),
        please,
        *middle_field(replace(clause, parts=rest)),
        prefix,
    )
    opening = {"please": "please", "not": "do not"}.get(kind, "")
    return Sentence(german, english_infinitive(clause, opening), "!" if kind == "not" else dice.pick((".", "!")))


def imperative(verb: Verb, person: Pronoun) -> Pair:
    if person is DU:
        return german_imperative(verb), verb.prefix
    if person is IHR:
        return german_present(verb, 2, True), verb.prefix
    return f"{verb.de} Sie", verb.prefix
