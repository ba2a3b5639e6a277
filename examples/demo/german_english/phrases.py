"""Noun phrases and prepositional phrases in both languages."""

from dataclasses import dataclass

from .english import english_genitive, indefinite_article
from .german import CONTRACTIONS, DEFINITE, STRONG, adjective_ending, attributive_stem, column, noun_form
from .lexicon.entries import Adjective, Noun, Pair
from .pronouns import ER, ES, SIE, SIE_PL, THING_F, THING_M, Pronoun


@dataclass(frozen=True)
class Determiner:
    de: str  # stem; "" for none
    declension: str  # of a following adjective
    en: str
    en_plural: str = ""
    inflects: bool = True
    definite: bool = True


THE = Determiner("d", "weak", "the", "the")
A = Determiner("ein", "mixed", "a", definite=False)
NO = Determiner("kein", "mixed", "a", "any", definite=False)
THIS = Determiner("dies", "weak", "this", "these")
BARE = Determiner("", "strong", "", "", definite=False)
MANY = Determiner("viel", "strong", "", "many", definite=False)
SOME = Determiner("einig", "strong", "", "some", definite=False)
WHICH = Determiner("welch", "weak", "which", "which")


def possessive(owner: Pronoun) -> Determiner:
    return Determiner(owner.possessive, "mixed", owner.en[2], owner.en[2])


def counted(german: str, english: str) -> Determiner:
    return Determiner(german, "strong", "", english, inflects=False, definite=False)


def named(name: str) -> Determiner:
    return Determiner(name + "s", "strong", name + "'s", name + "'s", inflects=False)


def determiner_form(det: Determiner, case: str, gender: str, plural: bool) -> str:
    col = column(gender, plural)
    if not det.de or not det.inflects:
        return det.de
    if det is THE:
        return DEFINITE[case][col]
    if det.declension == "mixed":
        endingless = (case == "nom" and col in (0, 2)) or (case == "acc" and col == 2)
        ending = "" if endingless else STRONG[case][col]
        return ("eur" if det.de == "euer" and ending else det.de) + ending
    return det.de + STRONG[case][col]


PLURAL_MASS = frozenset({"vegetables"})


@dataclass(frozen=True)
class NounPhrase:
    noun: Noun
    det: Determiner = THE
    plural: bool = False
    adjectives: tuple[Adjective, ...] = ()
    degree: str = ""  # "" or "superlative"
    owner: "NounPhrase | None" = None  # a genitive: das Auto meines Bruders, my brother's car
    relative: Pair = ("", "")  # a relative clause, its commas included

    person = 3
    light = False

    def german(self, case: str) -> str:
        gender = self.noun.gender
        ending = adjective_ending(self.det.declension, case, gender, self.plural)
        words = [determiner_form(self.det, case, gender, self.plural)]
        for adjective in self.adjectives:
            base = adjective.de_superlative if self.degree else attributive_stem(adjective.de)
            words.append(base + ending)
        words.append(noun_form(self.noun, case, self.plural))
        if self.owner:
            words.append(self.owner.german("gen"))
        return " ".join(filter(None, words)) + self.relative[0]

    def english(self, subject: bool = False) -> str:
        words = [a.en_superlative if self.degree else a.en for a in self.adjectives]
        words.append(self.noun.en_plural if self.plural else self.noun.en)
        core = " ".join(words)
        if self.owner:
            article = english_genitive(self.owner.english(), self.owner.plural)
        elif self.plural:
            article = self.det.en_plural
        elif self.noun.mass and self.det in (A, NO):
            article = "any" if self.det is NO else ""
        else:
            article = indefinite_article(core) if self.det.en == "a" else self.det.en
        return " ".join(filter(None, (article, core))) + self.relative[1]

    @property
    def en_person(self) -> str:
        return "they" if self.plural or self.noun.en in PLURAL_MASS else "he"

    @property
    def ref(self) -> Pronoun | None:
        """The pronoun that takes this phrase up; None where German and English differ in gender (das Mädchen)."""
        if self.plural:
            return SIE_PL
        if self.noun.human:
            return {"m": ER, "f": SIE, "n": None}[self.noun.gender]
        return {"m": THING_M, "f": THING_F, "n": ES}[self.noun.gender]

    @property
    def definite(self) -> bool:
        return self.det.definite


@dataclass(frozen=True)
class Name:
    name: str
    female: bool
    titled: bool = False

    person = 3
    plural = False
    en_person = "he"
    light = False
    definite = True

    def german(self, case: str) -> str:
        if not self.titled:
            return self.name
        title = "Frau" if self.female else "Herr" + ("" if case == "nom" else "n")
        return f"{title} {self.name}"

    def english(self, subject: bool = False) -> str:
        return f"{'Ms' if self.female else 'Mr'} {self.name}" if self.titled else self.name

    @property
    def ref(self) -> Pronoun:
        return SIE if self.female else ER


Nominal = Pronoun | NounPhrase | Name


def prepositional(preposition: str, nominal: Nominal, case: str) -> str:
    """A prepositional phrase, contracted with the definite article where German does so."""
    words = nominal.german(case)
    article, _, rest = words.partition(" ")
    contracted = CONTRACTIONS.get((preposition, article)) if getattr(nominal, "det", None) is THE else None
    return f"{contracted} {rest}" if contracted else f"{preposition} {words}"
