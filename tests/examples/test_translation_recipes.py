"""IWSLT14 and Multi30k go from the archive to BLEU, on small archives."""

import gzip
import json
import math
import re
import shlex
import shutil
import sys

import pytest
from common import bleu, parallel_text, subwords, translation_data
from fairseq_cli import score
from iwslt14_de_en import prepare as iwslt
from iwslt14_de_en.moses import Tokenizer, is_clean, lowercase
from multi30k_de_en import prepare as multi30k
from recipes import EXAMPLES, dry_run, refused_here, script, tar_of

TINY = (
    "--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 32 --encoder-ffn-embed-dim 32"
).split()
TINY += (
    "--encoder-attention-heads 4 --decoder-attention-heads 4 --max-update 3 --max-tokens 500"
).split()
TINY += ["--max-tokens-valid", "4000", "--num-workers", "0"]
SHORT = ["--beam", "1", "--max-len-a", "0", "--max-len-b", "4"]


pytestmark = pytest.mark.usefixtures("plain_environment")


def recipe(path, *arguments, check=True, **variables):
    """Run a recipe's script as a user does, on the CPU."""
    words = [str(EXAMPLES / path), *map(str, arguments)]
    return script(shlex.join(words), check=check, GPUS=0, **variables)


# ---- Moses -------------------------------------------------------------------------------------

ENGLISH = {
    "It's Mr. Smith's dog, isn't it?": "It &apos;s Mr. Smith &apos;s dog , isn &apos;t it ?",
    "So am I.": "So am I .",  # tokenizer.perl since November 2018; sacremoses alone leaves 'I.'
    "He came (at 3 p.m.) from the U.S. "
    "yesterday.": "He came ( at 3 p.m. ) from the U.S. yesterday .",
    "No. 5 costs $3,000.50, not 1,2.": "No. 5 costs $ 3,000.50 , not 1,2 .",
    "No. He said no. Yes.": "No . He said no . Yes .",
    "well-known -- a co-op": "well-known -- a co-op",  # no aggressive splitting of hyphens
    'A "quoted" [word] & more | less <i>': (
        "A &quot; quoted &quot; &#91; word &#93; &amp; more &#124; less &lt; i &gt;"
    ),
    "&quot; stays": "&amp; quot ; stays",
    "Wait... what.. .": "Wait ... what .. .",
    "the 1990's dogs' tails": "the 1990 &apos;s dogs &apos; tails",
    "tabs\tand\u00a0spaces \x1cand\x01 junk\x07": "tabs and spaces and junk",
    "木火 and 한글": "木火 and 한글",  # sacremoses alone takes CJK apart
    "": "",
    " \t ": "",
}
GERMAN = {
    "Das ist z.B. Nr. 5, d.h. fünf.": "Das ist z.B. Nr. 5 , d.h. fünf .",
    "Am 3. Oktober war's schön!": "Am 3. Oktober war &apos; s schön !",
    "„Äpfel“ – 3,5 Prozent…": "„ Äpfel “ – 3,5 Prozent …",
    "Ein iPhone 5.": "Ein iPhone 5 .",
    "Er sagte usw. und ging.": "Er sagte usw. und ging .",
}


@pytest.mark.parametrize("language, cases", [("en", ENGLISH), ("de", GERMAN)], ids=["en", "de"])
def test_tokens_are_those_of_tokenizer_perl(language, cases):
    tokenizer = Tokenizer(language)
    assert {line: tokenizer(line) for line in cases} == cases
    assert lowercase("ÄÖÜ ẞ ΣΑΣ İ McX") == "äöü ß σασ i̇ mcx"


@pytest.mark.parametrize(
    "source, target, kept",
    [
        ("a", "b", True),
        ("a a a", "b b", True),  # 1.5 is not more than 1.5
        ("a a a a", "b b", False),
        ("a a", "b b b b", False),
        ("", "b", False),
        ("a", "", False),
        ("a " * 175, "b " * 175, True),
        ("a " * 176, "b " * 176, False),
        ("a" * 1000, "b", True),
        ("a" * 1001, "b", False),
    ],
)
def test_pairs_are_kept_as_clean_corpus_perl_keeps_them(source, target, kept):
    assert is_clean(source.strip(), target.strip()) is kept


