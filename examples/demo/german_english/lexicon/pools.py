"""The nouns that a kind or a narrower group stands for."""

from .compounds import NOUNS
from .entries import Noun

# Narrower choices than a whole table, by German noun.
NOUN_GROUPS = {
    "story": "Geschichte Abenteuergeschichte Weihnachtsgeschichte Kindergeschichte",
    "lockable": "Tür Tor Küchentür Kellertür Bürotür Balkontür Garagentür Werkstatttür Wohnungstür Haustür Schublade",
    "soup": "Suppe Gemüsesuppe Kartoffelsuppe Tomatensuppe Zwiebelsuppe Linsensuppe Reis Gemüse",
    "hotdrink": "Kaffee Tee",
    "cake": """
        Kuchen Apfelkuchen Kirschkuchen Pflaumenkuchen Schokoladenkuchen Käsekuchen Zitronenkuchen Nusskuchen
        Pizza
    """,
    "flower": "Blume Rose Pflanze Strauch",
    "flat": "Wohnung Haus Zimmer",
    "fault": "Fehler",
    "problem": "Problem Aufgabe",
    "question": "Frage",
    "mendable": """
        Uhr Kamera Haustürschloss Kellertürschloss Garagentürschloss Bürotürschloss Küchenuhr Autoreifen
        Fahrradreifen Küchentür Kellertür Küchenfenster Handy Küchentürgriff Haustürgriff
    """,
    "parcel": "Paket",
    "writing": "Buch Artikel Roman Gedicht Bericht Geschichte Kinderbuch Kriminalroman Abenteuerroman Zeitungsartikel",
    "painting": "Bild Plakat",
    "enterable": "Haus Hotel Museum Schule Kirche Schloss Holzhaus Steinhaus",
    "elder": "Vater Mutter Bruder Schwester Onkel Tante Großvater Großmutter Cousin Cousine",
    "joinery": "Tisch Stuhl Schrank Regal Bett Holztisch Küchentisch Gartentisch Küchenregal Kellerregal Küchenschrank",
    "youngster": "Sohn Tochter Enkel Enkelin Neffe Nichte",
    "hotsoup": "Suppe Gemüsesuppe Kartoffelsuppe Tomatensuppe Zwiebelsuppe Linsensuppe",
    "tree": "Baum Strauch Rose Blume",
    "tabletop": """
        Tisch Regal Küchentisch Wohnzimmertisch Esszimmertisch Gartentisch Schreibtisch Küchenregal Kellerregal
        Holztisch Glastisch
    """,
    "doorway": "Tür Haustür Küchentür Kellertür Wohnungstür Bürotür Garagentür Schlafzimmertür Balkontür",
    "bag": "Tasche Rucksack Korb Ledertasche Reisetasche Schultasche Regenschirm",
    "fruit": "Apfel Birne",
    "answer": "Antwort",
    "thought": "Frage Idee Plan Vorschlag Antwort Entscheidung",
    "puzzle": "Frage Aufgabe Problem Entscheidung",
    "artist": "Musiker Musikerin Maler Malerin Fotograf Fotografin Koch Köchin Journalist Journalistin",
    "winterwear": "Jacke Mantel Pullover Winterjacke Wintermantel Wollmütze Wollschal Lederjacke Wolljacke Wollmantel",
    "book": "Buch Roman Geschichtsbuch Biologiebuch Mathematikbuch Kriminalroman Abenteuerroman",
    "seat": "Stuhl Sessel Sofa Bett Bürostuhl Gartenstuhl Küchenstuhl",
    "tower": "Turm Holzturm Steinturm Baum",
    "noisy": "Maschine Drucker Staubsauger Computer",
    "computer": "Computer Drucker",
    "round": "Tisch Teppich Küchentisch Esszimmertisch Gartentisch Holztisch Glastisch",
    "rose": "Rose Blume",
    "surface": """
        Tisch Stuhl Regal Sofa Bett Küchentisch Wohnzimmertisch Esszimmertisch Gartentisch Küchenstuhl Bürostuhl
        Schreibtisch Küchenregal Kellerregal Holztisch Glastisch
    """,
    "inside": """
        Schrank Schublade Koffer Kiste Küchenschrank Schlafzimmerschrank Wohnzimmerschrank Büroschrank Tasche
        Rucksack Korb
    """,
    "wall": "Wand Küchenwand Schlafzimmerwand Wohnzimmerwand",
    "cupboard": "Schrank Küchenschrank Wohnzimmerschrank Küchenregal Regal",
    "coat": "Jacke Mantel Kleid Hemd Wintermantel Lederjacke Winterjacke Sommerkleid Seidenkleid Bluse",
    "wardrobe": "Schrank Schlafzimmerschrank Holzschrank",
    "small": """
        Schlüssel Tasche Messer Buch Brief Zeitung Zeitschrift Handy Kamera Pass Postkarte Decke Rechnung Uhr
        Haustürschlüssel Kellertürschlüssel Autoschlüssel Garagentürschlüssel Küchentürschlüssel
        Wohnungstürschlüssel Bürotürschlüssel Balkontürschlüssel Kinderbuch Geschichtsbuch Fahrradschlüssel
        Kellerschlüssel Büroschlüssel
    """,
    "upright": """
        Vase Flasche Glas Tasse Schüssel Blumenvase Kaffeetasse Teetasse Weinglas Wasserflasche
        Schreibtischlampe Radio Salatschüssel Korb
    """,
}


def build_pools() -> dict[str, list[Noun]]:
    pools: dict[str, list[Noun]] = {}
    for noun in NOUNS:
        pools.setdefault(noun.kind, []).append(noun)
    for group, words in NOUN_GROUPS.items():
        pools[group] = [next(n for n in NOUNS if n.de == word) for word in words.split()]
    pools["staff"] = [
        n for n in pools["person"] if n.de not in ("Mann", "Frau", "Junge", "Gast", "Tourist", "Touristin")
    ]
    pools["beings"] = pools["person"] + pools["family"]
    return pools


POOLS = build_pools()
