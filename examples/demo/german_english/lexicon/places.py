"""Places with the prepositions they take."""

from .entries import Place, split_table
from .nouns import SIMPLE_NOUNS

# noun | German at, to | English at | English to | group
PLACE_TABLE = """
    Küche | in in | in the kitchen | into the kitchen | home kitchen
    Wohnzimmer | in in | in the living room | into the living room | home livingroom
    Schlafzimmer | in in | in the bedroom | into the bedroom | home
    Garten | in in | in the garden | into the garden | home outside field garden reading
    Keller | in in | in the cellar | into the cellar | home
    Werkstatt | in in | in the workshop | into the workshop | shed
    Garage | in in | in the garage | into the garage | shed
    Balkon | auf auf | on the balcony | onto the balcony | home outside
    Terrasse | auf auf | on the terrace | onto the terrace | home outside
    Bahnhof | an zu | at the station | to the station | town meeting station
    Markt | auf auf | at the market | to the market | shop town meeting
    Supermarkt | in in | at the supermarket | to the supermarket | shop
    Kino | in in | at the cinema | to the cinema | town meeting
    Theater | in in | at the theatre | to the theatre | town meeting venue
    Museum | in in | at the museum | to the museum | town meeting venue
    Park | in in | in the park | to the park | town outside field meeting reading venue
    Bibliothek | in in | at the library | to the library | town study reading
    Schwimmbad | in in | at the swimming pool | to the swimming pool | town swim
    Café | in in | at the café | to the café | town meeting eat reading
    Restaurant | in in | at the restaurant | to the restaurant | town eat meeting
    Bäckerei | in in | at the bakery | to the bakery | town
    Apotheke | in in | at the chemist's | to the chemist's | town
    Rathaus | in zu | at the town hall | to the town hall | town venue
    Marktplatz | auf auf | on the market square | to the market square | town outside meeting
    Stadt | in in | in town | into town | town shop
    Universität | an zu | at the university | to the university | town study venue
    Krankenhaus | in in | at the hospital | to the hospital | town
    Hafen | an zu | at the harbour | to the harbour | outside town meeting
    Flughafen | an zu | at the airport | to the airport | town meeting station
    Haltestelle | an zu | at the bus stop | to the bus stop | station
    Fluss | an an | by the river | to the river | outside hike
    Strand | an an | on the beach | to the beach | outside field nature swim
    See | an an | at the lake | to the lake | outside nature
    Wald | in in | in the forest | into the forest | outside nature hike
    Berg | in in | in the mountains | to the mountains | nature hike plural
    Meer | an an | by the sea | to the sea | nature
    Büro | in in | at the office | to the office | work
    Schule | in in | at school | to school | work study
    Schweiz | in in | in Switzerland | to Switzerland | country
    Türkei | in in | in Turkey | to Turkey | country
"""
# German | English | group; names take in and nach without an article
NAMED_PLACE_TABLE = """
    Berlin | Berlin | city
    Hamburg | Hamburg | city
    München | Munich | city
    Köln | Cologne | city
    Wien | Vienna | city
    Leipzig | Leipzig | city
    Dresden | Dresden | city
    Bremen | Bremen | city
    Paris | Paris | city
    London | London | city
    Rom | Rome | city
    Zürich | Zurich | city
    Nürnberg | Nuremberg | city
    Italien | Italy | country
    Spanien | Spain | country
    Frankreich | France | country
    Österreich | Austria | country
    Schweden | Sweden | country
    Polen | Poland | country
    Griechenland | Greece | country
"""


def parse_places() -> list[Place]:
    places = []
    for word, prepositions, en_at, en_to, groups in split_table(PLACE_TABLE):
        at, to = prepositions.split()
        noun = next(n for n in SIMPLE_NOUNS if n.de == word and n.kind in ("site", "room", "building"))
        group = groups.removesuffix(" plural")
        places.append(Place(noun, word, at, to, en_at, en_to, group, plural=group != groups))
    for name, english, group in split_table(NAMED_PLACE_TABLE):
        places.append(Place(None, name, "in", "nach", f"in {english}", f"to {english}", group))
    return places


PLACES = parse_places()
