"""The demo corpus: each German construction occurs often enough, and every time with the English that answers it."""

import re

import pytest
from german_english.clauses import MODALS, place_part
from german_english.english import ing_form, third_singular
from german_english.german import german_imperative, german_present, german_preterite, zu_infinitive
from german_english.lexicon.adjectives import ADJECTIVES
from german_english.lexicon.adverbs import (
    DISTANT_FUTURE_TIMES,
    DISTANT_PAST_TIMES,
    FUTURE_TIMES,
    HABIT_TIMES,
    PAST_TIMES,
    WEEKDAYS,
)
from german_english.lexicon.names import FEMALE_NAMES, MALE_NAMES
from german_english.lexicon.places import PLACES
from german_english.lexicon.verbs import VERBS
from german_english.numbers import CLOCK_FORMS, clock

ALL_VERBS = list(VERBS.values())
SLOTS = [(person, plural) for plural in (False, True) for person in (1, 2, 3)]


def finite_forms(verb):
    """Without the prefix: present, preterite and imperative."""
    forms = {conjugate(verb, *where) for where in SLOTS for conjugate in (german_present, german_preterite)}
    return forms | {german_imperative(verb)}


def english_forms(verb):
    en = verb.en
    forms = {en.base, en.past, en.participle, third_singular(en.base), ing_form(en.base)}
    return forms | {"am", "is", "are", "was", "were"} if en.base == "be" else forms


FINITE = {v.prefix + form for v in ALL_VERBS for form in finite_forms(v)}
FINITE |= {form for modal in MODALS.values() if modal.de for form in finite_forms(modal.de)}
FIRST = {form for v in ALL_VERBS for form in finite_forms(v)} | FINITE  # in the first or second place


def words(text):
    return re.findall(r"[\w-]+", text)


def share(hits, pairs):
    return 100 * len(hits) / len(pairs)


def answers(verbs, en):
    """Whether a form of one of the verbs stands in an English sentence."""
    found = set(words(en.lower()))
    return any(english_forms(v) & found for v in verbs)


