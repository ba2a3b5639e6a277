"""Compound nouns: Küche and Fenster make Küchenfenster, a kitchen window."""

from .entries import Noun, split_table
from .nouns import SIMPLE_NOUNS, simple

# Modifier with its linking element after a plus sign; a trailing minus clips the final -e (Schule, Schul-).
MODIFIER_TABLE = """
    Küche+n | kitchen
    Schlafzimmer | bedroom
    Wohnzimmer | living room
    Badezimmer | bathroom
    Esszimmer | dining room
    Hotelzimmer | hotel room
    Klasse+n+zimmer | classroom
    Keller | cellar
    Büro | office
    Balkon | balcony
    Garage+n | garage
    Werkstatt | workshop
    Wohnung+s | flat
    Haus | front
    Garten | garden
    Hotel | hotel
    Schule- | school
    Auto | car
    Fahrrad | bicycle
    Motorrad | motorbike
    Holz | wooden
    Leder | leather
    Glas | glass
    Metall | metal
    Stein | stone
    Wolle- | woollen
    Seide+n | silk
    Winter | winter
    Sommer | summer
    Kind+er | children's
    Abenteuer | adventure
    Liebe+s | love
    Kriminal | crime
    Geburtstag+s | birthday
    Weihnacht+s | Christmas
    Familie+n | family
    Abschied+s | farewell
    Geschicht+s | history
    Mathematik | maths
    Biologie | biology
    Physik | physics
    Chemie | chemistry
    Musik | music
    Englisch | English
    Deutsch | German
    Apfel | apple
    Kirsch | cherry
    Pflaume+n | plum
    Schokolade+n | chocolate
    Käse | cheese
    Zitrone+n | lemon
    Gemüse | vegetable
    Kartoffel | potato
    Tomate+n | tomato
    Zwiebel | onion
    Linse+n | lentil
    Gurke+n | cucumber
    Orange+n | orange
    Traube+n | grape
    Reise | travel
    Zeitung+s | newspaper
    Wetter | weather
    Jahr+es | annual
    Kaffee | coffee
    Tee | tea
    Wasser | water
    Blume+n | flower
    Nuss | nut
    Bus | bus
    Taxi | taxi
    Lastwagen | lorry
    Schreibtisch | desk
    Nachttisch | bedside
    Sprache- | language
    Koch | cookery
    Tanz | dance
    Wochenende- | weekend
    Bahnhof+s | station
    Kuchen | cake
    Salat | salad
    Suppe+n | soup
    Wein | wine
"""


def linked(modifier: str) -> str:
    """The form a modifier takes in front of its head: ``Küche+n`` gives ``Küchen``."""
    return modifier[:-2] if modifier.endswith("-") else modifier.replace("+", "")


