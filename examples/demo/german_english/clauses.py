"""Clauses, before either language spells them out."""

from dataclasses import dataclass, replace

from .english import BE, CAN, LIKE, SHOULD, WANT, WOULD
from .german import IRREGULAR_PRESENT
from .lexicon.entries import EnglishVerb, Pair, Place, Verb
from .lexicon.verbs import VERBS
from .phrases import Nominal, NounPhrase, prepositional


@dataclass(frozen=True)
class Modal:
    """A modal verb; ``link`` stands between the English one and the infinitive."""

    de: Verb | None  # None for gern, an adverb in German
    en: EnglishVerb
    link: tuple[str, ...]


def modal_verb(infinitive: str, preterite: str) -> Verb:
    return Verb(infinitive, "", IRREGULAR_PRESENT[infinitive][2], preterite, "", False, CAN)


MODALS = {
    "können": Modal(modal_verb("können", "konnte"), CAN, ()),
    "müssen": Modal(modal_verb("müssen", "musste"), VERBS["haben"].en, ("to",)),
    "wollen": Modal(modal_verb("wollen", "wollte"), WANT, ("to",)),
    "sollen": Modal(modal_verb("sollen", "sollte"), SHOULD, ()),
    "dürfen": Modal(modal_verb("dürfen", "durfte"), BE, ("allowed", "to")),
    "möchten": Modal(modal_verb("möchten", "möchte"), WOULD, ("like", "to")),
    "gern": Modal(None, LIKE, ("to",)),
}


@dataclass(frozen=True)
class Tense:
    """``german`` and ``english`` name one tense in each language."""

    german: str  # present, preterite, perfect, pluperfect, future
    english: str  # present, past, perfect, pluperfect, future; progressive is a flag
    progressive: bool = False


PRESENT = Tense("present", "present")
NOW = Tense("present", "present", True)
PRETERITE = Tense("preterite", "past")
PAST_NOW = Tense("preterite", "past", True)
PERFECT = Tense("perfect", "past")
RESULT = Tense("perfect", "perfect")
PLUPERFECT = Tense("pluperfect", "pluperfect")
FUTURE = Tense("future", "future")
PLANNED = Tense("present", "future")


@dataclass(frozen=True)
class Part:
    """A constituent beside subject and verb, spelled in both languages; ``role`` decides its place."""

    role: str
    de: str
    en: str
    light: bool = False  # a pronoun
    definite: bool = True
    nominal: Nominal | None = None
    preposition: Pair = ("", "")
    case: str = ""


@dataclass(frozen=True)
class Clause:
    """Who does what, when, and how; the functions of the two word orders spell it out."""

    subject: Nominal
    verb: Verb
    tense: Tense
    parts: tuple[Part, ...] = ()
    modal: Modal | None = None
    negated: bool = False  # with nicht; kein negates through ``negated_en`` alone
    negated_en: bool = False
    passive: bool = False

    @property
    def denies(self) -> bool:
        return self.negated or self.negated_en

    def part(self, *roles: str) -> Part | None:
        """The first part in one of the roles."""
        return next((p for p in self.parts if p.role in roles), None)

    def has(self, *roles: str) -> bool:
        return self.part(*roles) is not None

    def direct_object(self) -> Part | None:
        """The accusative object, where it has no preposition in English."""
        return next((p for p in self.parts if p.role == "acc" and not p.preposition[1]), None)

    def with_parts(self, *parts: Part) -> "Clause":
        return replace(self, parts=self.parts + parts)

    def without(self, part: Part) -> "Clause":
        return replace(self, parts=tuple(p for p in self.parts if p is not part))

    def without_roles(self, *roles: str) -> "Clause":
        return replace(self, parts=tuple(p for p in self.parts if p.role not in roles))

    def exchange(self, old: Part, new: Part) -> "Clause":
        return replace(self, parts=tuple(new if p is old else p for p in self.parts))


def join(*words: str) -> str:
    return " ".join(filter(None, words))


def pred(german: str, english: str) -> Part:
    return Part("predicate", german, english)


def acc_part(nominal: Nominal, preposition: str = "") -> Part:
    return Part(
        "acc",
        nominal.german("acc"),
        join(preposition, nominal.english()),
        light=nominal.light,
        definite=nominal.definite,
        nominal=nominal,
        preposition=("", preposition),
        case="acc",
    )


def dat_part(nominal: Nominal, preposition: str = "") -> Part:
    return Part(
        "dat",
        nominal.german("dat"),
        join(preposition, nominal.english()),
        light=nominal.light,
        nominal=nominal,
        preposition=("", preposition),
        case="dat",
    )


def place_part(place: Place, role: str) -> Part:
    """A place of rest (role ``place``) or a direction (``goal``)."""
    preposition = place.at if role == "place" else place.to
    english = place.en_at if role == "place" else place.en_to
    if place.noun is None:
        return Part(role, f"{preposition} {place.name}", english)
    case = "dat" if role == "place" or preposition == "zu" else "acc"
    return Part(role, prepositional(preposition, NounPhrase(place.noun, plural=place.plural), case), english)