# German pattern, the English pattern of every hit, and the least share of the sentences in percent.
PATTERNS = {
    "kann": (r"\b([Kk]ann(st)?|[Kk]önnen|[Kk]önnt|[Kk]onnte\w*)\b", r"\b([Cc]an|[Cc]annot|[Cc]ould)\b", 3),
    "muss": (r"\b([Mm]uss(t)?|[Mm]üssen|[Mm]üsst|[Mm]usste\w*)\b", r"\b(have|has|had) to\b", 4),
    "will": (r"\b([Ww]ill(st)?|[Ww]ollen|[Ww]ollt|[Ww]ollte(n|st|t)?)\b", r"\bwant(s|ed)? to\b", 3),
    "soll": (r"\b([Ss]oll(st)?|[Ss]ollen|[Ss]ollt|[Ss]ollte\w*)\b", r"\b[Ss]hould\b", 0.8),
    "darf": (r"\b([Dd]arf(st)?|[Dd]ürfen|[Dd]ürft|[Dd]urfte\w*)\b", r"\ballowed to\b", 0.2),
    "möchte": (r"\b[Mm]öchte\w*\b", r"\b[Ww]ould\b.* like to\b", 1),
    "future or passive": (r"\b([Ww]ird|[Ww]erden|[Ww]erde|[Ww]irst|[Ww]erdet)\b", r"\b([Ww]ill|being|be)\b", 4),
    "passive of the past": (r"\b(wurde|wurden|worden)\b", r"\b(was|were|been|be)\b", 2),
    "genitive": (r"\b(des|meines|unseres) (\w+ )?\w+(s|en|n)\b", r"\w's\b|s' |\b(of|[Dd]espite) the ", 2),
    "nicht": (r"\bnicht\b", r"\b(not|cannot)\b", 7),
    "kein": (r"\bkein(e|en|em|er|es)?\b", r"\b([Nn]o|[Nn]ot|cannot)\b", 2),
    "indirect question": (r", (ob|wann|warum|wo|was|wen) ", r" (whether|when|why|where|what|who) ", 3),
    "imperative with bitte": (r"^\w+ (Sie )?(\w+ )?bitte ", r"^Please ", 0.5),
    "genauso ... wie": (r"\bgenauso \w+ wie\b", r"\bjust as [\w-]+ as\b", 0.2),
    "nicht so ... wie": (r"\bnicht so \w+ wie\b", r"\bnot as [\w-]+ as\b", 0.1),
    "superlative": (r"^Das ist (der|die|das) \w+ste ", r"^This is the (most [\w-]+|\w+est|best|worst) ", 0.4),
    "formal question": (r"\b[A-Z]\w+ Sie\b.*\?$", r"\byou\b", 0.3),
    "formal object": (r"\w (Ihnen|Ihr(e|en|em|er|es)?)\b", r"\b[Yy]our?\b", 0.4),
    "als with gerade": (r"\bgerade\b.*, als\b|^Als .* gerade\b", r"\b(was|were) .*\w+ing\b", 0.3),
    "noch nicht": (r"\bnoch nicht\b", r"\bnot\b.* yet\b", 0.5),
    "schon": (r"\bschon (oft|zweimal)\b", r"\b(often|twice)\b", 0.1),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern(pairs, name):
    german, english, percent = PATTERNS[name]
    hits = [(de, en) for de, en in pairs if re.search(german, de)]
    assert share(hits, pairs) >= percent
    assert [pair for pair in hits if not re.search(english, pair[1])] == []


CONJUNCTIONS = {
    "weil": "because",
    "dass": "that",
    "obwohl": "although",
    "wenn": "if",
    "ob": "whether",
    "bevor": "before",
    "nachdem": "after",
    "während": "while",
    "sobald": "as soon as",
    "als": "when",
    "wann": "when",
    "warum": "why",
    "wo": "where",
    "was": "what",
    "wen": "who",
}


def test_clauses_after_a_conjunction_end_in_the_verb(pairs):
    hits = []
    for de, en in pairs:
        found = re.search(rf", ({'|'.join(CONJUNCTIONS)}) [^,]* (\w+)[.?!]$", de)
        if found:
            hits.append(de)
            assert f" {CONJUNCTIONS[found[1]]} " in en, (de, en)
            assert found[2] in FINITE, de
    assert share(hits, pairs) >= 15


def test_clauses_before_the_main_clause(pairs):
    hits = []
    for de, en in pairs:
        found = re.match(r"(Weil|Obwohl|Wenn|Bevor|Nachdem|Während|Sobald|Als) [^,]* (\w+), (\w+) ", de)
        if found:
            hits.append(de)
            assert en.startswith(CONJUNCTIONS[found[1].lower()].capitalize() + " "), (de, en)
            assert ", " in en, en
            assert found[2] in FINITE and found[3] in FIRST, de
    assert share(hits, pairs) >= 4


def test_fronted_times(pairs):
    times = PAST_TIMES | DISTANT_PAST_TIMES | FUTURE_TIMES | DISTANT_FUTURE_TIMES | HABIT_TIMES
    for german, english in (("letzten", "last"), ("nächsten", "next"), ("jeden", "every")):
        times |= {f"{german} {day_de}": f"{english} {day_en}" for day_de, day_en in WEEKDAYS.items()}
    hits = []
    for de, en in pairs:
        fits = [t for t in times if de.lower().startswith(t.lower() + " ")]
        if fits and not re.match(r"\w+ um ", de):
            time = max(fits, key=len)
            hits.append(de)
            english = times[time] + ("," if len(times[time].split()) > 2 else "") + " "
            assert en.lower().startswith(english.lower()), (de, en)
            assert de[len(time) + 1 :].split()[0] in FIRST, de
    assert share(hits, pairs) >= 7


def test_separable_verbs_split(pairs):
    prefixes = {v.prefix for v in ALL_VERBS if v.prefix}
    hits = []
    for de, en in pairs:
        for clause in re.findall(r"[^,]+[,.?!]", de):
            *before, last = words(clause.lower())
            if last in prefixes:
                hits.append(de)
                verbs = [v for v in ALL_VERBS if v.prefix == last and finite_forms(v) | {v.de} & set(before)]
                assert answers(verbs, en), (de, en)
    assert share(hits, pairs) >= 3


def test_infinitives_with_zu(pairs):
    forms = {}
    for v in ALL_VERBS:
        forms.setdefault(zu_infinitive(v), []).append(v)
    pattern = re.compile(rf"(, um .*)?\b({'|'.join(sorted(forms, key=len, reverse=True))})[,.?!]")
    hits, purposes = [], []
    for de, en in pairs:
        found = pattern.search(de)
        if found:
            hits.append(de)
            english = [v.en.base for v in forms[found[2]]]
            openings = ["to " + base for base in english]
            if found[1]:
                purposes.append(de)
            else:  # without, instead of, stop
                openings += [ing_form(base) for base in english]
            assert any(o in en.lower() for o in openings), (de, en)
    assert share(hits, pairs) >= 6
    assert share(purposes, pairs) >= 0.6


@pytest.mark.parametrize(("auxiliary", "percent"), [("haben", 15), ("sein", 0.5)])
def test_perfect(pairs, auxiliary, percent):
    """The participle closes the clause, or stands before an auxiliary that does."""
    forms = finite_forms(VERBS[auxiliary])
    participles = {}
    for v in ALL_VERBS:
        if v.perfect_with_sein == (auxiliary == "sein"):
            participles.setdefault(v.participle, []).append(v)
    hits = set()
    for de, en in pairs:
        for clause in re.findall(r"[^,]+[,.?!]", de):
            *before, last = words(clause.lower())
            if last in forms and before:
                last, before = before[-1], [last]
            if last in participles and forms & set(before):
                hits.add(de)
                assert answers(participles[last], en), (de, en)
    assert share(hits, pairs) >= percent


RELATIVE = re.compile(
    r"\w, (?:(?:an|auf|bei|für|mit|nach|über|um|von|vor|zu) )?(?:der|die|das|den|dem|denen|deren|dessen) "
    r"(?:[^,.?!]* )?(\w+) (\w+)[,.?!]"
)


def test_relative_clauses(pairs):
    hits = []
    for de, en in pairs:
        found = RELATIVE.search(de)
        infinitive = found and (found[1] == "zu" or re.search(r"\wzu\w", found[2]))
        if found and not infinitive and found[2] in FINITE:
            hits.append(de)
            assert re.search(r" (who|whom|which|whose|that) ", en), (de, en)
    assert share(hits, pairs) >= 6


AUXILIARIES = "Have Has Had Will Can Could Do Does Did Am Are Is Was Were Should Would"
QUESTION_WORDS = {
    "Wer": "Who",
    "Was": "What",
    "Wann": "When",
    "Wo": "Where",
    "Wohin": "Where",
    "Warum": "Why",
    "Wen": "Who",
    "Wem": "Who",
    "Welche": "Which",
    "Welchen": "Which",
    "Welches": "Which",
}


def test_questions(pairs):
    yes_no, wh = [], []
    for de, en in pairs:
        if de[-1] == "?":
            first, second = words(de)[:2]
            if first in QUESTION_WORDS:
                wh.append(de)
                assert words(en)[0] == QUESTION_WORDS[first], (de, en)
                assert first.startswith("Welch") or second in FIRST, de
            else:
                yes_no.append(de)
                assert first.lower() in FIRST, de
                assert words(en)[0] in AUXILIARIES.split(), (de, en)
    assert share(yes_no, pairs) >= 0.5
    assert share(wh, pairs) >= 2


def test_reflexives(pairs):
    verbs = [VERBS[v] for v in "freuen erinnern interessieren ärgern ausruhen entschuldigen kümmern".split()]
    verbs += [VERBS[v] for v in "unterhalten bewerben beschweren fragensich".split()]
    hits = [(de, en) for de, en in pairs if re.search(r"\bsich\b", de)]
    assert share(hits, pairs) >= 3
    assert [pair for pair in hits if not answers(verbs, pair[1])] == []


@pytest.mark.parametrize(("role", "percent"), [("place", 8), ("goal", 2)])
def test_places(pairs, role, percent):
    """im Garten (dative) is in the garden, in den Garten (accusative) into the garden."""
    parts = [place_part(place, role) for place in PLACES]
    hits = []
    for de, en in pairs:
        for part in parts:
            if re.search(rf"(?i)(?<![\w-]){part.de}\b", de):
                hits.append(de)
                assert part.en.lower() in en.lower(), (de, en)
    assert share(hits, pairs) >= percent


def test_names(pairs):
    titled = named = 0
    for de, en in pairs:
        for title, name in re.findall(r"\b(Frau|Herrn?) ([A-Z]\w+)", de):
            titled += 1
            assert f"{'Ms' if title == 'Frau' else 'Mr'} {name}" in en, (de, en)
        for name in FEMALE_NAMES + MALE_NAMES:
            if re.search(rf"\b{name}s?\b", de):
                named += 1
                assert re.search(rf"\b{name}\b", en), (de, en)
    assert titled >= 0.02 * len(pairs) and named >= 0.05 * len(pairs)


def test_clock(pairs):
    times = dict(clock(hour, form) for hour in range(1, 13) for form in CLOCK_FORMS)
    pattern = re.compile(rf"\b[Uu]m ({'|'.join(sorted(times, key=len, reverse=True))})\b")
    hits = 0
    for de, en in pairs:
        for time in pattern.findall(de):
            hits += 1
            assert f"at {times[time]}" in en.lower(), (de, en)
    assert hits >= 0.01 * len(pairs)


def test_degrees_come_from_the_lexicon(pairs):
    """Every word in front of als in a comparison is the comparative of an adjective."""
    comparatives = {a.de_comparative: a.en_comparative for a in ADJECTIVES if a.de_comparative}
    hits = 0
    for de, en in pairs:
        found = re.search(r"\b(?:ist|sind|war|waren) (?:viel )?(\w+) als\b", de)
        if found:
            hits += 1
            assert f"{comparatives[found[1]]} than" in en, (de, en)
    assert hits >= 0.004 * len(pairs)
