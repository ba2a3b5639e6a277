"""Adverbs and phrases of time, manner and frequency."""

MANNERS = {
    "schnell": "quickly",
    "lange": "for a long time",
    "langsam": "slowly",
    "vorsichtig": "cautiously",
    "sorgfältig": "carefully",
    "gründlich": "thoroughly",
    "leise": "quietly",
    "laut": "loudly",
    "heimlich": "secretly",
    "fleißig": "diligently",
    "geduldig": "patiently",
    "höflich": "politely",
    "ruhig": "calmly",
    "gut": "well",
}
# Sentence adverbs: clause-medial or fronted in German, always fronted in English.
COMMENTS = {
    "leider": "unfortunately,",
    "vielleicht": "perhaps",
    "hoffentlich": "hopefully,",
    "wahrscheinlich": "probably",
    "natürlich": "of course,",
    "zum Glück": "luckily,",
    "offenbar": "apparently,",
    "vermutlich": "presumably,",
}
# Times within a day or so, and further ones.
PAST_TIMES = {
    "gestern": "yesterday",
    "vorgestern": "the day before yesterday",
    "gestern Abend": "yesterday evening",
    "gestern Morgen": "yesterday morning",
    "gestern Nachmittag": "yesterday afternoon",
    "vor einer Stunde": "an hour ago",
    "vor einer halben Stunde": "half an hour ago",
    "vor zwei Tagen": "two days ago",
    "am Wochenende": "at the weekend",
    "vor dem Mittagessen": "before lunch",
    "nach der Arbeit": "after work",
    "am Montagmorgen": "on Monday morning",
    "am Freitagabend": "on Friday evening",
}
DISTANT_PAST_TIMES = {
    "letzte Woche": "last week",
    "letzten Monat": "last month",
    "letztes Jahr": "last year",
    "letzten Sommer": "last summer",
    "letzten Herbst": "last autumn",
    "vor drei Wochen": "three weeks ago",
    "vor vier Monaten": "four months ago",
    "vor einem Jahr": "a year ago",
    "vor Weihnachten": "before Christmas",
    "im Mai": "in May",
    "im September": "in September",
}
FUTURE_TIMES = {
    "morgen": "tomorrow",
    "übermorgen": "the day after tomorrow",
    "morgen Abend": "tomorrow evening",
    "morgen Nachmittag": "tomorrow afternoon",
    "heute Abend": "this evening",
    "heute Nachmittag": "this afternoon",
    "in einer Stunde": "in an hour",
    "in zehn Minuten": "in ten minutes",
    "bald": "soon",
    "später": "later",
    "nach dem Abendessen": "after dinner",
}
DISTANT_FUTURE_TIMES = {
    "nächste Woche": "next week",
    "nächsten Monat": "next month",
    "nächstes Jahr": "next year",
    "nächsten Sommer": "next summer",
    "in drei Tagen": "in three days",
    "in zwei Wochen": "in two weeks",
    "in einem Monat": "in a month",
    "nach den Ferien": "after the holidays",
}
HABIT_TIMES = {
    "jeden Tag": "every day",
    "jeden Morgen": "every morning",
    "jeden Abend": "every evening",
    "jede Woche": "every week",
    "jedes Wochenende": "every weekend",
    "abends": "in the evening",
    "morgens": "in the morning",
    "nach der Arbeit": "after work",
    "einmal in der Woche": "once a week",
    "zweimal im Monat": "twice a month",
    "im Sommer": "in summer",
    "im Winter": "in winter",
}
WEEKDAYS = {
    "Montag": "Monday",
    "Dienstag": "Tuesday",
    "Mittwoch": "Wednesday",
    "Donnerstag": "Thursday",
    "Freitag": "Friday",
    "Samstag": "Saturday",
    "Sonntag": "Sunday",
}
FREQUENCIES = {
    "oft": "often",
    "immer": "always",
    "manchmal": "sometimes",
    "selten": "rarely",
    "nie": "never",
    "meistens": "usually",
    "normalerweise": "normally",
    "regelmäßig": "regularly",
    "häufig": "frequently",
    "gelegentlich": "occasionally",
}
FRONTABLE_FREQUENCIES = ("manchmal", "meistens", "normalerweise", "gelegentlich")
