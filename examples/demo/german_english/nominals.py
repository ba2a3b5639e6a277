"""People and things at random."""

from collections.abc import Callable
from dataclasses import replace

from .dice import Dice, T
from .lexicon.adjectives import ADJECTIVES, COLOURS
from .lexicon.entries import Adjective, Noun, word_list
from .lexicon.names import FEMALE_NAMES, MALE_NAMES, SURNAMES
from .lexicon.pools import POOLS
from .numbers import NUMBERS
from .phrases import BARE, SOME, THE, THIS, A, Determiner, Name, Nominal, NounPhrase, counted, named, possessive
from .pronouns import DU, ER, ES, FORMAL, ICH, IHR, SECOND_PERSON, SIE, SIE_PL, THING_F, THING_M, WIR, Pronoun

OWNED_PEOPLE = frozenset(
    word_list(
        """
        Lehrer Lehrerin Arzt Ärztin Nachbar Nachbarin Freund Freundin Kollege Kollegin Kunde Kundin Chef Chefin
        Gast Zahnarzt Zahnärztin Hausmeister Tanzlehrer Tanzlehrerin Musiklehrer Musiklehrerin
    """
    )
)
WOMENS_WEAR = ("Kleid", "kleid", "Rock", "rock", "Bluse")
SIGNS_OF_USE = ("alt", "schmutzig", "kaputt", "leer", "voll", "neu", "berühmt", "beliebt")
# These sound odd without an owner.
RELATIONAL = frozenset(word_list("Freund Freundin Kollege Kollegin Nachbar Nachbarin Chef Chefin Gast"))
YOUNG_PEOPLE = ("Kind", "Mädchen", "Junge", "Schüler", "Schülerin")
YOUNG = frozenset(n for n in POOLS["kid"] + POOLS["person"] if n.de in YOUNG_PEOPLE)
OWNED_KINDS = frozenset(word_list("clothes thing vehicle furniture device container instrument ware room animal text"))
SUITABLE = {a: frozenset(n.de for kind in a.kinds for n in POOLS[kind]) for a in ADJECTIVES}
COLOUR_ADJECTIVES = [a for a in ADJECTIVES if a.de in COLOURS]


def draw_noun(dice: Dice, kinds: str) -> Noun:
    return dice.pick(POOLS[dice.pick(kinds.split())])


def draw_adjectives(dice: Dice, noun: Noun, probability: float = 0.4, fresh: bool = False) -> tuple[Adjective, ...]:
    """At most two adjectives; ``fresh`` ones fit a thing that is only being made."""
    suitable = [a for a in ADJECTIVES if noun.de in SUITABLE[a] and not (fresh and a.de in SIGNS_OF_USE)]
    if not suitable or not dice.chance(probability):
        return ()
    first = dice.pick(suitable)
    colours = [a for a in COLOUR_ADJECTIVES if a in suitable]
    if colours and first.de not in COLOURS and dice.chance(0.15):
        return (first, dice.pick(colours))
    return (first,)


def draw_number(dice: Dice) -> Determiner:
    german = dice.pick(list(NUMBERS)[:5])
    return counted(german, NUMBERS[german])


def draw_possessive(dice: Dice, subject: Pronoun | None) -> Determiner:
    """A possessive: mostly of the subject, else of the speaker."""
    if subject and subject not in (ES, THING_M, THING_F) and dice.chance(0.8):
        return possessive(subject)
    return possessive(dice.pick((ICH, WIR)))


def draw_relation(dice: Dice, owner: Determiner, kinds: str = "family", plural: float = 0.1) -> NounPhrase:
    noun = draw_noun(dice, kinds)
    several = noun.plural_only or (
        noun.de not in ("Vater", "Mutter", "Großvater", "Großmutter") and dice.chance(plural)
    )
    return NounPhrase(noun, owner, plural=several)


def draw_plural(dice: Dice, noun: Noun, det: Determiner, probability: float) -> bool:
    """One has several friends, but one boss."""
    single = det is A or (det.declension == "mixed" and noun.de not in RELATIONAL) or noun.de.startswith("Chef")
    return not single and dice.chance(probability)


def draw_role(dice: Dice, plural: float = 0.15) -> NounPhrase:
    """Somebody by occupation or part in life."""
    noun = draw_noun(dice, "person")
    det = dice.weighted({THE: 8, THIS: 1.5})
    if noun.de in RELATIONAL or (noun.de in OWNED_PEOPLE and dice.chance(0.5)):
        det = possessive(dice.pick((ICH, WIR)))
    return NounPhrase(noun, det, draw_plural(dice, noun, det, plural), draw_adjectives(dice, noun, 0.3))


def draw_name(dice: Dice) -> Name:
    female = dice.chance(0.5)
    if dice.chance(0.3):
        return Name(dice.pick(SURNAMES), female, titled=True)
    return Name(dice.pick(FEMALE_NAMES if female else MALE_NAMES), female)


def someone(dice: Dice, third: bool = False) -> Nominal:
    """A human subject; ``third`` ones are no pronoun of the 2nd person."""
    sort = dice.weighted({"pronoun": 30, "name": 18, "family": 22, "role": 24, "genitive": 5, "kid": 4})
    if sort == "pronoun":
        weights = {ICH: 28, WIR: 15, ER: 17, SIE: 17, SIE_PL: 12, DU: 6, IHR: 4}
        person = dice.weighted(weights)
        return ICH if third and person in SECOND_PERSON else person
    if sort == "name":
        return draw_name(dice)
    if sort == "family":
        owner = possessive(dice.weighted({ICH: 6, WIR: 2, DU: 1}))
        return draw_relation(dice, owner, dice.weighted({"family": 8, "couple": 2}))
    if sort == "genitive":
        return relative_of(dice, draw_role(dice, 0))
    if sort == "kid":
        return NounPhrase(draw_noun(dice, "kid"), plural=True)
    return draw_role(dice)


