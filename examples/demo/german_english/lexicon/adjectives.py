"""Adjectives, and the kinds of noun they suit."""

from .entries import Adjective, word_list
from .regular import english_degrees

# German [comparative superlative-stem] | English [comparative superlative] | kinds of noun it suits
ADJECTIVE_TABLE = """
    alt älter ältest | old | person animal text door container drawer device vehicle furniture clothes thing ware art \
        instrument plant room building song show fitting fence
    jung jünger jüngst | young | staff animal
    neu neuer neuest | new | staff text door container device vehicle furniture clothes thing ware instrument \
        fitting form song art matter
    groß größer größt | big | animal door container vehicle furniture bag ware art plant room building cake fruit
    klein | small | kid animal door container vehicle furniture bag ware art plant room building cake fruit
    freundlich | friendly | person kid
    höflich | polite | person kid
    klug klüger klügst | clever cleverer cleverest | person kid animal
    neugierig | curious | person kid animal
    fleißig | hard-working | person
    geduldig | patient | person
    ungeduldig | impatient | person
    nett | nice | person
    ehrlich | honest | person answer
    faul | lazy | person animal
    schüchtern | shy shyer shyest | person kid
    berühmt | famous | artist building art song show
    beliebt | popular | artist show song
    fröhlich | cheerful | kid song person
    schön | beautiful | text art clothes plant room building instrument furniture ware song
    hübsch | pretty | clothes ware plant
    hässlich | ugly | furniture ware building clothes art
    lang länger längst | long | text message event show song exam
    kurz kürzer kürzest | short | text message event show song exam
    spannend | exciting | text show event
    langweilig | boring | text show event
    interessant | interesting | text event show art thought
    lustig | funny | text show message song art joke
    traurig | sad | text show song message
    wichtig | important | message event exam matter form
    schwierig | difficult | exam puzzle form
    schwer | heavy | container device furniture bag
    leicht | easy | exam puzzle
    einfach | simple | thought form
    gut besser best | good better best | thought show food drink foodstuff instrument
    schlecht | bad worse worst | thought show
    seltsam | strange | message thought event
    modern | modern | device furniture building room
    praktisch praktischer praktischst | practical | device furniture bag
    teuer teurer teuerst | expensive | device vehicle furniture clothes thing instrument ware art
    billig | cheap | device vehicle furniture clothes thing food
    kaputt - | broken | door device vehicle furniture ware fitting
    schmutzig | dirty | door vehicle clothes ware room
    elegant | elegant | clothes
    warm wärmer wärmst | warm | winterwear hotsoup
    dick | thick | winterwear book
    bequem | comfortable | seat winterwear
    hell | bright | room
    dunkel dunkler dunkelst | dark | room
    ruhig | quiet | room
    gemütlich | cosy | room
    hoch höher höchst | tall | tower
    frisch | fresh | food foodstuff
    gesund gesünder gesündest | healthy | foodstuff animal fruit
    kalt kälter kältest | cold | drink hotsoup
    heiß | hot | hotdrink hotsoup
    süß | sweet | fruit
    lecker - | delicious | food
    schnell | fast | vehicle
    langsam | slow | computer
    laut | loud | noisy
    leise | quiet | noisy
    nass nasser nassest | wet | clothes
    leer - | empty | container ware
    voll - | full | container
    rund - | round | round
    wertvoll | valuable | instrument art ware
    selten | rare | plant
    rot - | red | clothes vehicle bag ware door rose
    blau - | blue | clothes vehicle bag ware door
    grün - | green | clothes vehicle bag ware door
    schwarz - | black | clothes vehicle bag animal
    weiß - | white | clothes vehicle furniture ware door rose
    gelb - | yellow | clothes vehicle bag ware rose
    braun - | brown | clothes furniture bag animal
    grau - | grey | clothes vehicle door animal
"""
UNCOMPARED = "-"


def parse_adjective(line: str) -> Adjective:
    german, english, kinds = line.split("|")
    de, *degrees = german.split()
    if degrees == [UNCOMPARED]:
        degrees = ["", ""]
    elif not degrees:
        comparative = de.removesuffix("e") + "er"
        degrees = [comparative, de + ("est" if de.endswith(("t", "d", "s", "ß", "z", "sch")) else "st")]
        if de.endswith("nd"):  # spannend, spannendst
            degrees[1] = de + "st"
    en, *en_degrees = english.split()
    return Adjective(de, *degrees, en, *(en_degrees or english_degrees(en)), tuple(kinds.split()))


ADJECTIVES = [parse_adjective(line) for line in ADJECTIVE_TABLE.strip().splitlines()]
COLOURS = frozenset(word_list("rot blau grün schwarz weiß gelb braun grau"))
