"""Times and other adverbs at random."""

from .clauses import Part
from .dice import Dice
from .lexicon.adverbs import (
    COMMENTS,
    DISTANT_FUTURE_TIMES,
    DISTANT_PAST_TIMES,
    FREQUENCIES,
    FUTURE_TIMES,
    HABIT_TIMES,
    PAST_TIMES,
    WEEKDAYS,
)
from .lexicon.entries import Frame, Pair
from .numbers import CLOCK_FORMS, clock

# Verbs of the daily round: when, and between which hours.
DAILY = {
    "aufstehen": ("jeden Morgen", "every morning", 5, 9),
    "aufwachen": ("jeden Morgen", "every morning", 4, 8),
    "einschlafen": ("jeden Abend", "every evening", 8, 11),
}


def draw_time(dice: Dice, past: bool, distant: bool = False) -> Part:
    near, far = (PAST_TIMES, DISTANT_PAST_TIMES) if past else (FUTURE_TIMES, DISTANT_FUTURE_TIMES)
    if dice.chance(0.15):
        german, english = dice.pick(list(WEEKDAYS.items()))
        return Part("time", f"{'letzten' if past else 'nächsten'} {german}", f"{'last' if past else 'next'} {english}")
    times = {de: en for de, en in near.items() if "Stunde" not in de and "Minuten" not in de} | far if distant else near
    german, english = dice.pick(list(times.items()))
    if german in ("morgen", "gestern", "übermorgen") and dice.chance(0.3):
        clock_de, clock_en = clock(dice.randint(1, 12), dice.pick(CLOCK_FORMS))
        return Part("time", f"{german} um {clock_de}", f"at {clock_en} {english}")
    return Part("time", german, english)


def habit_time(dice: Dice, frame: Frame) -> Part:
    """Every so often; one gets up or falls asleep once a day."""
    if frame.verb in DAILY:
        return daily_time(dice, frame, *DAILY[frame.verb][:2])
    if dice.chance(0.2):
        german, english = dice.pick(list(WEEKDAYS.items()))
        return Part("time", f"jeden {german}", f"every {english}")
    return Part("time", *dice.pick(list(HABIT_TIMES.items())))


def daily_time(dice: Dice, frame: Frame, day_de: str, day_en: str) -> Part:
    clock_de, clock_en = clock(dice.randint(*DAILY[frame.verb][2:]), dice.pick(CLOCK_FORMS))
    return Part("time", f"{day_de} um {clock_de}", f"at {clock_en} {day_en}")


def draw_frequency(dice: Dice) -> Part:
    german, english = dice.pick(list(FREQUENCIES.items()))
    return Part("frequency", german, english)


def draw_comment(dice: Dice) -> Part:
    german, english = dice.pick(list(COMMENTS.items()))
    return Part("comment", german, english)


def clock_part(dice: Dice) -> Part:
    german, english = clock(dice.randint(1, 12), dice.pick(CLOCK_FORMS))
    return Part("time", f"um {german}", f"at {english}")


def day_clock(dice: Dice, past: bool) -> Pair:
    part = clock_part(dice)
    german, english = ("gestern", "yesterday") if past else ("morgen", "tomorrow")
    return f"{german} {part.de}", f"{part.en} {english}"