# ---- IWSLT14: the archive ----------------------------------------------------------------------

TALK = {  # lines of a talk that are no sentences
    "de": ["<url>http://x</url>", "<keywords>talks, Geld</keywords>", "<talkid>1</talkid>"],
    "en": ["<url>http://x</url>", "<keywords>talks, money</keywords>", "<talkid>1</talkid>"],
}
# These of the 70 pairs of the training text are dropped.
DIRTY = {20: ("Eins zwei drei vier.", "One."), 30: ("Ja.", ""), 41: ("Wort " * 176, "word " * 176)}


def training_pairs(pairs):
    found = list(pairs[:70])
    for i, pair in DIRTY.items():
        found[i] = pair
    return found


def write_archive(path, pairs):
    """Write de-en.tgz as the campaign packed it."""
    files = {"README": "IWSLT 2014\n", "train.en": "not this\n"}
    train = training_pairs(pairs)
    for side, language in enumerate(("de", "en")):
        lines = list(TALK[language])
        lines.append(f"<title>{train[0][side]}</title>")
        lines.append(f"<description>{train[1][side]}</description>")
        lines += [pair[side] for pair in train[2:40]]
        lines += TALK[language]
        lines += [f" {pair[side]} " for pair in train[40:]]
        files[f"train.tags.de-en.{language}"] = "".join(f"{line}\n" for line in lines)
        for number, name in enumerate(iwslt.TEST):
            segments = "".join(
                f'<seg id="{i}"> {pair[side]} </seg>\n'
                for i, pair in enumerate(pairs[100 + 4 * number :][:4], 1)
            )
            head = (
                '<?xml version="1.0"?>\n<mteval>\n<doc '
                f'docid="1">\n<url>http://x</url>\n<title>{number}</title>\n'
            )
            files[f"{name}.de-en.{language}.xml"] = f"{head}{segments}</doc>\n</mteval>\n"
    return tar_of(path, {f"de-en/{name}": text.encode() for name, text in files.items()})


LINES = {iwslt.TRAIN: 70, **dict.fromkeys(iwslt.TEST, 4)}
PAIRS = {"train": 65, "valid": 2, "test": 20}


@pytest.fixture
def archive(pairs, tmp_path):
    return write_archive(tmp_path / "de-en.tgz", pairs)


def test_iwslt_text_is_the_published_preparations(archive, pairs, tmp_path):
    iwslt.prepare_text(archive, tmp_path / "text", LINES, PAIRS)
    tokenizers = {language: Tokenizer(language) for language in ("de", "en")}
    clean = [pair for i, pair in enumerate(training_pairs(pairs)) if i not in DIRTY]
    train = [*clean[:22], *clean[23:45], *clean[46:]]
    split = {"train": train, "valid": [clean[22], clean[45]], "test": pairs[100:120]}
    for name, members in split.items():
        for side, language in enumerate(("de", "en")):
            files = (tmp_path / "text" / f"{name}.{kind}.{language}" for kind in ("raw", "tokens"))
            raw, tokens = (file.read_text().splitlines() for file in files)
            assert raw == [pair[side] for pair in members]
            assert tokens == [tokenizers[language](line).lower() for line in raw]
    assert sorted(path.name.split(".")[0] for path in (tmp_path / "text").iterdir()) == sorted(
        4 * [*split]
    )


def test_curly_apostrophes_are_straightened_in_the_test_set_alone(pairs, tmp_path):
    curly = [(de, f"It\N{RIGHT SINGLE QUOTATION MARK}s {en}") for de, en in pairs[:120]]
    iwslt.prepare_text(
        write_archive(tmp_path / "de-en.tgz", curly), tmp_path / "text", any_counts=True
    )
    names = "test.tokens", "test.raw", "train.tokens"
    start = {name: (tmp_path / "text" / f"{name}.en").read_text()[:9] for name in names}
    assert start["test.tokens"] == "it &apos;"
    assert start["test.raw"].startswith("It\N{RIGHT SINGLE QUOTATION MARK}s ")
    assert start["train.tokens"].startswith("it \N{RIGHT SINGLE QUOTATION MARK} s ")


