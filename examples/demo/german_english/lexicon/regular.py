"""The regular forms, which the tables leave out."""

from .entries import word_list

SIBILANTS = ("s", "x", "z", "ch", "sh")
VOWELS = "aeiou"


def english_plural(noun: str) -> str:
    if noun.endswith("y") and noun[-2] not in VOWELS:
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(SIBILANTS) else "s")


GENITIVES = {
    "Chef": "Chefs",
    "Zahnarzt": "Zahnarztes",
    "Park": "Parks",
    "Film": "Films",
    "Koch": "Kochs",
    "Schal": "Schals",
    "Tee": "Tees",
}
GERMAN_VOWELS = "aeiouäöüy"


def syllables(word: str) -> int:
    """Vowel groups, which is near enough to tell monosyllables."""
    word = word.lower()
    return sum(c in GERMAN_VOWELS and (i == 0 or word[i - 1] not in GERMAN_VOWELS) for i, c in enumerate(word))


def genitive(noun: str, gender: str) -> str:
    if gender == "f":
        return noun
    if noun in GENITIVES:
        return GENITIVES[noun]
    long = noun.endswith(("s", "ß", "x", "z")) or (syllables(noun) == 1 and noun[-1] not in GERMAN_VOWELS)
    if noun.endswith("nis"):
        return noun + "ses"
    return noun + ("es" if long else "s")


INSEPARABLE = ("be", "ver", "er", "ent", "über", "unter", "ge", "zer", "wieder")
DOUBLING = frozenset(word_list("get put run swim cut stop plan sit forget begin travel"))
WEAK_E = ("d", "t", "fn", "gn", "chn", "tm", "dm", "ckn")  # stems that need -e- before -t and -st


def stem(infinitive: str) -> str:
    return infinitive.removesuffix("en") if infinitive.endswith("en") else infinitive.removesuffix("n")


def linking_e(stem_: str) -> str:
    return "e" if stem_.endswith(WEAK_E) else ""


def regular_past(base: str) -> str:
    if base.endswith("e"):
        return base + "d"
    if base.endswith("y") and base[-2] not in VOWELS:
        return base[:-1] + "ied"
    return base + (base[-1] if base in DOUBLING else "") + "ed"


def english_degrees(word: str) -> tuple[str, str]:
    """Short adjectives and those in -y take endings, the others more and most."""
    if word.endswith("y") and word[-2] not in VOWELS:
        return word[:-1] + "ier", word[:-1] + "iest"
    groups = sum(c in VOWELS and (i == 0 or word[i - 1] not in VOWELS) for i, c in enumerate(word.removesuffix("e")))
    if groups > 1:
        return f"more {word}", f"most {word}"
    if word.endswith("e"):
        return word + "r", word + "st"
    if word[-1] in "gdtn" and word[-2] in VOWELS and word[-3] not in VOWELS:
        return word + word[-1] + "er", word + word[-1] + "est"
    return word + "er", word + "est"
