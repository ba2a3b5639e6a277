"""Questions, direct and indirect."""

from dataclasses import replace

from ..activities import INTENDED, activity
from ..clauses import FUTURE, MODALS, NOW, PERFECT, PRESENT, RESULT, Clause, Part, acc_part
from ..dice import Dice
from ..english_clauses import english_question
from ..german_clauses import german_question
from ..lexicon.entries import Pair
from ..lexicon.verbs import VERBS
from ..nominals import apart, someone
from ..phrases import WHICH, Nominal, NounPhrase
from ..pronouns import ER, ICH, SECOND_PERSON, WHO, WIR
from .reported import thinker
from .sentence import Sentence, main_pair, subordinate_pair, with_dependent


def question(dice: Dice) -> Sentence:
    subject = dice.pick(SECOND_PERSON) if dice.chance(0.6) else someone(dice)
    clause = activity(dice, subject, INTENDED, ("past", "future", "now", "habit", "modal", "result", "gern"))
    kind = dice.pick(("yes", "yes", "yes", "yes", "when", "why", "where", "object", "who", "which", "whom"))
    if clause.denies:
        return question_why(clause)
    return question_who(dice) if kind == "who" else KINDS[kind](clause)


def question_pair(clause: Clause, german: str = "", english: str = "") -> Pair:
    """The question in both languages, opened by the finite verb or a question word."""
    return german_question(clause, german), english_question(clause, english)


def question_word(asked: Nominal) -> Pair:
    """Whom or what."""
    human = not isinstance(asked, NounPhrase) or asked.noun.human
    return ("wen", "who") if human else ("was", "what")


def question_yes(clause: Clause) -> Sentence:
    return ask(clause)


def ask(clause: Clause, german: str = "", english: str = "") -> Sentence:
    return Sentence(*question_pair(clause, german, english), "?")


def question_when(clause: Clause) -> Sentence:
    past = clause.tense.english == "past"
    timeless = clause.without_roles("time", "now", "aspect", "frequency")
    modal = clause.modal if clause.modal and clause.modal.de else None
    tense = clause.tense if past or modal else FUTURE
    return ask(replace(timeless, tense=tense, modal=modal), "wann", "when")


def question_why(clause: Clause) -> Sentence:
    return ask(clause, "warum", "why")


def question_where(clause: Clause) -> Sentence:
    place = clause.part("place", "goal")
    if place is None or (place.role == "goal" and clause.verb.de not in ("gehen", "fahren", "fliegen", "reisen")):
        return question_why(clause)
    return ask(clause.without(place), "wo" if place.role == "place" else "wohin", "where")


def question_object(clause: Clause) -> Sentence:
    acc = clause.direct_object()
    if acc is None:
        return question_when(clause)
    return ask(clause.without(acc), *question_word(acc.nominal))


def question_whom(clause: Clause) -> Sentence:
    dat = clause.part("dat")
    if dat is None or clause.has("acc") or dat.preposition[1]:
        return question_object(clause)
    return ask(clause.without(dat), "wem", "who")


def question_which(clause: Clause) -> Sentence:
    acc = clause.direct_object()
    if acc is None or not isinstance(acc.nominal, NounPhrase) or acc.nominal.noun.human or acc.nominal.noun.mass:
        return question_why(clause)
    which = NounPhrase(acc.nominal.noun, WHICH, acc.nominal.plural, acc.nominal.adjectives[:1])
    return ask(clause.without(acc), which.german("acc"), which.english())


def question_who(dice: Dice) -> Sentence:
    frames = [f for f in INTENDED if not f.reflexive and f.det != "own"]
    clause = activity(dice, WHO, frames, ("past", "future", "modal", "result"))
    return Sentence(*main_pair(clause), "?")


KINDS = {
    "yes": question_yes,
    "when": question_when,
    "why": question_why,
    "where": question_where,
    "object": question_object,
    "which": question_which,
    "whom": question_whom,
}


def indirect_question(dice: Dice) -> Sentence:
    topic = someone(dice, third=True)
    while topic in (ICH, WIR):
        topic = someone(dice, third=True)
    clause = activity(dice, topic, INTENDED, ("past", "future", "modal", "result", "now"))
    wh = ("ob", "whether")
    kind = "why" if clause.denies else dice.pick(("ob", "when", "why", "where", "object"))
    if kind == "when":
        clause = clause.without_roles("time", "now", "aspect")
        wh = ("wann", "when")
    elif kind == "why":
        wh = ("warum", "why")
    elif kind == "where":
        place = clause.part("place")
        if place:
            clause, wh = clause.without(place), ("wo", "where")
    elif kind == "object":
        acc = clause.direct_object()
        if acc:
            clause, wh = clause.without(acc), question_word(acc.nominal)
    if kind == "when" and clause.tense in (NOW, RESULT):
        clause = replace(clause, tense=FUTURE)
    return embed_question(dice, clause, wh)


def embed_question(dice: Dice, clause: Clause, wh: Pair) -> Sentence:
    """Wrap an indirect question into a statement or a question."""
    dependent = subordinate_pair(clause, wh)
    kind = dice.pick(("unknown", "know", "tell", "wonder", "want", "asked"))
    if kind == "know":
        asked = dice.pick(SECOND_PERSON)
        matrix = Clause(asked, VERBS["wissen"], PRESENT)
        return with_dependent(question_pair(matrix), dependent, "?")
    if kind == "tell":
        asked = dice.pick(SECOND_PERSON)
        parts = (Part("dat", "mir", "me", light=True),)
        matrix = Clause(asked, replace(VERBS["sagen"], en=VERBS["erzählen"].en), PRESENT, parts, MODALS["können"])
        return with_dependent(question_pair(matrix), dependent, "?")
    who = thinker(dice, clause.subject)
    if kind == "unknown":
        matrix = Clause(who, VERBS["wissen"], PRESENT, negated=True)
    elif kind == "wonder":
        parts = (Part("reflexive", who.ref.reflexive[0] if who.ref else "sich", ""),)
        matrix = Clause(who, VERBS["fragensich"], PRESENT, parts)
    elif kind == "want":
        matrix = Clause(who, VERBS["wissen"], PRESENT, modal=MODALS["möchten"])
    else:
        listener = dice.pick([p for p in (ICH, WIR) if apart(p, who)] or [ER])
        matrix = Clause(who, VERBS["fragen"], PERFECT, (acc_part(listener),))
    return with_dependent(main_pair(matrix), dependent)