def relative_of(dice: Dice, person: NounPhrase) -> NounPhrase:
    if dice.chance(0.4):
        name = dice.pick(FEMALE_NAMES + MALE_NAMES)
        return NounPhrase(draw_noun(dice, "family"), named(name))
    kin = "elder" if person.noun in YOUNG else "family"
    return NounPhrase(draw_noun(dice, kin), owner=replace(person, adjectives=()))


def different(make: Callable[[], T], subject: Nominal) -> T:
    """Draw until the words differ from the subject's, so that nobody acts on a namesake."""
    heads = {getattr(subject, "noun", None), getattr(subject, "name", None)}
    while True:
        found = make()
        head = getattr(found, "noun", None) or getattr(found, "name", None)
        if head not in heads:
            return found


def apart(pronoun: Pronoun, subject: Nominal) -> bool:
    """Whether a pronoun object cannot overlap with the subject (ich ... mich, wir ... mich)."""
    groups = ((ICH, WIR), SECOND_PERSON)
    same = any(pronoun in g and subject.ref in g for g in groups)
    return not same and not (pronoun is ER and subject.person == 3 and not subject.plural)


def other_person(dice: Dice, kinds: str, subject: Nominal) -> Nominal:
    """A human object other than the subject."""
    if dice.chance(0.18) and "family" in kinds.split() and "person" in kinds.split():
        choices = [p for p in (ICH, DU, WIR, IHR, FORMAL, ER) if apart(p, subject)]
        return dice.pick(choices)
    if dice.chance(0.15):
        return different(lambda: draw_name(dice), subject)
    kind = dice.pick(kinds.split())
    if POOLS[kind][0].kind in ("family", "couple"):
        kin = "elder" if kind == "family" and getattr(subject, "noun", None) in YOUNG else kind
        return different(lambda: draw_relation(dice, draw_possessive(dice, subject.ref), kin), subject)
    if kind == "kid":
        return NounPhrase(draw_noun(dice, "kid"), plural=dice.chance(0.5))
    return different(lambda: acquaintance(dice, subject.ref), subject)


def acquaintance(dice: Dice, owner: Pronoun | None) -> NounPhrase:
    noun = draw_noun(dice, "person")
    det = dice.weighted({THE: 6, A: 2})
    if noun.de in RELATIONAL or (noun.de in OWNED_PEOPLE and dice.chance(0.6)):
        det = draw_possessive(dice, owner)
    return NounPhrase(noun, det, draw_plural(dice, noun, det, 0.12), draw_adjectives(dice, noun, 0.3))


def comes_in_several(noun: Noun) -> bool:
    """Rooms, soups and salads come one at a time, cakes and apples do not."""
    return noun.kind not in ("food", "room", "transport") or noun in POOLS["cake"] or noun in POOLS["fruit"]


def with_owner(dice: Dice, phrase: NounPhrase) -> NounPhrase:
    """Annas Fahrrad or das Fahrrad meines Bruders."""
    if phrase.noun.de.endswith(WOMENS_WEAR):
        return phrase
    if not phrase.plural and dice.chance(0.4):
        return replace(phrase, det=named(dice.pick(FEMALE_NAMES + MALE_NAMES)))
    owner = draw_relation(dice, possessive(ICH), plural=0) if dice.chance(0.6) else draw_role(dice, 0)
    return replace(phrase, owner=replace(owner, adjectives=()))


def draw_thing(dice: Dice, kinds: str, mode: str, subject: Nominal | None = None) -> NounPhrase:
    noun = draw_noun(dice, kinds)
    owner = subject.ref if subject else None
    if owner in (ER, SIE_PL) and noun.de.endswith(WOMENS_WEAR):
        return draw_thing(dice, kinds, mode, subject)
    if noun.kind == "day":
        return NounPhrase(noun, possessive(owner or ICH))
    if mode == "plain":
        return NounPhrase(noun, BARE)
    if mode == "bare" or (noun.mass and mode in ("new", "made", "any")):
        return NounPhrase(noun, BARE, adjectives=draw_adjectives(dice, noun, 0.35))
    plural = not noun.mass and mode not in ("own", "one") and comes_in_several(noun) and dice.chance(0.2)
    if mode == "own" and subject and subject.plural and noun.kind == "clothes":
        plural = True
    if mode == "one":
        plain = many = {A: 1}
    elif mode in ("new", "made"):
        plain = {A: 7, THIS: 0.6}
        many = {BARE: 3, SOME: 2, draw_number(dice): 4}
    elif mode == "own":
        plain = {possessive(owner) if owner else THE: 7, THE: 2}
        many = plain
    elif mode == "the":
        plain = {THE: 7, THIS: 2}
        many = {THE: 4, THIS: 2, draw_number(dice): 1}
    else:
        plain = {THE: 5, A: 4, THIS: 1}
        many = {THE: 3, BARE: 2, draw_number(dice): 2, SOME: 1}
    det = dice.weighted(many if plural else plain)
    phrase = NounPhrase(noun, det, plural, draw_adjectives(dice, noun, fresh=mode == "made"))
    if det is THE and noun.kind in OWNED_KINDS and dice.chance(0.3):
        return with_owner(dice, phrase)
    return phrase
