"""English inflection."""

from dataclasses import replace

from .lexicon.entries import EnglishVerb
from .lexicon.regular import DOUBLING, VOWELS
from .lexicon.verbs import VERBS


def indefinite_article(following: str) -> str:
    """``a`` or ``an``, by sound."""
    word = following.split()[0].lower()
    if word.startswith(("uni", "use", "eu", "one")):
        return "a"
    return "an" if word[0] in VOWELS or word.startswith(("hour", "honest")) else "a"


def english_genitive(words: str, plural: bool) -> str:
    return words + ("'" if plural and words.endswith("s") else "'s")


BE = VERBS["sein"].en
HAVE = replace(VERBS["haben"].en, auxiliary=True)
DO = EnglishVerb("do", "did", "done", auxiliary=True)
WILL = EnglishVerb("will", "would", "", auxiliary=True)
WOULD = EnglishVerb("would", "would", "", auxiliary=True)
CAN = EnglishVerb("can", "could", "", auxiliary=True)
SHOULD = EnglishVerb("should", "should", "", auxiliary=True)
LIKE = EnglishVerb("like", "liked", "liked")
WANT = EnglishVerb("want", "wanted", "wanted")
DEFECTIVE = frozenset({"will", "would", "can", "should"})


def third_singular(base: str) -> str:
    if base in ("have", "be"):
        return {"have": "has", "be": "is"}[base]
    if base.endswith("y") and base[-2] not in VOWELS:
        return base[:-1] + "ies"
    return base + ("es" if base.endswith(("s", "x", "z", "ch", "sh", "o")) else "s")


def ing_form(base: str) -> str:
    if base == "lie":
        return "lying"
    if base.endswith("e") and base not in ("be", "see"):
        return base[:-1] + "ing"
    return base + (base[-1] if base in DOUBLING else "") + "ing"


def english_finite(verb: EnglishVerb, en_person: str, past: bool) -> str:
    if verb.base == "be":
        forms = ("was", "was", "were") if past else ("am", "is", "are")
        return forms[{"I": 0, "he": 1}.get(en_person, 2)]
    if past:
        return verb.past
    return third_singular(verb.base) if en_person == "he" and verb.base not in DEFECTIVE else verb.base
