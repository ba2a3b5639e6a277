"""Numbers and times of day in words."""

from .lexicon.entries import Pair

NUMBERS = {
    "zwei": "two",
    "drei": "three",
    "vier": "four",
    "fünf": "five",
    "sechs": "six",
    "sieben": "seven",
    "acht": "eight",
    "neun": "nine",
    "zehn": "ten",
    "elf": "eleven",
    "zwölf": "twelve",
}
TENS = {
    "zwanzig": "twenty",
    "dreißig": "thirty",
    "vierzig": "forty",
    "fünfzig": "fifty",
    "sechzig": "sixty",
    "siebzig": "seventy",
    "achtzig": "eighty",
    "neunzig": "ninety",
}
CLOCK_FORMS = ("full", "full", "half", "quarter past", "quarter to", "ten past", "twenty to")


def clock(hour: int, minutes: str) -> Pair:
    """A time of day: half past seven is halb acht."""
    names = ["", "eins", *NUMBERS]
    english = ["", "one", *NUMBERS.values()]
    following = hour % 12 + 1
    return {
        "full": (f"{'ein' if hour == 1 else names[hour]} Uhr", f"{english[hour]} o'clock"),
        "half": (f"halb {names[following]}", f"half past {english[hour]}"),
        "quarter past": (f"Viertel nach {names[hour]}", f"a quarter past {english[hour]}"),
        "quarter to": (f"Viertel vor {names[following]}", f"a quarter to {english[following]}"),
        "ten past": (f"zehn nach {names[hour]}", f"ten past {english[hour]}"),
        "twenty to": (f"zwanzig vor {names[following]}", f"twenty to {english[following]}"),
    }[minutes]


def number_words(value: int) -> Pair:
    """20 to 99: einundzwanzig, twenty-one."""
    tens_de, tens_en = list(TENS.items())[value // 10 - 2]
    ones = value % 10
    if not ones:
        return tens_de, tens_en
    names = ["ein", *NUMBERS], ["one", *NUMBERS.values()]
    return f"{names[0][ones - 1]}und{tens_de}", f"{tens_en}-{names[1][ones - 1]}"