def test_other_text_than_the_published_is_refused(archive, tmp_path, capsys):
    with pytest.raises(SystemExit):
        iwslt.prepare_text(archive, tmp_path / "text", {**LINES, iwslt.TRAIN: 71}, PAIRS)
    assert "train.tags.de-en: 70 lines, must be 71" in capsys.readouterr().err
    assert not (tmp_path / "text").exists()


# ---- subwords, concatenation -------------------------------------------------------------------


def test_merges_are_learnt_on_both_languages_of_the_training_text(tmp_path):
    text = {"train.de": ["ab ab", "ab"], "train.en": ["xy xy xy ab"], "test.de": ["xyab ab zz"]}
    cut = subwords.in_subwords(text, "bpe", tmp_path, 4)
    # no other pair occurs twice
    assert (tmp_path / "bpe-4.codes").read_text() == "#version: 0.2\na b</w>\nx y</w>\n"
    assert cut["test.de"] == ["x@@ y@@ ab ab z@@ z"]


@pytest.mark.parametrize(
    "lengths, about, sizes",
    [
        ([10] * 7, 30, [3, 3, 1]),
        ([10, 10, 9], 24, [2, 1]),  # 29 is further from 24 than 20
        ([10, 10, 7], 24, [3]),  # 27 is nearer
        ([50, 5], 24, [1, 1]),
        ([], 24, []),
    ],
)
def test_sentences_join_while_that_brings_their_length_nearer(lengths, about, sizes):
    found = parallel_text.groups(lengths, about)
    assert [len(part) for part in found] == sizes
    assert [i for part in found for i in part] == list(range(len(lengths)))


def test_the_sentences_of_one_split_are_joined():
    texts = {"train.de": ["a", "b", "c"], "train.en": ["x", "y", "z"], "test.de": ["d", "e", "f"]}
    parts = [range(0, 2), range(2, 3)]
    assert iwslt.concatenated(texts, "train", parts) == {
        "train.de": ["a b", "c"],
        "train.en": ["x y", "z"],
        "test.de": ["d", "e", "f"],
    }


# ---- BLEU --------------------------------------------------------------------------------------

GENERATED = """INFO: some log line
S-2\tein hund bellt heute
T-2\ta dog barks today
H-2\t-0.4\ta dog barks today
D-2\t-0.4\ta dog barks today
H-2\t-0.9\tanother candidate of the same sentence
H-0\t-0.5\tthe cat &apos;s well-known tail is long .
P-0\t-0.1 -0.2
H-1\t-1.0\t
"""


def test_translations_are_put_into_the_order_of_the_corpus():
    found = bleu.in_corpus_order(GENERATED.splitlines(), 3)
    assert found == ["the cat &apos;s well-known tail is long .", "", "a dog barks today"]
    with pytest.raises(ValueError, match="translations of 3 sentences, must be 4"):
        bleu.in_corpus_order(GENERATED.splitlines(), 4)


def test_compounds_are_split_at_their_hyphens():
    assert (
        bleu.compounds_split("a well-known co-op - yes")
        == "a well ##AT##-##AT## known co ##AT##-##AT## op - yes"
    )


def test_every_token_of_the_references_counts_once():
    """Three tokens with the probabilities 1/2, 1/8 and 1/4 have 2 bits each in the mean."""
    output = ["S-0\tein Hund", "P-1\t-1.0000 -3.0000", "H-0\t-2.0\ta dog", "P-0\t-2.0000"]
    assert bleu.nats_a_token(output, 2) == pytest.approx(2 * math.log(2))
    with pytest.raises(ValueError, match="scores of 2 sentences, must be 3"):
        bleu.nats_a_token(output, 3)


@pytest.mark.parametrize("output", [[], ["P-0\t"]], ids=["no sentences", "no scores"])
def test_output_without_scores_of_tokens_is_refused(output):
    with pytest.raises(ValueError, match="has no scores of tokens"):
        bleu.nats_a_token(output, len(output))


