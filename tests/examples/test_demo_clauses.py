"""The demo corpus: word order, verb forms and negation of hand-made clauses."""

from dataclasses import replace

import pytest
from german_english.clauses import MODALS, NOW, PERFECT, PRESENT, PRETERITE, RESULT, Clause, Part, acc_part
from german_english.english_clauses import english_main, english_question
from german_english.german_clauses import german_infinitive, german_main, german_question, german_subordinate
from german_english.lexicon.nouns import simple
from german_english.lexicon.verbs import VERBS
from german_english.numbers import clock, number_words
from german_english.phrases import NounPhrase


@pytest.fixture
def opening():
    """Der Lehrer macht das Fenster auf."""
    teacher = NounPhrase(simple("Lehrer"))
    window = acc_part(NounPhrase(simple("Fenster")))
    return Clause(teacher, VERBS["aufmachen"], PRETERITE, (window,))


def test_separable_verb(opening):
    assert german_main(opening) == "der Lehrer machte das Fenster auf"
    assert german_subordinate(opening, "weil") == "weil der Lehrer das Fenster aufmachte"
    assert german_infinitive(opening, "um") == "um das Fenster aufzumachen"
    perfect = replace(opening, tense=PERFECT)
    assert german_main(perfect) == "der Lehrer hat das Fenster aufgemacht"
    assert german_subordinate(perfect, "dass") == "dass der Lehrer das Fenster aufgemacht hat"


def test_verb_second(opening):
    time = Part("time", "gestern", "yesterday")
    clause = opening.with_parts(time)
    assert german_main(clause, time) == "gestern machte der Lehrer das Fenster auf"
    assert english_main(clause, time) == "yesterday the teacher opened the window"
    assert german_main(clause) == "der Lehrer machte gestern das Fenster auf"
    assert english_main(clause) == "the teacher opened the window yesterday"


def test_negation_modal_and_question(opening):
    denied = replace(opening, negated=True)
    assert german_main(denied) == "der Lehrer machte das Fenster nicht auf"
    assert english_main(denied) == "the teacher did not open the window"
    modal = replace(opening, tense=PRESENT, modal=MODALS["müssen"])
    assert german_question(modal) == "muss der Lehrer das Fenster aufmachen"
    assert english_question(modal) == "does the teacher have to open the window"
    can = replace(modal, modal=MODALS["können"], negated=True)
    assert english_main(can) == "the teacher cannot open the window"


def test_passive():
    window = NounPhrase(simple("Fenster"))
    clause = Clause(window, VERBS["aufmachen"], RESULT, passive=True)
    assert german_main(clause) == "das Fenster ist aufgemacht worden"
    assert english_main(clause) == "the window has been opened"
    now = replace(clause, tense=NOW)
    assert (german_main(now), english_main(now)) == (
        "das Fenster wird aufgemacht",
        "the window is being opened",
    )


def test_reflexive_precedes_a_full_subject():
    teacher = NounPhrase(simple("Lehrer"))
    clause = Clause(teacher, VERBS["ausruhen"], PERFECT, (Part("reflexive", "sich", ""),))
    assert german_subordinate(clause, "weil") == "weil sich der Lehrer ausgeruht hat"
    assert german_main(clause) == "der Lehrer hat sich ausgeruht"


def test_numbers_and_clock():
    assert number_words(21) == ("einundzwanzig", "twenty-one")
    assert number_words(70) == ("siebzig", "seventy")
    assert clock(7, "half") == ("halb acht", "half past seven")
    assert clock(12, "half") == ("halb eins", "half past twelve")
    assert clock(1, "full") == ("ein Uhr", "one o'clock")