# kind | head | modifiers; a head written Tür/Schlüssel builds on the compound of the first (Kellertürschlüssel).
COMPOUND_TABLE = """
    door | Tür | Küche+n Schlafzimmer Wohnzimmer Badezimmer Keller Büro Balkon Garage+n Werkstatt Wohnung+s Haus
    door | Fenster | Küche+n Schlafzimmer Wohnzimmer Badezimmer Esszimmer Keller Büro Werkstatt Klasse+n+zimmer
    thing | Tür/Schlüssel | Küche+n Schlafzimmer Badezimmer Keller Büro Balkon Garage+n Werkstatt Wohnung+s Haus
    fitting | Tür/Schloss | Küche+n Badezimmer Keller Büro Balkon Garage+n Werkstatt Wohnung+s Haus
    fitting | Tür/Griff | Küche+n Schlafzimmer Badezimmer Keller Büro Balkon Haus
    thing | Schlüssel | Auto Fahrrad Motorrad Keller Büro Garage+n Hotelzimmer
    furniture | Tisch | Küche+n Wohnzimmer Esszimmer Garten Holz Glas
    furniture | Stuhl | Küche+n Büro Garten Holz
    furniture | Schrank | Küche+n Schlafzimmer Wohnzimmer Badezimmer Büro Holz Keller
    furniture | Regal | Küche+n Wohnzimmer Keller Büro Holz Metall Badezimmer
    furniture | Teppich | Schlafzimmer Wohnzimmer Esszimmer Wolle-
    device | Lampe | Küche+n Schlafzimmer Wohnzimmer Badezimmer Esszimmer Schreibtisch Nachttisch Keller Balkon
    fitting | Uhr | Küche+n Bahnhof+s Büro Wohnzimmer
    fitting | Vorhang | Küche+n Schlafzimmer Wohnzimmer Badezimmer
    fitting | Wand | Küche+n Schlafzimmer Wohnzimmer Badezimmer
    fitting | Reifen | Auto Fahrrad Motorrad
    person | Fahrer | Bus Taxi Lastwagen
    person | Fahrerin | Bus Taxi Lastwagen
    person | Lehrer | Geschicht+s Mathematik Biologie Physik Chemie Musik Englisch Deutsch Tanz
    person | Lehrerin | Geschicht+s Mathematik Biologie Physik Chemie Musik Englisch Deutsch Tanz
    exam | Prüfung | Geschicht+s Mathematik Biologie Physik Chemie Musik Englisch Deutsch
    text | Buch | Geschicht+s Mathematik Biologie Physik Chemie Englisch Kind+er
    text | Artikel | Zeitung+s
    text | Bericht | Reise Wetter Jahr+es
    text | Roman | Abenteuer Liebe+s Kriminal
    text | Geschichte | Abenteuer Liebe+s Weihnacht+s Kind+er
    message | Brief | Liebe+s Abschied+s
    message | Karte | Geburtstag+s Weihnacht+s
    event | Feier | Geburtstag+s Familie+n Abschied+s Weihnacht+s
    event | Fest | Sommer Musik
    event | Konzert | Schule- Weihnacht+s Sommer
    event | Kurs | Sprache- Koch Tanz Deutsch Englisch
    event | Ausflug | Schule- Familie+n Wochenende-
    song | Lied | Weihnacht+s Kind+er Liebe+s
    show | Film | Abenteuer Liebe+s Kriminal Kind+er
    food | Kuchen | Apfel Kirsch Pflaume+n Schokolade+n Käse Zitrone+n Nuss
    food | Suppe | Gemüse Kartoffel Tomate+n Zwiebel Linse+n
    food | Salat | Kartoffel Tomate+n Gurke+n
    drink | Saft | Apfel Orange+n Traube+n Kirsch Tomate+n
    clothes | Jacke | Leder Winter Sommer Wolle-
    clothes | Mantel | Winter Leder Wolle- Sommer
    clothes | Kleid | Sommer Seide+n Wolle-
    clothes | Mütze | Wolle- Winter Leder
    clothes | Hut | Sommer Leder
    clothes | Schal | Wolle- Seide+n
    clothes | Rock | Leder Sommer Wolle-
    thing | Tasche | Leder Reise Schule-
    ware | Teller | Glas Holz Metall Kuchen
    ware | Schüssel | Glas Holz Metall Salat Suppe+n
    ware | Tasse | Kaffee Tee
    ware | Glas | Wasser Wein
    ware | Flasche | Wasser Wein Glas
    ware | Vase | Blume+n Glas Stein
    building | Brücke | Holz Stein
    building | Haus | Holz Stein
    building | Turm | Holz Stein
"""
MODIFIERS = dict(split_table(MODIFIER_TABLE))


def compound(modifier: str, english: str, head: Noun, kind: str = "") -> Noun:
    """Join a modifier (linking element included) to a head, which lends gender and inflection."""

    def join(word: str) -> str:
        return modifier + word.lower() if word else ""

    return Noun(
        de=join(head.de),
        gender=head.gender,
        de_plural=join(head.de_plural),
        en=f"{english} {head.en}",
        en_plural=f"{english} {head.en_plural}",
        kind=kind or head.kind,
        genitive=join(head.genitive),
        weak=join(head.weak),
    )


def build_compounds() -> list[Noun]:
    found = []
    for kind, head, modifiers in split_table(COMPOUND_TABLE):
        first, _, last = head.rpartition("/")
        for modifier in modifiers.split():
            german, english = linked(modifier), MODIFIERS[modifier]
            if first:
                middle = compound(german, english, simple(first))
                german, english = middle.de, middle.en
            # "head" holds the sense that a compound needs where the simple noun has another one
            base = next((n for n in SIMPLE_NOUNS if n.de == last and n.kind == "head"), None) or simple(last)
            found.append(compound(german, english, base, kind))
    return found


COMPOUNDS = build_compounds()
NOUNS = [n for n in SIMPLE_NOUNS if n.kind != "head"] + COMPOUNDS
