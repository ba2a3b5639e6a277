"""Trains, events, prices, belongings and tastes."""

from dataclasses import replace

from ..activities import draw_place, negate, past_tense
from ..clauses import NOW, PLANNED, PRESENT, PRETERITE, Clause, Part, acc_part, dat_part, place_part
from ..dice import Dice
from ..english_clauses import english_main
from ..german_clauses import german_main, german_subordinate
from ..lexicon.places import PLACES
from ..lexicon.pools import POOLS
from ..lexicon.verbs import VERBS
from ..nominals import draw_adjectives, draw_noun, draw_number, draw_thing, other_person, someone
from ..numbers import NUMBERS, number_words
from ..phrases import MANY, SOME, THE, THIS, A, NounPhrase, possessive, prepositional
from ..pronouns import ES, FORMAL, ICH, WIR
from ..times import clock_part, day_clock, draw_time
from .location import draw_landmark
from .questions import embed_question
from .relative import relative_pronoun, with_relative
from .sentence import Sentence, main_sentence, plain


def schedule(dice: Dice) -> Sentence:
    return dice.pick(KINDS)(dice)


def schedule_train(dice: Dice) -> Sentence:
    noun = draw_noun(dice, "transport")
    place = dice.pick([p for p in PLACES if p.group == "city"])
    head = NounPhrase(noun, THE)
    subject = replace(head, relative=(f" nach {place.name}", f" {place.en_to}"))
    verb = VERBS[dice.pick(("abfahren", "ankommen"))]
    parts = (clock_part(dice),)
    if verb.de == "kommen":
        subject = replace(head, relative=(f" aus {place.name}", f" from {place.en_at.removeprefix('in ')}"))
        late = dice.pick((("pünktlich", "on time"), ("zu spät", "late")))
        parts = parts if dice.chance(0.6) else (Part("time", "gestern", "yesterday"), Part("manner", *late))
    tense = PRETERITE if len(parts) > 1 or dice.chance(0.3) else PLANNED
    clause = Clause(subject, verb, tense, parts)
    if dice.chance(0.4) and len(parts) == 1:
        clause = replace(clause, parts=(Part("time", *day_clock(dice, tense is PRETERITE)),))
    if dice.chance(0.35):
        return embed_question(dice, clause, ("ob", "whether"))
    return main_sentence(dice, clause)


def schedule_event(dice: Dice) -> Sentence:
    subject = NounPhrase(draw_noun(dice, "event exam"), dice.weighted({THE: 4, THIS: 1}))
    kind = dice.pick(("beginnen", "enden", "dauern", "stattfinden"))
    past = dice.chance(0.45)
    tense = PRETERITE if past else PLANNED
    if kind == "dauern":
        german, english = dice.pick(
            (("zwei Stunden", "two hours"), ("drei Stunden", "three hours"), ("eine Stunde", "one hour"))
        )
        parts = (
            Part("goal", german, english),
            Part("time", *(("gestern", "yesterday") if past else ("morgen", "tomorrow"))),
        )
    elif kind == "stattfinden":
        parts = (draw_time(dice, past, True), place_part(draw_place(dice, "venue"), "place"))
    else:
        parts = (Part("time", *day_clock(dice, past)),)
    clause = Clause(subject, VERBS[kind], tense, parts)
    if dice.chance(0.3):
        return embed_question(dice, clause, ("ob", "whether"))
    return main_sentence(dice, clause)


def schedule_price(dice: Dice) -> Sentence:
    subject = draw_thing(dice, "clothes furniture vehicle instrument device text", "the")
    german, english = number_words(dice.randint(20, 99))
    if subject.noun.kind in ("vehicle", "instrument"):
        hundreds = dice.pick(list(NUMBERS)[:8])
        german, english = f"{hundreds}hundert", f"{NUMBERS[hundreds]} hundred"
    past = dice.chance(0.5)
    price = Part("predicate", f"{german} Euro", f"{english} euros")
    clause = Clause(subject, VERBS["kosten"], PRETERITE if past else PRESENT, (price,))
    if dice.chance(0.4):
        buyer = someone(dice)
        relative = Clause(buyer, VERBS["kaufen"], past_tense(dice, buyer), (draw_time(dice, True),))
        pronoun = relative_pronoun(subject, "acc")
        head = NounPhrase(subject.noun, THE, subject.plural, subject.adjectives)
        words = german_subordinate(relative, pronoun), f"which {english_main(relative)}"
        clause = replace(clause, subject=with_relative(head, words), tense=PRETERITE)
    return plain(clause)


