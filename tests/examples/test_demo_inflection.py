"""The demo corpus: inflection and noun phrases against hand-written paradigms."""

import pytest
from german_english.english import indefinite_article, ing_form, third_singular
from german_english.german import (
    CASES,
    adjective_ending,
    attributive_stem,
    german_imperative,
    german_present,
    german_preterite,
    noun_form,
    zu_infinitive,
)
from german_english.lexicon.adjectives import ADJECTIVES
from german_english.lexicon.compounds import NOUNS
from german_english.lexicon.verbs import VERBS
from german_english.phrases import BARE, NO, THE, THIS, A, NounPhrase, possessive, prepositional
from german_english.pronouns import ICH, IHR


def noun(word):
    return next(n for n in NOUNS if n.de == word)


def adjective(word):
    return next(a for a in ADJECTIVES if a.de == word)


ENDINGS = {
    # masculine, feminine, neuter, plural
    "weak": {
        "nom": "e e e en",
        "acc": "en e e en",
        "dat": "en en en en",
        "gen": "en en en en",
    },
    "mixed": {
        "nom": "er e es en",
        "acc": "en e es en",
        "dat": "en en en en",
        "gen": "en en en en",
    },
    "strong": {
        "nom": "er e es e",
        "acc": "en e es e",
        "dat": "em er em en",
        "gen": "en er en er",
    },
}


@pytest.mark.parametrize("declension", ENDINGS)
@pytest.mark.parametrize("case", ["nom", "acc", "dat", "gen"])
def test_adjective_endings(declension, case):
    columns = [("m", False), ("f", False), ("n", False), ("n", True)]
    found = [adjective_ending(declension, case, gender, plural) for gender, plural in columns]
    assert " ".join(found) == ENDINGS[declension][case]


def test_attributive_stems():
    found = [attributive_stem(word) for word in ("hoch", "teuer", "dunkel", "leise", "rot")]
    assert found == ["hoh", "teur", "dunkl", "leis", "rot"]


@pytest.mark.parametrize(
    ("word", "singular", "plural"),
    [
        ("Nachbar", "Nachbar Nachbarn Nachbarn Nachbarn", "Nachbarn Nachbarn Nachbarn Nachbarn"),
        ("Arzt", "Arzt Arzt Arzt Arztes", "Ärzte Ärzte Ärzten Ärzte"),
        ("Lehrerin", "Lehrerin Lehrerin Lehrerin Lehrerin", "Lehrerinnen Lehrerinnen Lehrerinnen Lehrerinnen"),
        ("Auto", "Auto Auto Auto Autos", "Autos Autos Autos Autos"),
        ("Kind", "Kind Kind Kind Kindes", "Kinder Kinder Kindern Kinder"),
        ("Fenster", "Fenster Fenster Fenster Fensters", "Fenster Fenster Fenstern Fenster"),
    ],
)
def test_nouns(word, singular, plural):
    for several, forms in ((False, singular), (True, plural)):
        found = [noun_form(noun(word), case, several) for case in CASES]
        assert " ".join(found) == forms


@pytest.mark.parametrize(
    ("det", "word", "plural", "forms"),
    [
        (THE, "Tisch", False, ["der alte Tisch", "den alten Tisch", "dem alten Tisch", "des alten Tisches"]),
        (THE, "Lampe", False, ["die alte Lampe", "die alte Lampe", "der alten Lampe", "der alten Lampe"]),
        (A, "Buch", False, ["ein altes Buch", "ein altes Buch", "einem alten Buch", "eines alten Buches"]),
        (A, "Tisch", False, ["ein alter Tisch", "einen alten Tisch", "einem alten Tisch", "eines alten Tisches"]),
        (BARE, "Buch", True, ["alte Bücher", "alte Bücher", "alten Büchern", "alter Bücher"]),
        (
            NO,
            "Buch",
            True,
            ["keine alten Bücher", "keine alten Bücher", "keinen alten Büchern", "keiner alten Bücher"],
        ),
        (
            THIS,
            "Lampe",
            True,
            ["diese alten Lampen", "diese alten Lampen", "diesen alten Lampen", "dieser alten Lampen"],
        ),
    ],
)
def test_noun_phrases(det, word, plural, forms):
    old = (adjective("alt"),)
    phrase = NounPhrase(noun(word), det, plural, old)
    assert [phrase.german(case) for case in CASES] == forms


def test_possessives():
    car = NounPhrase(noun("Auto"), possessive(IHR))
    assert [car.german(case) for case in CASES] == ["euer Auto", "euer Auto", "eurem Auto", "eures Autos"]
    brother = NounPhrase(noun("Bruder"), possessive(ICH))
    owned = NounPhrase(noun("Auto"), owner=brother)
    assert (owned.german("dat"), owned.english()) == ("dem Auto meines Bruders", "my brother's car")


def test_contractions():
    garden = NounPhrase(noun("Garten"))
    house = NounPhrase(noun("Haus"))
    this = NounPhrase(noun("Haus"), THIS)
    assert prepositional("in", garden, "dat") == "im Garten"
    assert prepositional("in", garden, "acc") == "in den Garten"
    assert prepositional("in", house, "acc") == "ins Haus"
    assert prepositional("in", this, "dat") == "in diesem Haus"
    assert prepositional("zu", NounPhrase(noun("Schule")), "dat") == "zur Schule"


