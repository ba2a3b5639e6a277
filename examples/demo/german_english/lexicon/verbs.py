"""Verbs."""

import re

from .entries import EnglishVerb, Verb
from .regular import INSEPARABLE, linking_e, regular_past, stem

# German: [separable|]infinitive [er-form preterite participle]; "~" marks the perfect with sein, "#" a second sense.
# English: base [past participle] [+particle]; missing forms are regular.
VERB_TABLE = """
    sein ist war gewesen ~ | be was been
    haben hat hatte gehabt | have had had
    werden wird wurde geworden ~ | become became become
    auf|machen | open
    zu|machen | close
    öffnen | open
    schließen schließt schloss geschlossen | close
    ab|schließen schließt schloss geschlossen | lock
    auf|räumen | tidy
    ein|schalten | switch +on
    aus|schalten | switch +off
    an|rufen ruft rief gerufen | call
    ein|kaufen | go went gone +shopping
    zurück|bringen bringt brachte gebracht | bring brought brought +back
    mit|bringen bringt brachte gebracht | bring brought brought +along
    mit|nehmen nimmt nahm genommen | take took taken +along
    ab|holen | pick +up
    an|ziehen zieht zog gezogen | put put put +on
    aus|ziehen zieht zog gezogen | take took taken +off
    an|probieren | try +on
    auf|stehen steht stand gestanden ~ | get got got +up
    auf|wachen ~ | wake woke woken +up
    ein|schlafen schläft schlief geschlafen ~ | fall fell fallen +asleep
    an|kommen kommt kam gekommen ~ | arrive
    ab|fahren fährt fuhr gefahren ~ | leave left left
    an|fangen fängt fing gefangen | start
    auf|hören | stop
    weg|werfen wirft warf geworfen | throw threw thrown +away
    aus|leihen leiht lieh geliehen | borrow
    zurück|geben gibt gab gegeben | give gave given +back
    an|bieten bietet bot geboten | offer
    vor|bereiten | prepare
    ein|laden lädt lud geladen | invite
    fern|sehen sieht sah gesehen | watch +television
    auf|hängen | hang hung hung +up
    ein|packen | pack
    aus|packen | unpack
    teil|nehmen nimmt nahm genommen | take took taken +part
    zu|hören | listen
    aus|füllen | fill +in
    vor|lesen liest las gelesen | read read read +out
    nach|denken denkt dachte gedacht | think thought thought
    statt|finden findet fand gefunden | take took taken +place
    zurück|kommen kommt kam gekommen ~ | come came come +back
    frühstücken | have had had +breakfast
    lesen liest las gelesen | read read read
    schreiben schreibt schrieb geschrieben | write wrote written
    kaufen | buy bought bought
    verkaufen | sell sold sold
    bezahlen | pay paid paid
    brauchen | need
    suchen | look
    finden findet fand gefunden | find found found
    verlieren verliert verlor verloren | lose lost lost
    vergessen vergisst vergaß vergessen | forget forgot forgotten
    sehen sieht sah gesehen | see saw seen
    hören | listen
    besuchen | visit
    treffen trifft traf getroffen | meet met met
    kennen kennt kannte gekannt | know knew known
    wissen weiß wusste gewusst | know knew known
    fragen | ask
    antworten | answer
    helfen hilft half geholfen | help
    danken | thank
    gehören | belong
    gefallen gefällt gefiel gefallen | like
    geben gibt gab gegeben | give gave given
    schenken | give gave given
    zeigen | show showed shown
    schicken | send sent sent
    bringen bringt brachte gebracht | bring brought brought
    leihen leiht lieh geliehen | lend lent lent
    erklären | explain
    erzählen | tell told told
    empfehlen empfiehlt empfahl empfohlen | recommend
    kochen | cook
    kochen#Kaffee | make made made
    backen backt backte gebacken | bake
    essen isst aß gegessen | eat ate eaten
    trinken trinkt trank getrunken | drink drank drunk
    probieren | try
    waschen wäscht wusch gewaschen | wash
    spülen | wash
    putzen | clean
    reparieren | repair
    bauen | build built built
    malen | paint
    zeichnen | draw drew drawn
    fotografieren | photograph
    pflanzen | plant
    gießen gießt goss gegossen | water
    füttern | feed fed fed
    tragen trägt trug getragen | carry
    tragen#Kleidung trägt trug getragen | wear wore worn
    stellen | put put put
    legen | put put put
    hängen | hang hung hung
    stehen steht stand gestanden | stand stood stood
    liegen liegt lag gelegen | lie lay lain
    hängen#intr hängt hing gehangen | hang hung hung
    sitzen sitzt saß gesessen | sit sat sat
    gehen geht ging gegangen ~ | go went gone
    fahren fährt fuhr gefahren ~ | go went gone
    fliegen fliegt flog geflogen ~ | fly flew flown
    laufen läuft lief gelaufen ~ | run ran run
    reisen ~ | travel
    bleiben bleibt blieb geblieben ~ | stay
    wohnen | live
    arbeiten | work
    lernen | study
    üben | practise
    spielen | play
    schlafen schläft schlief geschlafen | sleep slept slept
    warten | wait
    denken denkt dachte gedacht | think thought thought
    sprechen spricht sprach gesprochen | speak spoke spoken
    reden | talk
    lachen | laugh
    träumen | dream
    freuen | look +forward
    erinnern | remember
    interessieren | be was been +interested
    ärgern | be was been +annoyed
    aus|ruhen | rest
    entschuldigen | apologise
    kümmern | look +after
    unterhalten unterhält unterhielt unterhalten | talk
    bewerben bewirbt bewarb beworben | apply
    beschweren | complain
    tanzen | dance
    singen singt sang gesungen | sing sang sung
    schwimmen schwimmt schwamm geschwommen ~ | swim swam swum
    wandern ~ | hike
    verstehen versteht verstand verstanden | understand understood understood
    lieben | love
    bewundern | admire
    beginnen beginnt begann begonnen | begin began begun
    enden | end
    dauern | last
    kosten | cost cost cost
    planen | plan
    organisieren | organise
    feiern | celebrate
    bestehen besteht bestand bestanden | pass
    lösen | solve
    besprechen bespricht besprach besprochen | discuss
    beantworten | answer
    korrigieren | correct
    übersetzen | translate
    unterschreiben unterschreibt unterschrieb unterschrieben | sign
    verlassen verlässt verließ verlassen | leave left left
    erreichen | reach
    verpassen | miss
    bestellen | order
    bekommen bekommt bekam bekommen | get got got
    besichtigen | visit
    versuchen | try
    beschließen beschließt beschloss beschlossen | decide
    versprechen verspricht versprach versprochen | promise
    hoffen | hope
    sagen | say said said
    glauben | believe
    bitten bittet bat gebeten | ask
    regnen | rain
    schneien | snow
    kommen kommt kam gekommen ~ | come came come
    begrüßen | greet
    beobachten | watch
    mieten | rent
    streichen streicht strich gestrichen | paint
    sammeln | collect
    renovieren | renovate
    vermissen | miss
    haben#Lust hat hatte gehabt | feel felt felt
    fragen#sich | wonder
    geben#es gibt gab gegeben | be was been
    loben | praise
"""


def parse_verb(german: str, english: str) -> tuple[str, Verb]:
    words = german.split()
    with_sein = words[-1] == "~"
    words = words[:-1] if with_sein else words
    key, forms = re.sub(r"[|#]", "", words[0]), words[1:]
    prefix, _, base = words[0].split("#")[0].rpartition("|")
    if not forms:
        root = stem(base) + linking_e(stem(base))
        ge = "" if base.startswith(INSEPARABLE) or base.endswith("ieren") else "ge"
        forms = [root + "t", root + "te", ge + root + "t"]
    en, _, particle = (part.strip() for part in english.partition("+"))
    en_base, *en_forms = en.split()
    past, participle = en_forms or [regular_past(en_base)] * 2
    verb = Verb(
        de=base,
        prefix=prefix,
        third=forms[0],
        preterite=forms[1],
        participle=prefix + forms[2],
        perfect_with_sein=with_sein,
        en=EnglishVerb(en_base, past, participle, particle),
    )
    return key, verb


def parse_verbs(table: str) -> dict[str, Verb]:
    # the bar inside a German verb marks the prefix, so the columns split at " | "
    return dict(parse_verb(*line.split(" | ")) for line in table.strip().splitlines())


VERBS = parse_verbs(VERB_TABLE)
