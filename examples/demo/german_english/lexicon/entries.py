"""What an entry of each table is parsed into."""

from dataclasses import dataclass

Pair = tuple[str, str]
HUMAN = frozenset({"person", "family", "kid", "couple"})


@dataclass(frozen=True)
class Noun:
    de: str
    gender: str  # m, f or n
    de_plural: str  # "" for nouns without a plural
    en: str
    en_plural: str
    kind: str
    genitive: str  # genitive singular
    weak: str = ""  # singular outside the nominative, n-declension only

    @property
    def human(self) -> bool:
        return self.kind in HUMAN

    @property
    def mass(self) -> bool:
        return not self.de_plural

    @property
    def plural_only(self) -> bool:
        return self.kind == "couple"


@dataclass(frozen=True)
class EnglishVerb:
    base: str
    past: str
    participle: str
    particle: str = ""
    auxiliary: bool = False  # takes "not" and inversion without "do"


@dataclass(frozen=True)
class Verb:
    de: str  # infinitive without a separable prefix
    prefix: str  # separable prefix or ""
    third: str  # er-form of the present
    preterite: str
    participle: str  # with prefix
    perfect_with_sein: bool
    en: "EnglishVerb"

    @property
    def infinitive(self) -> str:
        return self.prefix + self.de


@dataclass(frozen=True)
class Adjective:
    de: str
    de_comparative: str
    de_superlative: str  # stem, without ending
    en: str
    en_comparative: str
    en_superlative: str
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    noun: Noun | None  # None for towns and countries without an article
    name: str
    at: str  # preposition of rest, with the dative
    to: str  # preposition of motion
    en_at: str
    en_to: str
    group: str
    plural: bool = False


@dataclass(frozen=True)
class Frame:
    """One sense of a verb with what it can combine with."""

    verb: str
    acc: str = ""  # kinds of accusative object, blank-separated
    dat: str = ""  # kinds of dative object
    pp: str = ""  # "German preposition, case, English preposition (- for none), kinds"
    en_prep: str = ""  # English preposition before the direct object
    en_dat: str = ""  # English preposition of the recipient; without one it precedes the object
    fixed: tuple[str, str] = ("", "")  # complement without an article
    reflexive: str = ""  # case of the reflexive pronoun
    goal: str = ""  # place groups for a direction
    place: str = ""  # place groups where it may happen
    manner: str = ""  # adverbs from MANNERS
    det: str = "any"  # determiners of the object: any, new, own, the, bare
    habit: bool = False  # repeatable, sensible with "every day"
    punctual: bool = False  # no progressive
    stative: bool = False  # no progressive, no imperative, no intention
    passive: bool = True
    command: bool = True
    company: bool = False
    intended: bool = True  # a matter of will: takes modal verbs and infinitives
    distant: bool = False  # sensible with months and years


def word_list(text: str) -> list[str]:
    return text.split()


def split_table(table: str) -> list[list[str]]:
    return [[part.strip() for part in line.split("|")] for line in table.strip().splitlines()]
