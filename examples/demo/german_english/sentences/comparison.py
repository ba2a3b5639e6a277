"""Comparatives and superlatives."""

from ..activities import draw_place
from ..clauses import PRESENT, PRETERITE, RESULT, Clause, Part, place_part, pred
from ..dice import Dice
from ..english_clauses import english_main
from ..german import SEIN
from ..german_clauses import german_main, german_subordinate
from ..lexicon.adjectives import ADJECTIVES, COLOURS
from ..lexicon.entries import Adjective
from ..lexicon.pools import POOLS
from ..lexicon.verbs import VERBS
from ..nominals import OWNED_KINDS, draw_adjectives, draw_noun, draw_relation, someone, with_owner
from ..phrases import THE, THIS, NounPhrase, possessive
from ..pronouns import DU, ES_DAS, ICH
from .relative import relative_pronoun
from .sentence import Sentence, plain

COMPARABLE = [a for a in ADJECTIVES if a.de_comparative]
EVER = {"text": "lesen", "show": "sehen", "building": "sehen", "food": "essen"}


def comparison(dice: Dice) -> Sentence:
    adjective = dice.pick(COMPARABLE)
    kinds = [k for k in adjective.kinds if adjective.de != "neu" or k != "staff"]
    kind = dice.pick([k for k in kinds if len(POOLS[k]) > 2] or kinds)
    first, second = compared(dice, kind, adjective), compared(dice, kind, adjective)
    while second.noun is first.noun or second.noun.mass != first.noun.mass:
        if len(POOLS[kind]) < 3:
            return superlative(dice)
        first, second = compared(dice, kind, adjective), compared(dice, kind, adjective)
    tense = dice.pick((PRESENT, PRESENT, PRETERITE))
    sort = dice.pick(("more", "more", "much", "as", "not-as", "superlative", "superlative"))
    if sort == "superlative":
        return superlative(dice)
    than = second.german("nom"), second.english()
    if sort in ("more", "much"):
        much = ("viel ", "much ") if sort == "much" else ("", "")
        predicate = pred(
            f"{much[0]}{adjective.de_comparative} als {than[0]}",
            f"{much[1]}{adjective.en_comparative} than {than[1]}",
        )
    else:
        so = "so" if sort == "not-as" else "genauso"
        as_ = "as" if sort == "not-as" else "just as"
        predicate = pred(f"{so} {adjective.de} wie {than[0]}", f"{as_} {adjective.en} as {than[1]}")
    clause = Clause(first, SEIN, tense, (predicate,), negated=sort == "not-as")
    return plain(clause)


def compared(dice: Dice, kind: str, adjective: Adjective) -> NounPhrase:
    if POOLS[kind][0].human:
        if kind == "person" and dice.chance(0.4):
            return draw_relation(dice, possessive(dice.pick((ICH, DU))), plural=0)
        noun = draw_noun(dice, kind)
        return NounPhrase(noun, THE)
    noun = draw_noun(dice, kind)
    det = dice.weighted({THE: 4, THIS: 2})
    others = tuple(a for a in draw_adjectives(dice, noun, 0.25) if a is not adjective and a.de in COLOURS)
    phrase = NounPhrase(noun, det, not noun.mass and dice.chance(0.12), others)
    return with_owner(dice, phrase) if det is THE and noun.kind in OWNED_KINDS and dice.chance(0.3) else phrase


def superlative(dice: Dice) -> Sentence:
    adjective = dice.pick([a for a in COMPARABLE if a.de != "neu" and not EVER.keys().isdisjoint(a.kinds)])
    kind = dice.pick([k for k in adjective.kinds if k in EVER])
    noun = draw_noun(dice, kind)
    head = NounPhrase(noun, THE, adjectives=(adjective,), degree="superlative")
    who = someone(dice)
    if dice.chance(0.25) and kind == "building":
        place = place_part(draw_place(dice, "city country"), "place")
        predicate = pred(f"{head.german('nom')} {place.de}", f"{head.english()} {place.en}")
        main = Clause(ES_DAS, SEIN, PRESENT, (predicate,))
        return plain(main)
    relative = Clause(who, VERBS[EVER[kind]], RESULT, (Part("aspect", "je", "ever"),))
    german = german_subordinate(relative, relative_pronoun(head, "acc"))
    main = Clause(ES_DAS, SEIN, PRESENT, (pred(head.german("nom"), head.english()),))
    return Sentence(f"{german_main(main)}, {german}", f"{english_main(main)} that {english_main(relative)}")