def schedule_belonging(dice: Dice) -> Sentence:
    item = draw_thing(dice, "thing vehicle clothes instrument", "the")
    item = replace(item, owner=None, det=THE if item.det is not THIS else THIS)
    owner = other_person(dice, "family person", item)
    clause = Clause(item, VERBS["gehören"], dice.pick((PRESENT, PRESENT, PRETERITE)), (dat_part(owner, "to"),))
    if dice.chance(0.3):
        clause = replace(clause, negated=True)
    return plain(clause)


def schedule_taste(dice: Dice) -> Sentence:
    """Das Bild gefällt meiner Schwester: the German subject is the English object."""
    person = other_person(dice, "family person", ES)
    while not person.definite:
        person = other_person(dice, "family person", ES)
    liked = draw_thing(dice, "art clothes building show song text room", "the", person)
    tense = dice.pick((PRESENT, PRETERITE))
    negated = dice.chance(0.25)
    dative = dat_part(person)
    opens = dice.chance(0.5) and person is not FORMAL  # Ihnen in front would be anybody's
    german = Clause(liked, VERBS["gefallen"], tense, (dative,), negated=negated)
    english = Clause(person, VERBS["gefallen"], tense, (acc_part(liked),), negated=negated)
    if not negated and dice.chance(0.3):
        much = Part("manner", "sehr gut", "very much")
        german, english = german.with_parts(much), english.with_parts(much)
    return Sentence(german_main(german, dative if opens else None), english_main(english))


def schedule_existence(dice: Dice) -> Sentence:
    """es gibt with the accusative."""
    place = place_part(draw_place(dice, "city"), "place")
    noun = draw_noun(dice, "building")
    phrase = NounPhrase(noun, A, False, draw_adjectives(dice, noun, 0.7))
    if dice.chance(0.5):
        phrase = replace(phrase, det=dice.pick((MANY, SOME, draw_number(dice))), plural=True)
    past = dice.chance(0.25)
    tense = PRETERITE if past else PRESENT
    there = replace(ES, en=("there", "there", ""), en_person="they" if phrase.plural else "he")
    clause = Clause(there, VERBS["gebenes"], tense, (acc_part(phrase), place))
    if past:
        clause = clause.with_parts(Part("time", "damals", "at that time"))
    elif phrase.det is A and dice.chance(0.3):
        clause = negate(clause)
    return main_sentence(dice, clause, 0.6)


def schedule_animal(dice: Dice) -> Sentence:
    animal = NounPhrase(dice.pick(POOLS["animal"][:2]), dice.pick((THE, possessive(ICH), possessive(WIR), THIS)))
    animal = replace(animal, adjectives=draw_adjectives(dice, animal.noun))
    spot = draw_landmark(dice, "surface")
    preposition, english = dice.pick((("auf", "on"), ("unter", "under"), ("neben", "next to"), ("hinter", "behind")))
    verb = dice.pick(("schlafen", "liegen", "sitzen"))
    where = Part("place", prepositional(preposition, spot, "dat"), f"{english} {spot.english()}")
    clause = Clause(animal, VERBS[verb], dice.pick((NOW, PRETERITE)), (where,))
    if clause.tense is NOW:
        clause = clause.with_parts(Part("now", "gerade", "right now"))
    elif dice.chance(0.6):
        clause = clause.with_parts(draw_time(dice, True))
    return main_sentence(dice, clause)


KINDS = (
    schedule_train,
    schedule_event,
    schedule_price,
    schedule_belonging,
    schedule_taste,
    schedule_existence,
    schedule_animal,
)