def test_token_bleu_is_what_fairseq_score_prints(tmp_path, monkeypatch, capsys):
    hypotheses = ["the cat sat on the mat today", "a dog barks", ""]
    references = ["the cat sat on a mat today", "the dog barks loudly", "nothing here"]
    parallel_text.write_lines(tmp_path / "sys", hypotheses)
    parallel_text.write_lines(tmp_path / "ref", references)
    command = ["fairseq-score", "--sys", str(tmp_path / "sys"), "--ref", str(tmp_path / "ref")]
    monkeypatch.setattr(sys, "argv", command)
    score.cli_main()
    metric, details = bleu.token_bleu(hypotheses, references)
    assert capsys.readouterr().out.splitlines()[-1] == details
    assert details.startswith(f"BLEU4 = {metric:.2f}, ")
    assert 0 < metric < 100
    assert bleu.token_bleu(references, references)[0] == pytest.approx(100)


def test_word_level_output_is_scored_as_tokens_and_as_text(tmp_path, monkeypatch, capsys):
    tokens = ["the cat &apos;s well-known tail is long .", "yes .", "a dog barks today"]
    raw = ["The cat's well-known tail is long.", "Yes.", "A dog barks today"]
    parallel_text.write_lines(tmp_path / "out" / "generate-valid.txt", GENERATED.splitlines())
    parallel_text.write_lines(tmp_path / "reference" / "valid.tokens.en", tokens)
    parallel_text.write_lines(tmp_path / "reference" / "valid.raw.en", raw)
    flags = ["--beam", "4", "--gen-subset", "valid", "--cpu"]
    monkeypatch.setattr(sys, "argv", ["bleu", str(tmp_path), str(tmp_path / "out"), *flags])
    bleu.main()
    printed = capsys.readouterr().out.splitlines()
    expected = bleu.token_bleu([tokens[0], "", tokens[2]], tokens)
    plain = ["the cat's well-known tail is long.", "", "a dog barks today"]
    assert printed[0] == f"tokenised, lower case (fairseq-score): {expected[1]}"
    assert printed[2].endswith(bleu.text_bleu(plain, raw, lowercase=True)[1])
    assert printed[-1] == f"BLEU = {expected[0]:.2f}"
    assert (tmp_path / "out" / "valid.detokenised.en").read_text().splitlines() == plain


# ---- IWSLT14: the scripts ----------------------------------------------------------------------

# whether translations have fairseq's own limit, by VARIANT
LIMITED = {
    "bpe": True,
    "bpe-joined": True,
    "sentencepiece": True,
    "bpe-240": False,
    "bpe-joined-240": False,
}


def test_only_concatenated_sentences_have_longer_translations():
    lines = [f"VARIANT={name} examples/iwslt14_de_en/evaluate.sh" for name in LIMITED]
    for command, is_limited in zip(dry_run("; ".join(lines)), LIMITED.values(), strict=True):
        assert ("--max-len-a" not in command) == is_limited, command


@pytest.mark.parametrize("variant, last", [("bpe-joined", 4), ("sentencepiece", 2)])
@pytest.mark.slow
def test_iwslt_trains_and_is_evaluated(variant, last, archive, tmp_path):
    settings = {
        "DATA": tmp_path / "data",
        "ARCHIVES": tmp_path,
        "SAVE": tmp_path / "save",
        "VARIANT": variant,
    }
    # Without one right word, fairseq has no BLEU to choose by.
    settings["SELECT"] = "bleu" if variant == "bpe-joined" else "loss"
    flags = ["--any-counts", "--vocabulary", "120", "--workers", "1", "--joined-dictionary"]
    flags += ["--subwords", variant.removesuffix("-joined")]
    recipe("iwslt14_de_en/prepare.sh", *flags, **settings)
    tiny = [
        *TINY,
        "--eval-bleu-args",
        '{"beam": 1, "max_len_b": 4}',
        "--arch=mixhead_transformer_iwslt_de_en_h4",
    ]
    tiny += "--attention-scope self --share-all-embeddings --decoder-embed-dim 32".split()
    trained = recipe("iwslt14_de_en/train.sh", *tiny, **settings)
    assert bool(re.search(r"valid .*\| bleu [\d.]+", trained.stdout + trained.stderr)) == (
        variant == "bpe-joined"
    )
    printed = recipe("iwslt14_de_en/evaluate.sh", *SHORT, **settings).stdout.splitlines()
    assert re.fullmatch(r"BLEU = \d+\.\d\d", printed[-1])
    assert sum("BLEU" in line for line in printed) == last
    folder = tmp_path / "save" / "checkpoint_best.translations"
    assert len((folder / "test.en").read_text().splitlines()) == 20


