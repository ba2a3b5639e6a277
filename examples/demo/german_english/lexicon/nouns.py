"""Simple nouns by kind."""

from .entries import Noun
from .regular import english_plural, genitive


def parse_noun(line: str, kind: str) -> Noun:
    """``gender singular plural [weak] | english [/ plural]``; a plural of ``-`` marks a mass noun."""
    left, right = (part.strip() for part in line.split("|"))
    gender, singular, plural, *weak = left.split()
    en, _, en_plural = (part.strip() for part in right.partition("/"))
    return Noun(
        de=singular,
        gender=gender,
        de_plural="" if plural == "-" else plural,
        en=en,
        en_plural=en_plural or english_plural(en),
        kind=kind,
        genitive=weak[0] if weak else genitive(singular, gender),
        weak=weak[0] if weak else "",
    )


NOUN_TABLES = {
    "person": """
        m Lehrer Lehrer | teacher
        f Lehrerin Lehrerinnen | teacher
        m Arzt Ärzte | doctor
        f Ärztin Ärztinnen | doctor
        m Nachbar Nachbarn Nachbarn | neighbour
        f Nachbarin Nachbarinnen | neighbour
        m Freund Freunde | friend
        f Freundin Freundinnen | friend
        m Kollege Kollegen Kollegen | colleague
        f Kollegin Kolleginnen | colleague
        m Student Studenten Studenten | student
        f Studentin Studentinnen | student
        m Schüler Schüler | pupil
        f Schülerin Schülerinnen | pupil
        m Verkäufer Verkäufer | shop assistant
        f Verkäuferin Verkäuferinnen | shop assistant
        m Koch Köche | cook
        f Köchin Köchinnen | cook
        m Bäcker Bäcker | baker
        f Bäckerin Bäckerinnen | baker
        m Gärtner Gärtner | gardener
        f Gärtnerin Gärtnerinnen | gardener
        m Polizist Polizisten Polizisten | police officer
        f Polizistin Polizistinnen | police officer
        m Ingenieur Ingenieure | engineer
        f Ingenieurin Ingenieurinnen | engineer
        m Kellner Kellner | waiter
        f Kellnerin Kellnerinnen | waitress
        m Journalist Journalisten Journalisten | journalist
        f Journalistin Journalistinnen | journalist
        m Musiker Musiker | musician
        f Musikerin Musikerinnen | musician
        m Mechaniker Mechaniker | mechanic
        f Mechanikerin Mechanikerinnen | mechanic
        m Bürgermeister Bürgermeister | mayor
        f Bürgermeisterin Bürgermeisterinnen | mayor
        m Tourist Touristen Touristen | tourist
        f Touristin Touristinnen | tourist
        m Kunde Kunden Kunden | customer
        f Kundin Kundinnen | customer
        m Maler Maler | painter
        f Malerin Malerinnen | painter
        m Bauer Bauern Bauern | farmer
        f Bäuerin Bäuerinnen | farmer
        m Chef Chefs | boss
        f Chefin Chefinnen | boss
        m Gast Gäste | guest
        m Mann Männer | man / men
        f Frau Frauen | woman / women
        m Junge Jungen Jungen | boy
        m Zahnarzt Zahnärzte | dentist
        f Zahnärztin Zahnärztinnen | dentist
        m Hausmeister Hausmeister | caretaker
        m Briefträger Briefträger | postman / postmen
        m Fotograf Fotografen Fotografen | photographer
        f Fotografin Fotografinnen | photographer
    """,
    "family": """
        m Bruder Brüder | brother
        f Schwester Schwestern | sister
        m Vater Väter | father
        f Mutter Mütter | mother
        m Sohn Söhne | son
        f Tochter Töchter | daughter
        m Onkel Onkel | uncle
        f Tante Tanten | aunt
        m Großvater Großväter | grandfather
        f Großmutter Großmütter | grandmother
        m Cousin Cousins | cousin
        f Cousine Cousinen | cousin
        m Enkel Enkel | grandson
        f Enkelin Enkelinnen | granddaughter
        m Neffe Neffen Neffen | nephew
        f Nichte Nichten | niece
    """,
    "couple": """
        f Eltern Eltern | parent
        f Großeltern Großeltern | grandparent
    """,
    "kid": """
        n Kind Kinder | child / children
        n Mädchen Mädchen | girl
    """,
    "animal": """
        m Hund Hunde | dog
        f Katze Katzen | cat
        n Pferd Pferde | horse
        m Vogel Vögel | bird
        f Kuh Kühe | cow
        n Kaninchen Kaninchen | rabbit
    """,
    "text": """
        n Buch Bücher | book
        f Zeitung Zeitungen | newspaper
        f Zeitschrift Zeitschriften | magazine
        m Artikel Artikel | article
        m Roman Romane | novel
        n Gedicht Gedichte | poem
        m Bericht Berichte | report
        f Geschichte Geschichten | story
        f Anleitung Anleitungen | manual
    """,
    "message": """
        m Brief Briefe | letter
        f Nachricht Nachrichten | message
        f E-Mail E-Mails | email
        f Postkarte Postkarten | postcard
        f Einladung Einladungen | invitation
        f Rechnung Rechnungen | bill
    """,
    "door": """
        f Tür Türen | door
        n Fenster Fenster | window
        n Tor Tore | gate
    """,
    "container": """
        m Koffer Koffer | suitcase
        f Kiste Kisten | box
        n Paket Pakete | parcel
    """,
    "light": """
        n Licht Lichter | light
    """,
    "drawer": """
        f Schublade Schubladen | drawer
    """,
    "device": """
        f Lampe Lampen | lamp
        m Fernseher Fernseher | television
        n Radio Radios | radio
        m Computer Computer | computer
        f Maschine Maschinen | machine
        m Drucker Drucker | printer
        m Staubsauger Staubsauger | vacuum cleaner
    """,
    "vehicle": """
        n Auto Autos | car
        n Fahrrad Fahrräder | bicycle
        n Motorrad Motorräder | motorbike
        n Boot Boote | boat
    """,
    "transport": """
        m Zug Züge | train
        m Bus Busse | bus
    """,
    "furniture": """
        m Tisch Tische | table
        m Stuhl Stühle | chair
        m Schrank Schränke | cupboard
        n Regal Regale | shelf / shelves
        m Teppich Teppiche | carpet
        n Sofa Sofas | sofa
        m Schreibtisch Schreibtische | desk
        m Sessel Sessel | armchair
        n Bett Betten | bed
    """,
    "clothes": """
        f Jacke Jacken | jacket
        m Mantel Mäntel | coat
        n Hemd Hemden | shirt
        n Kleid Kleider | dress
        m Rock Röcke | skirt
        m Hut Hüte | hat
        f Mütze Mützen | cap
        m Schal Schals | scarf / scarves
        m Pullover Pullover | jumper
        f Bluse Blusen | blouse
    """,
    "food": """
        m Kuchen Kuchen | cake
        f Suppe Suppen | soup
        m Salat Salate | salad
        n Brot Brote | loaf of bread / loaves of bread
        m Apfel Äpfel | apple
        f Birne Birnen | pear
        f Pizza Pizzas | pizza
    """,
    "foodstuff": """
        m Fisch - | fish
        m Käse - | cheese
        n Gemüse - | vegetables
        n Fleisch - | meat
        m Reis - | rice
        m Honig - | honey
    """,
    "drink": """
        m Kaffee - | coffee
        m Tee - | tea
        n Wasser - | water
        f Milch - | milk
        m Saft - | juice
        m Wein - | wine
        n Bier - | beer
    """,
    "thing": """
        m Schlüssel Schlüssel | key
        f Tasche Taschen | bag
        m Regenschirm Regenschirme | umbrella
        n Handy Handys | mobile phone
        f Kamera Kameras | camera
        f Uhr Uhren | watch / watches
        m Ball Bälle | ball
        n Messer Messer | knife / knives
        m Korb Körbe | basket
        f Decke Decken | blanket
        m Hammer Hämmer | hammer
        m Rucksack Rucksäcke | rucksack
        m Pass Pässe | passport
    """,
    "ware": """
        m Teller Teller | plate
        n Glas Gläser | glass
        f Tasse Tassen | cup
        f Vase Vasen | vase
        f Schüssel Schüsseln | bowl
        f Flasche Flaschen | bottle
    """,
    "art": """
        n Bild Bilder | picture
        n Foto Fotos | photo
        f Zeichnung Zeichnungen | drawing
        n Plakat Plakate | poster
    """,
    "instrument": """
        f Gitarre Gitarren | guitar
        f Geige Geigen | violin
        f Flöte Flöten | flute
        f Trompete Trompeten | trumpet
    """,
    "plant": """
        f Blume Blumen | flower
        f Rose Rosen | rose
        m Baum Bäume | tree
        f Pflanze Pflanzen | plant
        m Strauch Sträucher | shrub
    """,
    "room": """
        n Zimmer Zimmer | room
        f Küche Küchen | kitchen
        n Büro Büros | office
        m Keller Keller | cellar
        f Wohnung Wohnungen | flat
        f Werkstatt Werkstätten | workshop
        n Badezimmer Badezimmer | bathroom
        f Garage Garagen | garage
        n Schlafzimmer Schlafzimmer | bedroom
        n Wohnzimmer Wohnzimmer | living room
    """,
    "building": """
        n Haus Häuser | house
        f Brücke Brücken | bridge
        f Kirche Kirchen | church
        m Turm Türme | tower
        n Hotel Hotels | hotel
        n Schloss Schlösser | castle
        f Schule Schulen | school
        n Museum Museen | museum
    """,
    "event": """
        f Feier Feiern | party
        f Hochzeit Hochzeiten | wedding
        n Konzert Konzerte | concert
        f Ausstellung Ausstellungen | exhibition
        f Besprechung Besprechungen | meeting
        f Vorlesung Vorlesungen | lecture
        f Führung Führungen | guided tour
        m Kurs Kurse | course
        n Spiel Spiele | game
        m Ausflug Ausflüge | trip
    """,
    "exam": """
        f Prüfung Prüfungen | exam
    """,
    "show": """
        m Film Filme | film
        n Theaterstück Theaterstücke | play
        f Sendung Sendungen | programme
    """,
    "joke": """
        m Witz Witze | joke
    """,
    "matter": """
        n Problem Probleme | problem
        f Frage Fragen | question
        f Aufgabe Aufgaben | task
        m Plan Pläne | plan
        f Idee Ideen | idea
        m Fehler Fehler | mistake
        m Vorschlag Vorschläge | suggestion
        f Antwort Antworten | answer
        f Entscheidung Entscheidungen | decision
        f Regel Regeln | rule
    """,
    "form": """
        n Formular Formulare | form
        m Vertrag Verträge | contract
        m Antrag Anträge | application
    """,
    "trip": """
        f Reise Reisen | trip
    """,
    "day": """
        m Geburtstag Geburtstage | birthday
        m Hochzeitstag Hochzeitstage | wedding anniversary
    """,
    "job": """
        f Stelle Stellen | job
        n Stipendium Stipendien | scholarship
    """,
    "meal": """
        n Essen - | food
        m Lärm - | noise
        n Wetter - | weather
    """,
    "fence": """
        m Zaun Zäune | fence
    """,
    "fitting": """
        m Vorhang Vorhänge | curtain
        f Wand Wände | wall
    """,
    "topic": """
        f Musik - | music
        f Kunst - | art
        f Politik - | politics
        m Sport - | sport
        f Technik - | technology
        f Mathematik - | maths
        f Literatur - | literature
        f Natur - | nature
    """,
    "song": """
        n Lied Lieder | song
        n Volkslied Volkslieder | folk song
    """,
    # Heads and place names that occur in compounds and phrases only.
    "head": """
        m Griff Griffe | handle
        n Schloss Schlösser | lock
        m Schlüssel Schlüssel | key
        f Uhr Uhren | clock
        m Fahrer Fahrer | driver
        f Fahrerin Fahrerinnen | driver
        m Kuchen Kuchen | cake
        n Brot - | bread
        m Schuh Schuhe | shoe
        m Handschuh Handschuhe | glove
        f Reise Reisen | trip
        n Fest Feste | festival
        m Unterricht - | lesson / lessons
        m Topf Töpfe | pot
        f Karte Karten | card
        m Reifen Reifen | tyre
        f Jacke Jacken | jacket
        m Dieb Diebe | thief / thieves
    """,
    "site": """
        m Garten Gärten | garden
        m Balkon Balkone | balcony
        f Terrasse Terrassen | terrace
        m Bahnhof Bahnhöfe | station
        m Markt Märkte | market
        m Supermarkt Supermärkte | supermarket
        n Kino Kinos | cinema
        n Theater Theater | theatre
        m Park Parks | park
        f Bibliothek Bibliotheken | library
        n Schwimmbad Schwimmbäder | swimming pool
        n Café Cafés | café
        n Restaurant Restaurants | restaurant
        f Bäckerei Bäckereien | bakery
        f Apotheke Apotheken | chemist's
        n Rathaus Rathäuser | town hall
        m Marktplatz Marktplätze | market square
        f Stadt Städte | town
        n Dorf Dörfer | village
        f Universität Universitäten | university
        n Krankenhaus Krankenhäuser | hospital
        f Post - | post office
        m Hafen Häfen | harbour
        m Flughafen Flughäfen | airport
        m Strand Strände | beach
        m See Seen | lake
        m Wald Wälder | forest
        m Berg Berge | mountain
        n Meer Meere | sea
        f Haltestelle Haltestellen | bus stop
        f Schweiz - | Switzerland
        f Türkei - | Turkey
        m Fluss Flüsse | river
    """,
}


def parse_nouns(tables: dict[str, str]) -> list[Noun]:
    return [parse_noun(line, kind) for kind, table in tables.items() for line in table.strip().splitlines()]


SIMPLE_NOUNS = parse_nouns(NOUN_TABLES)


def simple(word: str, kind: str = "") -> Noun:
    return next(n for n in SIMPLE_NOUNS if n.de == word and kind in ("", n.kind))
