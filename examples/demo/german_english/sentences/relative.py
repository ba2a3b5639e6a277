"""Relative clauses."""

from collections.abc import Sequence
from dataclasses import replace

from ..activities import WITH_THING, activity, past_tense
from ..clauses import FUTURE, PRESENT, PRETERITE, Clause, Part, acc_part, join, pred
from ..dice import Dice
from ..english_clauses import LATE_PARTICLES, english_main
from ..german import RELATIVE, SEIN, column
from ..german_clauses import german_subordinate
from ..lexicon.adjectives import ADJECTIVES, COLOURS
from ..lexicon.entries import Adjective, Frame, Pair, word_list
from ..lexicon.frames import FRAMES, frames_of
from ..lexicon.names import FEMALE_NAMES, MALE_NAMES
from ..lexicon.pools import POOLS
from ..lexicon.verbs import VERBS
from ..nominals import SIGNS_OF_USE, SUITABLE, YOUNG, draw_adjectives, draw_noun, someone
from ..phrases import THE, Determiner, NounPhrase, named, possessive
from ..pronouns import ICH, WIR
from .sentence import Sentence, main_pair, plain, with_dependent

THING_RELATIVES = frames_of(
    *word_list(
        "lesen schreiben kaufen verkaufen reparieren bauen malen öffnen finden verlieren sehen bestellen mieten"
    ),
    *["ausleihen", "besichtigen", "planen", "übersetzen"],
)
MAKING = [VERBS[f.verb] for f in FRAMES if f.det == "made"]
TO_PERSON = [f for f in FRAMES if "beings" in f.dat or "person" in f.dat]
WITH_PERSON = [f for f in FRAMES if "person" in f.pp]


def relative_clause(dice: Dice) -> Sentence:
    return dice.weighted(KINDS)(dice)


def antecedent(dice: Dice) -> NounPhrase:
    noun = draw_noun(dice, "person")
    plural = dice.chance(0.2)
    return NounPhrase(noun, THE, plural, draw_adjectives(dice, noun, 0.2))


def relative_pronoun(phrase: NounPhrase, case: str) -> str:
    return RELATIVE[case][column(phrase.noun.gender, phrase.plural)]


def with_relative(head: NounPhrase, relative: Pair) -> NounPhrase:
    return replace(head, relative=(f", {relative[0]},", f" {relative[1]}"))


def main_about(dice: Dice, head: NounPhrase, relative: Pair) -> Sentence:
    """A main clause whose subject is a person with a relative clause."""
    subject = with_relative(head, relative)
    if dice.chance(0.35):
        clause = Clause(subject, SEIN, PRESENT, (pred(*identity(dice, head)),))
    else:
        clause = activity(dice, head, moods=("past", "future", "modal", "now"))
        clause = replace(clause, subject=subject)
    return plain(clause)


def identity(dice: Dice, head: NounPhrase) -> Pair:
    adjectives = ("sehr freundlich", "very friendly"), ("sehr nett", "very nice"), ("wieder krank", "ill again")
    if head.plural or dice.chance(0.6):
        return dice.pick(adjectives)
    noun = dice.pick([n for n in POOLS["family"] if n.gender == head.noun.gender])
    owner = possessive(dice.pick((ICH, WIR))) if dice.chance(0.6) else named(dice.pick(FEMALE_NAMES + MALE_NAMES))
    phrase = NounPhrase(noun, owner)
    return phrase.german("nom"), phrase.english()


def relative_subject(dice: Dice) -> Sentence:
    head = antecedent(dice)
    clause = activity(dice, head, moods=("past", "now", "habit", "result"))
    while clause.denies:
        clause = activity(dice, head, moods=("past", "now", "habit"))
    german = german_subordinate(clause, relative_pronoun(head, "nom"), subject=False)
    return main_about(dice, head, (german, join("who", english_main(clause, subject=False))))


def gapped(dice: Dice, frames: Sequence[Frame], role: str, human: bool) -> tuple[Clause, Part]:
    """A clause and the part of it that a relative pronoun will stand for."""
    while True:
        subject = someone(dice)
        clause = activity(dice, subject, frames, ("past", "result", "state"))
        if clause.denies or clause.has("aspect"):
            continue
        part = clause.part(role)
        if part is None or not isinstance(part.nominal, NounPhrase) or part.nominal.noun.human != human:
            continue
        noun = part.nominal.noun
        if (
            not noun.mass
            and noun.kind not in ("family", "couple", "day")
            and not (role == "acc" and part.preposition[1])
        ):
            return clause, part