# ---- Multi30k ----------------------------------------------------------------------------------


def write_multi30k(folder, pairs):
    """Write the archives; the last 40 pairs are for validation and test."""
    for split, part in {
        "train": pairs[:-40],
        "val": pairs[-40:-20],
        "test_2016_flickr": pairs[-20:],
    }.items():
        for language, lines in zip(("de", "en"), zip(*part)):
            text = "".join(f"{line}\n" for line in lines)
            (folder / f"{split}.{language}.gz").write_bytes(gzip.compress(text.encode()))


@pytest.mark.slow
def test_multi30k_trains_and_is_evaluated(pairs, tmp_path):
    settings = {"DATA": tmp_path / "data", "ARCHIVES": tmp_path, "SAVE": tmp_path / "save"}
    vocabulary = 300
    write_multi30k(tmp_path, pairs[:2040])
    flags = ["--any-counts", "--vocabulary", vocabulary, "--workers", 1]
    recipe("multi30k_de_en/prepare.sh", *flags, **settings)
    dictionaries = [
        (tmp_path / "data" / "binary" / f"dict.{language}.txt").read_text()
        for language in ("de", "en")
    ]
    assert dictionaries[0] == dictionaries[1]
    used = [line for line in dictionaries[0].splitlines() if not line.startswith("madeupword")]
    # sentencepiece has three control symbols
    assert 0.95 * vocabulary < len(used) <= vocabulary - 3

    trained = recipe("multi30k_de_en/train.sh", *TINY, **settings)
    assert "num_updates 3 " in trained.stdout + trained.stderr
    assert "(head_mixing): " in trained.stdout + trained.stderr

    printed = recipe("multi30k_de_en/evaluate.sh", *SHORT, **settings).stdout.splitlines()
    assert re.fullmatch(r"BLEU = \d+\.\d\d", printed[-1])
    assert printed[0].startswith(
        "detokenised, cased (sacreBLEU): nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|"
    )
    folder = tmp_path / "save" / "checkpoint_best.translations"
    assert len((folder / "test.en").read_text().splitlines()) == 20


# ---- a text that was made anew -----------------------------------------------------------------

MADE = {"iwslt": (iwslt, "bpe", 30), "multi30k": (multi30k, "binary", 200)}


@pytest.fixture(params=MADE)
def prepared(request, pairs, tmp_path, monkeypatch):
    """Return a folder that prepare.py has made, and a function that runs it again on some pairs."""
    module, name, vocabulary = MADE[request.param]

    def prepare(pairs):
        if module is iwslt:
            write_archive(tmp_path / "de-en.tgz", pairs)
        else:
            write_multi30k(tmp_path, pairs[:240])
        module.main(["--any-counts", "--workers", "1", "--vocabulary", str(vocabulary)])

    monkeypatch.setenv("DATA", str(tmp_path / "data"))
    monkeypatch.setenv("ARCHIVES", str(tmp_path))
    # fairseq's own numbers do not matter here, and its command takes seconds
    monkeypatch.setattr(translation_data, "preprocess", lambda *_: None)
    prepare(pairs)
    return tmp_path / "data" / name, prepare


def test_a_folder_is_refused_after_its_text_was_made_anew_from_another_archive(
    prepared, pairs, capsys
):
    folder, prepare = prepared
    shutil.rmtree(folder.parent / "text")
    prepare(pairs)  # the same text
    shutil.rmtree(folder.parent / "text")
    message = refused_here(capsys, prepare, pairs[1:])
    pattern = rf"{folder}: made with text \w{{12}}, not \w{{12}}; remove it, or choose another DATA"
    assert re.fullmatch(pattern, message)


def test_the_folder_of_an_older_version_stands_as_long_as_its_text(prepared, pairs, capsys):
    folder, prepare = prepared
    file = folder / "settings.json"
    settings = json.loads(file.read_text())["settings"]
    del settings["text"]
    file.write_text(json.dumps({"settings": settings}))
    prepare(pairs)

    shutil.rmtree(folder.parent / "text")
    for _ in range(2):  # a second try must not find a text that the first has made
        message = refused_here(capsys, prepare, pairs)
        assert message == (
            f"{folder}: an older version made it from a text that is gone; remove it, or choose "
            "another DATA"
        )
