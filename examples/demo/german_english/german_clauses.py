"""German word order."""

from dataclasses import replace

from .clauses import Clause, Part, join
from .german import HABEN, SEIN, WERDEN, german_present, german_preterite, zu_infinitive

# Order of the German middle field; "not" stands between definite objects and the rest.
GERMAN_ORDER = (
    *("reflexive", "acc-light", "dat-light", "comment", "cause", "time", "now", "frequency", "dat", "acc", "not"),
    *("aspect", "manner", "company", "place", "acc-new", "fixed", "pp", "goal", "predicate"),
)


def german_verbs(clause: Clause) -> tuple[str, str, list[str]]:
    """Finite verb, its stranded prefix, and the non-finite verbs in final order."""
    verb, tail = clause.verb, []
    if clause.passive:
        tail, verb = [verb.participle], replace(WERDEN, participle="worden")
    if clause.modal and clause.modal.de:
        tail, verb = [*tail, verb.infinitive], clause.modal.de
    tense = clause.tense.german
    if tense in ("perfect", "pluperfect"):
        tail = [*tail, verb.participle]
        verb = SEIN if verb.perfect_with_sein else HABEN
        tense = "present" if tense == "perfect" else "preterite"
    elif tense == "future":
        tail, verb, tense = [*tail, verb.infinitive], WERDEN, "present"
    conjugate = german_present if tense == "present" else german_preterite
    return conjugate(verb, clause.subject.person, clause.subject.plural), verb.prefix, tail


def german_role(part: Part) -> str:
    if part.role in ("acc", "dat") and part.light:
        return part.role + "-light"
    if part.role == "acc" and not part.definite:
        return "acc-new"
    return part.role


def middle_field(clause: Clause) -> list[str]:
    words = [(GERMAN_ORDER.index(german_role(p)), p.de) for p in clause.parts]
    if clause.negated:
        words.append((GERMAN_ORDER.index("not"), "nicht"))
    return [de for _, de in sorted(words, key=lambda item: item[0]) if de]


def subject_and_field(clause: Clause) -> list[str]:
    """Subject and middle field after the verb or a conjunction; sich precedes a subject that is no pronoun."""
    reflexive = clause.part("reflexive")
    subject = clause.subject.german("nom")
    if reflexive is None or clause.subject.light:
        return [subject, *middle_field(clause)]
    return [reflexive.de, subject, *middle_field(clause.without(reflexive))]


def german_main(clause: Clause, front: Part | None = None) -> str:
    """Verb second: the subject or ``front`` opens the clause."""
    finite, prefix, tail = german_verbs(clause)
    if front is None:
        return join(clause.subject.german("nom"), finite, *middle_field(clause), *tail, prefix)
    return join(front.de, finite, *subject_and_field(clause.without(front)), *tail, prefix)


def german_question(clause: Clause, wh: str = "") -> str:
    """Verb first, or second after a question word."""
    finite, prefix, tail = german_verbs(clause)
    return join(wh, finite, *subject_and_field(clause), *tail, prefix)


def german_subordinate(clause: Clause, opening: str, subject: bool = True) -> str:
    """Verb last, after a conjunction, a relative pronoun or a question word."""
    finite, prefix, tail = german_verbs(clause)
    field = subject_and_field(clause) if subject else middle_field(clause)
    return join(opening, *field, *tail, prefix + finite)


def german_infinitive(clause: Clause, opening: str = "") -> str:
    return join(opening, *middle_field(clause), zu_infinitive(clause.verb))
