"""Pronouns in both languages."""

from dataclasses import dataclass, replace

from .german import CASES


@dataclass(frozen=True)
class Pronoun:
    """A pronoun; ``light`` nominals stand early in German, and ``ref`` is the pronoun that takes a nominal up."""

    de: tuple[str, str, str]  # nom, acc, dat
    reflexive: tuple[str, str]  # acc, dat
    possessive: str
    en: tuple[str, str, str]  # subject, object, possessive
    person: int  # of the German verb
    plural: bool
    en_person: str  # I, you, he or they: what the English verb agrees with

    light = True
    definite = True

    def german(self, case: str) -> str:
        return self.de[CASES.index(case)]

    def english(self, subject: bool = False) -> str:
        return self.en[0] if subject else self.en[1]

    @property
    def ref(self) -> "Pronoun":
        return self


ICH = Pronoun(("ich", "mich", "mir"), ("mich", "mir"), "mein", ("I", "me", "my"), 1, False, "I")
DU = Pronoun(("du", "dich", "dir"), ("dich", "dir"), "dein", ("you", "you", "your"), 2, False, "you")
ER = Pronoun(("er", "ihn", "ihm"), ("sich", "sich"), "sein", ("he", "him", "his"), 3, False, "he")
SIE = Pronoun(("sie", "sie", "ihr"), ("sich", "sich"), "ihr", ("she", "her", "her"), 3, False, "he")
WIR = Pronoun(("wir", "uns", "uns"), ("uns", "uns"), "unser", ("we", "us", "our"), 1, True, "they")
IHR = Pronoun(("ihr", "euch", "euch"), ("euch", "euch"), "euer", ("you", "you", "your"), 2, True, "you")
SIE_PL = Pronoun(("sie", "sie", "ihnen"), ("sich", "sich"), "ihr", ("they", "them", "their"), 3, True, "they")
FORMAL = Pronoun(("Sie", "Sie", "Ihnen"), ("sich", "sich"), "Ihr", ("you", "you", "your"), 3, True, "you")
THING_M = replace(ER, en=("it", "it", "its"))
THING_F = replace(SIE, en=("it", "it", "its"))
ES = Pronoun(("es", "es", "ihm"), ("sich", "sich"), "sein", ("it", "it", "its"), 3, False, "he")
WHO = Pronoun(("wer", "wen", "wem"), ("sich", "sich"), "sein", ("who", "who", "their"), 3, False, "he")
SECOND_PERSON = (DU, IHR, FORMAL)
ES_DAS = replace(ES, de=("das", "das", "dem"), en=("this", "this", "its"))
THEY_FREE = replace(WIR, reflexive=("sich", "sich"))