PRESENTS = {
    "aufmachen": "mache machst macht machen macht machen",
    "arbeiten": "arbeite arbeitest arbeitet arbeiten arbeitet arbeiten",
    "öffnen": "öffne öffnest öffnet öffnen öffnet öffnen",
    "sammeln": "sammle sammelst sammelt sammeln sammelt sammeln",
    "lesen": "lese liest liest lesen lest lesen",
    "fahren": "fahre fährst fährt fahren fahrt fahren",
    "einladen": "lade lädst lädt laden ladet laden",
    "waschen": "wasche wäschst wäscht waschen wascht waschen",
    "schließen": "schließe schließt schließt schließen schließt schließen",
    "unterhalten": "unterhalte unterhältst unterhält unterhalten unterhaltet unterhalten",
    "sein": "bin bist ist sind seid sind",
    "wissen": "weiß weißt weiß wissen wisst wissen",
}
PRETERITES = {
    "aufmachen": "machte machtest machte machten machtet machten",
    "finden": "fand fandest fand fanden fandet fanden",
    "gehen": "ging gingst ging gingen gingt gingen",
    "haben": "hatte hattest hatte hatten hattet hatten",
}
VERB_SLOTS = [(1, False), (2, False), (3, False), (1, True), (2, True), (3, True)]


@pytest.mark.parametrize("verb", PRESENTS)
def test_present(verb):
    found = [german_present(VERBS[verb], *where) for where in VERB_SLOTS]
    assert " ".join(found) == PRESENTS[verb]


@pytest.mark.parametrize("verb", PRETERITES)
def test_preterite(verb):
    found = [german_preterite(VERBS[verb], *where) for where in VERB_SLOTS]
    assert " ".join(found) == PRETERITES[verb]


@pytest.mark.parametrize(
    ("verb", "participle", "sein"),
    [
        ("aufmachen", "aufgemacht", False),
        ("anrufen", "angerufen", False),
        ("besuchen", "besucht", False),
        ("reparieren", "repariert", False),
        ("anprobieren", "anprobiert", False),
        ("vorbereiten", "vorbereitet", False),
        ("zurückbringen", "zurückgebracht", False),
        ("aufstehen", "aufgestanden", True),
        ("öffnen", "geöffnet", False),
    ],
)
def test_participles(verb, participle, sein):
    assert (VERBS[verb].participle, VERBS[verb].perfect_with_sein) == (participle, sein)


def test_zu_infinitives_and_imperatives():
    verbs = VERBS
    assert zu_infinitive(verbs["aufmachen"]) == "aufzumachen"
    assert zu_infinitive(verbs["lesen"]) == "zu lesen"
    names = ("aufmachen", "warten", "lesen", "vergessen", "fahren", "öffnen", "treffen", "helfen")
    found = " ".join(german_imperative(verbs[v]) for v in names)
    assert found == "mach warte lies vergiss fahr öffne triff hilf"


def test_comparison_of_adjectives():
    old, expensive, interesting = (adjective(word) for word in ("alt", "teuer", "interessant"))
    assert (old.de_comparative, old.de_superlative, old.en_superlative) == ("älter", "ältest", "oldest")
    assert (expensive.de_comparative, expensive.en_comparative) == ("teurer", "more expensive")
    assert (interesting.de_superlative, interesting.en_superlative) == ("interessantest", "most interesting")


@pytest.mark.parametrize(
    ("word", "gender", "plural", "english"),
    [
        ("Haustürschlüssel", "m", "Haustürschlüssel", "front door key"),
        ("Küchenfenster", "n", "Küchenfenster", "kitchen window"),
        ("Geburtstagsfeier", "f", "Geburtstagsfeiern", "birthday party"),
        ("Geschichtsbuch", "n", "Geschichtsbücher", "history book"),
        ("Schultasche", "f", "Schultaschen", "school bag"),
        ("Kellertürschloss", "n", "Kellertürschlösser", "cellar door lock"),
    ],
)
def test_compounds(word, gender, plural, english):
    found = noun(word)
    assert (found.gender, found.de_plural, found.en) == (gender, plural, english)


# -- English inflection


@pytest.mark.parametrize(
    ("base", "third"),
    [("open", "opens"), ("watch", "watches"), ("try", "tries"), ("play", "plays"), ("go", "goes"), ("have", "has")],
)
def test_third_person(base, third):
    assert third_singular(base) == third


@pytest.mark.parametrize(
    ("base", "ing"),
    [("write", "writing"), ("put", "putting"), ("lie", "lying"), ("see", "seeing"), ("open", "opening")],
)
def test_ing(base, ing):
    assert ing_form(base) == ing


@pytest.mark.parametrize(
    ("word", "article"),
    [("apple", "an"), ("old car", "an"), ("car", "a"), ("honest man", "an"), ("university", "a"), ("umbrella", "an")],
)
def test_indefinite_article(word, article):
    assert indefinite_article(word) == article


def test_past_forms():
    verbs = VERBS
    found = [(verbs[v].en.past, verbs[v].en.participle) for v in ("schreiben", "planen", "anprobieren", "liegen")]
    assert found == [("wrote", "written"), ("planned", "planned"), ("tried", "tried"), ("lay", "lain")]
