"""English word order."""

from .clauses import Clause, Part, join
from .english import BE, DO, HAVE, WILL, english_finite, ing_form

ENGLISH_ORDER = (
    *("particle", "dat", "acc", "late-particle", "dat-to", "fixed", "predicate", "manner", "pp", "goal", "company"),
    *("place", "cause", "now", "aspect", "time"),
)
ENGLISH_MIDDLE = {"often", "always", "sometimes", "rarely", "never", "usually", "normally", "regularly", "frequently"}
ENGLISH_MIDDLE |= {"occasionally", "ever", "already", "just", "probably", "still"}
LATE_PARTICLES = frozenset({"back", "along", "away", "out"})


def english_verbs(clause: Clause, inverted: bool = False) -> tuple[str, bool, list[str]]:
    """Finite verb, whether it is an auxiliary, and the rest; "do" where negation or inversion asks for it."""
    verb, tail = clause.verb.en, []
    if clause.passive:
        tail, verb = [verb.participle], BE
    if clause.modal:
        tail, verb = [*clause.modal.link, verb.base, *tail], clause.modal.en
    tense = clause.tense.english
    if clause.tense.progressive and not clause.modal:
        tail, verb = [ing_form(verb.base), *tail], BE
    elif tense in ("perfect", "pluperfect"):
        tail, verb = [verb.participle, *tail], HAVE
    elif tense == "future" and not clause.modal:
        tail, verb = [verb.base, *tail], WILL
    past = tense in ("past", "pluperfect")
    auxiliary = verb.auxiliary or verb.base == "be"
    if not auxiliary and (clause.denies or inverted):
        tail, verb, auxiliary = [verb.base, *tail], DO, True
    return english_finite(verb, clause.subject.en_person, past), auxiliary, tail


def english_role(part: Part) -> str:
    if part.role == "dat" and part.preposition[1]:
        return "dat-to"
    if part.role in ENGLISH_ORDER:
        return part.role
    return "time" if part.role == "frequency" else ""


def english_rest(clause: Clause) -> list[str]:
    """Everything after the verbs."""
    words = [(ENGLISH_ORDER.index(english_role(p)), p.en) for p in clause.parts if not is_middle(p) and english_role(p)]
    particle = clause.verb.en.particle
    if particle:
        acc = clause.part("acc")
        late = acc is not None and (acc.light or particle in LATE_PARTICLES)
        words.append((ENGLISH_ORDER.index("late-particle" if late else "particle"), particle))
    return [en for _, en in sorted(words, key=lambda item: item[0]) if en]


def is_middle(part: Part) -> bool:
    return part.en in ENGLISH_MIDDLE and part.role in ("frequency", "aspect", "comment")


def english_main(clause: Clause, front: Part | None = None, subject: bool = True) -> str:
    comment = next((p for p in clause.parts if p.role == "comment" and not is_middle(p)), None)
    opening = ""
    if front and not is_middle(front) and front.role not in ("acc", "dat", "comment"):
        clause = clause.without(front)
        opening = front.en + ("," if len(front.en.split()) > 2 else "")
    elif front and front.role == "frequency":
        clause = clause.without(front)
        opening = front.en
    finite, auxiliary, tail = english_verbs(clause)
    middle = [p.en for p in clause.parts if is_middle(p)]
    negation = ["not"] if clause.denies else []
    if finite == "can" and negation:
        finite, negation = "cannot", []
    verbs = [finite, *negation, *middle, *tail] if auxiliary else [*middle, finite, *tail]
    who = clause.subject.english(subject=True) if subject else ""
    return join(comment.en if comment else "", opening, who, *verbs, *english_rest(clause))


def english_question(clause: Clause, wh: str = "") -> str:
    finite, _, tail = english_verbs(clause, inverted=True)
    middle = [p.en for p in clause.parts if is_middle(p)]
    negation = ["not"] if clause.denies else []
    who = clause.subject.english(subject=True)
    return join(wh, finite, who, *negation, *middle, *tail, *english_rest(clause))


def english_infinitive(clause: Clause, opening: str = "to") -> str:
    return join(opening, clause.verb.en.base, *english_rest(clause))


def english_gerund(clause: Clause, opening: str = "") -> str:
    return join(opening, ing_form(clause.verb.en.base), *english_rest(clause))
