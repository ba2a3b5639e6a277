"""The demo corpus: sizes, spelling and vocabulary of a sample, and the command line."""

import re
import subprocess
import sys
from pathlib import Path

from german_english import generate
from german_english.lexicon.adjectives import ADJECTIVES
from german_english.lexicon.compounds import COMPOUNDS
from german_english.lexicon.nouns import SIMPLE_NOUNS
from german_english.lexicon.verbs import VERBS

CORPUS = Path(__file__).resolve().parents[2] / "examples" / "demo" / "corpus.py"


def test_sizes(splits):
    assert {name: len(part) for name, part in splits.items()} == {"train": 2600, "valid": 150, "test": 150}


def test_no_sentence_twice_on_either_side(pairs):
    for side in zip(*pairs):
        assert len(set(side)) == len(side)


def test_same_seed_same_corpus():
    assert generate(5, 100, 10, 10) == generate(5, 100, 10, 10)


def test_other_seed_other_corpus():
    first, second = (generate(seed, 100, 0, 0)["train"] for seed in (5, 6))
    assert len(set(first) & set(second)) < 10


def test_larger_request_keeps_the_beginning():
    assert generate(5, 150, 0, 0)["train"][:100] == generate(5, 100, 0, 0)["train"]


def test_spelling(pairs):
    german = re.compile(r"[A-ZÄÖÜ][A-Za-zÄÖÜäöüßé,\- ]*[a-zäöüßé][.?!]")
    english = re.compile(r"[A-Z][A-Za-zäöüé,'\- ]*[a-zäöüé'][.?!]")
    for de, en in pairs:
        assert german.fullmatch(de), de
        assert english.fullmatch(en), en
        assert de[-1] == en[-1]
        for text in (de, en):
            assert "  " not in text and " ," not in text and ",," not in text, text
            assert not re.search(r"(?i)\b(\w+) \1\b", re.sub(r"\b(die|das|der|sie|had|on) \1\b", "", text)), text


def test_lengths(pairs):
    lengths = [len(de.split()) for de, _ in pairs]
    assert min(lengths) >= 4 and max(lengths) <= 22
    assert 9 < sum(lengths) / len(lengths) < 12


def test_vocabulary(pairs):
    words = [{w.strip(".,?!") for sentence in side for w in sentence.split()} for side in zip(*pairs)]
    assert len(words[0]) > 1800
    assert len(words[1]) > 900


def test_lexicon_is_rich():
    assert len(SIMPLE_NOUNS) >= 120
    assert len(COMPOUNDS) >= 200
    assert len(VERBS) >= 90
    assert len(ADJECTIVES) >= 50


def test_articles_of_the_corpus(pairs):
    for _, en in pairs:
        for article, word in re.findall(r"\b([Aa]n?) (\w+)", en):
            vowel = word[0].lower() in "aeiou" and not word.startswith(("uni", "use", "eu", "one"))
            assert (vowel or word in ("hour", "honest")) == (article.lower() == "an"), en


def test_command_line(tmp_path):
    command = [sys.executable, CORPUS, "new/corpus", *"--seed 2 --train 30 --valid 4 --test 5".split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 1
    expected = generate(2, 30, 4, 5)
    assert {path.name for path in (tmp_path / "new" / "corpus").iterdir()} == {
        f"{split}.{language}" for split in expected for language in ("de", "en")
    }
    for split, pairs in expected.items():
        for side, language in enumerate(("de", "en")):
            text = (tmp_path / "new" / "corpus" / f"{split}.{language}").read_text(encoding="utf-8")
            assert text == "".join(pair[side] + "\n" for pair in pairs)


def test_the_demo_imports_generate_from_corpus():
    import corpus

    assert corpus.generate is generate
