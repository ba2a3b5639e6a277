"""What somebody says, thinks or finds, with dass."""

from ..activities import activity, present_or_past
from ..clauses import PERFECT, PRESENT, Clause, Tense, dat_part, pred
from ..dice import Dice
from ..german import SEIN
from ..lexicon.verbs import VERBS
from ..nominals import apart, different, someone
from ..phrases import Nominal
from ..pronouns import ER, ES, ICH, WIR
from .sentence import Sentence, main_pair, subordinate_pair, with_dependent

EVALUATIONS = (
    ("schade", "a pity"),
    ("möglich", "possible"),
    ("seltsam", "strange"),
    ("schön", "nice"),
    ("gut", "good"),
    ("klar", "clear"),
)


def reported(dice: Dice) -> Sentence:
    """dass after verbs of saying and thinking."""
    kind = dice.pick(("opinion", "speech", "evaluation", "hope", "sure"))
    topic = someone(dice)
    if kind == "hope":
        clause = present_or_past(dice, topic, ("future",), False)
        return report(dice, thinker(dice, topic), "hoffen", PRESENT, clause)
    if kind == "speech":
        speaker = thinker(dice, topic)
        clause = activity(dice, topic, moods=("past", "modal"))
        while clause.tense.english != "past":
            clause = activity(dice, topic, moods=("past", "modal"))
        verb = dice.pick(("sagen", "erzählen"))
        return report(dice, speaker, verb, PERFECT, clause)
    clause = activity(dice, topic)
    if kind == "opinion":
        return report(dice, thinker(dice, topic), dice.pick(("glauben", "wissen", "denken")), PRESENT, clause)
    if kind == "sure":
        who = thinker(dice, topic)
        matrix = Clause(who, SEIN, PRESENT, (pred("sicher", "sure"),))
        return report_clause(matrix, clause)
    german, english = dice.pick(EVALUATIONS[:3] if clause.denies else EVALUATIONS)
    return report_clause(Clause(ES, SEIN, PRESENT, (pred(german, english),)), clause)


def thinker(dice: Dice, topic: Nominal) -> Nominal:
    who = different(lambda: someone(dice, third=True), topic)
    return ICH if who.ref is topic.ref and not topic.light else who


def report(dice: Dice, who: Nominal, verb: str, tense: Tense, clause: Clause) -> Sentence:
    parts = ()
    if verb == "erzählen":
        listener = dice.pick([p for p in (ICH, WIR) if apart(p, who)] or [ER])
        parts = (dat_part(listener),)
    return report_clause(Clause(who, VERBS[verb], tense, parts), clause)


def report_clause(matrix: Clause, clause: Clause) -> Sentence:
    return with_dependent(main_pair(matrix), subordinate_pair(clause, ("dass", "that")))
