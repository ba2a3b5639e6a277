"""German inflection."""

from .lexicon.entries import Noun, Verb
from .lexicon.regular import WEAK_E, stem
from .lexicon.verbs import VERBS

CASES = ("nom", "acc", "dat", "gen")
# Endings of der-words (dieser, jeder, strong adjectives) by case; columns m, f, n, plural.
STRONG = {
    "nom": ("er", "e", "es", "e"),
    "acc": ("en", "e", "es", "e"),
    "dat": ("em", "er", "em", "en"),
    "gen": ("es", "er", "es", "er"),
}
DEFINITE = {
    "nom": ("der", "die", "das", "die"),
    "acc": ("den", "die", "das", "die"),
    "dat": ("dem", "der", "dem", "den"),
    "gen": ("des", "der", "des", "der"),
}
RELATIVE = {**DEFINITE, "dat": ("dem", "der", "dem", "denen"), "gen": ("dessen", "deren", "dessen", "deren")}
CONTRACTIONS = {
    ("in", "dem"): "im",
    ("in", "das"): "ins",
    ("an", "dem"): "am",
    ("an", "das"): "ans",
    ("zu", "dem"): "zum",
    ("zu", "der"): "zur",
    ("bei", "dem"): "beim",
    ("von", "dem"): "vom",
}


def column(gender: str, plural: bool) -> int:
    return 3 if plural else "mfn".index(gender)


def adjective_ending(declension: str, case: str, gender: str, plural: bool) -> str:
    """``weak`` after der and dieser, ``mixed`` after ein, kein and possessives, ``strong`` without these."""
    col = column(gender, plural)
    if declension == "strong":
        return "en" if case == "gen" and col in (0, 2) else STRONG[case][col]
    bare = case == "nom" or (case == "acc" and col != 0)  # the forms without -en
    if plural or not bare:
        return "en"
    return STRONG[case][col] if declension == "mixed" else "e"


def attributive_stem(german: str) -> str:
    """The stem endings attach to: hoch-/hoh-, teuer/teur-, dunkel/dunkl-, leise/leis-."""
    if german == "hoch":
        return "hoh"
    if german.endswith("el") or german.endswith("euer"):
        return german[:-2] + german[-1]
    return german.removesuffix("e")


def noun_form(noun: Noun, case: str, plural: bool) -> str:
    if plural:
        form = noun.de_plural
        return form + "n" if case == "dat" and not form.endswith(("n", "s")) else form
    if noun.weak and case != "nom":
        return noun.weak
    return noun.genitive if case == "gen" else noun.de


IRREGULAR_PRESENT = {
    "sein": ("bin", "bist", "ist", "sind", "seid", "sind"),
    "haben": ("habe", "hast", "hat", "haben", "habt", "haben"),
    "werden": ("werde", "wirst", "wird", "werden", "werdet", "werden"),
    "wissen": ("weiß", "weißt", "weiß", "wissen", "wisst", "wissen"),
    "können": ("kann", "kannst", "kann", "können", "könnt", "können"),
    "müssen": ("muss", "musst", "muss", "müssen", "müsst", "müssen"),
    "wollen": ("will", "willst", "will", "wollen", "wollt", "wollen"),
    "sollen": ("soll", "sollst", "soll", "sollen", "sollt", "sollen"),
    "dürfen": ("darf", "darfst", "darf", "dürfen", "dürft", "dürfen"),
    "möchten": ("möchte", "möchtest", "möchte", "möchten", "möchtet", "möchten"),
}
SIBILANT_STEMS = ("s", "ß", "z", "x")


def slot(person: int, plural: bool) -> int:
    return person - 1 + 3 * plural


def german_present(verb: Verb, person: int, plural: bool) -> str:
    """The finite present without the separable prefix."""
    if verb.de in IRREGULAR_PRESENT:
        return IRREGULAR_PRESENT[verb.de][slot(person, plural)]
    root = stem(verb.de)
    if plural:
        return verb.de if person != 2 else root + ("et" if root.endswith(WEAK_E) else "t")
    if person == 3:
        return verb.third
    if person == 1:
        return (root[:-2] + "l" if root.endswith("el") else root) + "e"
    if verb.third.endswith("et"):
        return verb.third[:-1] + "st"
    if verb.third[:-1].endswith(SIBILANT_STEMS):
        return verb.third
    changed = verb.third if root.endswith("t") else verb.third[:-1]  # hält, whose -t belongs to the stem
    return changed + "st"


def german_preterite(verb: Verb, person: int, plural: bool) -> str:
    past = verb.preterite
    if not plural and person != 2:
        return past
    if plural and person != 2:
        return past + ("n" if past.endswith("e") else "en")
    e = "e" if past.endswith(("t", "d", *(SIBILANT_STEMS if not plural else ()))) else ""
    return past + e + ("t" if plural else "st")


def german_imperative(verb: Verb) -> str:
    """The du-imperative without the prefix: mach, warte, lies, fahr."""
    root = stem(verb.de)
    if verb.de == "sein":
        return "sei"
    if "e" in root and "i" in verb.third and "i" not in root:
        changed = verb.third if root.endswith("t") else verb.third[:-1]
        return changed
    if root.endswith("el"):
        return root[:-2] + "le"
    return root + ("e" if root.endswith((*WEAK_E, "ig", "er")) else "")


def zu_infinitive(verb: Verb) -> str:
    return f"{verb.prefix}zu{verb.de}" if verb.prefix else f"zu {verb.de}"


WERDEN, SEIN, HABEN = VERBS["werden"], VERBS["sein"], VERBS["haben"]