def head_of(dice: Dice, part: Part) -> NounPhrase:
    """The bare definite antecedent for a gap."""
    phrase = part.nominal
    return NounPhrase(phrase.noun, THE, phrase.plural, phrase.adjectives[:1] if dice.chance(0.4) else ())


def relative_words(clause: Clause, part: Part, head: NounPhrase) -> Pair:
    """The relative clause itself, with the preposition of the gap in front."""
    gap = clause.without(part)
    pronoun = relative_pronoun(head, part.case)
    which = join(part.preposition[1], "whom" if head.noun.human else "which")
    return german_subordinate(gap, join(part.preposition[0], pronoun)), join(which, english_main(gap))


def relative_object(dice: Dice) -> Sentence:
    """Das Buch, das ich gekauft habe, ist spannend."""
    while True:
        clause, part = gapped(dice, THING_RELATIVES, "acc", human=False)
        head = head_of(dice, part)
        suitable = [a for a in ADJECTIVES if head.noun.de in SUITABLE[a] and a not in head.adjectives]
        if clause.verb in MAKING:
            suitable = [a for a in suitable if a.de not in SIGNS_OF_USE]
        if suitable:
            break
    subject = with_relative(head, relative_words(clause, part, head))
    predicate = draw_predicate(dice, dice.pick(suitable))
    return plain(Clause(subject, SEIN, dice.pick((PRESENT, PRETERITE)), (predicate,)))


def draw_predicate(dice: Dice, adjective: Adjective) -> Part:
    degrees = [("", ""), ("sehr", "very"), ("ziemlich", "quite")]
    if adjective.de in ("neu", "kaputt", "leer", "voll", "rund", "lecker") or adjective.de in COLOURS:
        degrees = degrees[:1]
    german, english = dice.pick(degrees)
    return pred(join(german, adjective.de), join(english, adjective.en))


def relative_extraposed(dice: Dice) -> Sentence:
    """Ich habe das Buch gelesen, das du mir empfohlen hast."""
    while True:
        clause, part = gapped(dice, THING_RELATIVES, "acc", human=False)
        head = head_of(dice, part)
        frames = [f for f in WITH_THING if not (f.dat or f.goal) and f.verb != clause.verb.infinitive]
        frames = [f for f in frames if any(head.noun in POOLS[k] for k in f.acc.split())]
        frames = [f for f in frames if not f.en_prep and VERBS[f.verb].en.particle not in LATE_PARTICLES]
        if frames:
            break
    subject = someone(dice)
    frame = dice.pick(frames)
    tense = past_tense(dice, subject) if frame.stative or dice.chance(0.6) else FUTURE
    main = Clause(subject, VERBS[frame.verb], tense, (acc_part(head),))
    return with_dependent(main_pair(main), relative_words(clause, part, head))


def relative_dative(dice: Dice) -> Sentence:
    clause, part = gapped(dice, TO_PERSON, "dat", human=True)
    head = head_of(dice, part)
    if clause.has("acc"):
        part_to = replace(part, preposition=("", "to"))
        clause = clause.exchange(part, part_to)
        part = part_to
    return main_about(dice, head, relative_words(clause, part, head))


def relative_preposition(dice: Dice) -> Sentence:
    clause, part = gapped(dice, WITH_PERSON, "pp", human=True)
    head = head_of(dice, part)
    return main_about(dice, head, relative_words(clause, part, head))


def relative_genitive(dice: Dice) -> Sentence:
    """Die Frau, deren Sohn ..."""
    head = antecedent(dice)
    relative = draw_noun(dice, "elder" if head.noun in YOUNG else "family")
    possessed = NounPhrase(relative, Determiner(relative_pronoun(head, "gen"), "strong", "whose", "whose", False))
    clause = activity(dice, possessed, moods=("past", "habit", "now"))
    german = german_subordinate(clause, possessed.german("nom"), subject=False)
    return main_about(dice, head, (german, english_main(clause)))


KINDS = {
    relative_subject: 3,
    relative_object: 3,
    relative_extraposed: 3,
    relative_dative: 2,
    relative_preposition: 2,
    relative_genitive: 1,
}
