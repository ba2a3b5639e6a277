"""Pieces are those of `transformers`, and each points to the characters that it stands for."""

import pytest
from bert.wordpiece import SPECIAL, characters_of, read_vocabulary, wordpiece, write_dictionary

from mixhead_plugin.errors import OptionError

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
OTHERS = "ABCÉéßσçñĭıﬃ日本語東京🗻𝒜한글한а.,;:!?'\"()[]$+<=>^`|~—„«»。、¿٪"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *OTHERS]
VOCABULARY += [f"##{character}" for character in LETTERS + OTHERS]
VOCABULARY = [
    *dict.fromkeys(VOCABULARY),
    *"the cafe ##fe un ##aff ##able ##ab ##le ##ﬀi straße Über ##er".split(),
]
HARD = [
    "",
    " \t\r\n ",
    "the unaffable Café.",
    "ÉCOLE école e\u0301cole",  # composed and not
    "a\u0301\u0302b \u0301c cafe\u0301\u200b the\xad.",
    "naïve—„straße“ 'tis",
    "two  spaces\tand\ttabs\n\nand\xa0more\u3000of\u2003them\u2028\u2029",
    "日本語の東京 is東京!",
    "🗻 on𝒜b",  # beyond the basic plane
    "co\xadop zero\u200bwidth\u200d \ufeffmark",
    "con\x00trol\x07 re\ufffdplaced\x0b\x0c\x1c\x85",
    "private\ue000use \u0378unassigned",
    "$300 <b>x=1+2</b> ^`|~ ٪ ¿que? 3.14",
    "İstanbul ıI ΣΟΦΟΣ ﬃ ǅ",
    "한글 한",
    "a" * 100 + " " + "a" * 101 + " x",
    "[SEP] <s> unknown: жук ж, Ж",
]


@pytest.fixture(scope="module")
def tokenisers(tmp_path_factory):
    """Return the dictionary, and the tokenisers by `lowercase`."""
    dictionary = write_dictionary(
        VOCABULARY, tmp_path_factory.mktemp("pieces") / "dict.txt", "vocab.txt"
    )
    return dictionary, {lowercase: wordpiece(dictionary, lowercase) for lowercase in (True, False)}


def pieces(tokenisers, text, lowercase=True):
    dictionary, by_case = tokenisers
    encoding = by_case[lowercase].encode(text, add_special_tokens=False)
    return [
        (dictionary[number], *found)
        for number, found in zip(encoding.ids, characters_of(text, encoding))
    ]


@pytest.mark.parametrize("lowercase", [True, False])
def test_pieces_are_those_of_transformers(lowercase, tokenisers, tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text(
        "".join(f"{piece}\n" for piece in VOCABULARY), encoding="utf-8"
    )
    theirs = transformers.BertTokenizerFast.from_pretrained(tmp_path, do_lower_case=lowercase)
    for text in HARD:
        text = text.replace("[SEP]", "")  # a special token to `transformers`
        expected = theirs(text, add_special_tokens=False).input_ids
        names = [SPECIAL.get(name, name) for name in theirs.convert_ids_to_tokens(expected)]
        assert [name for name, _, _ in pieces(tokenisers, text, lowercase)] == names, text


@pytest.mark.parametrize("lowercase", [True, False])
def test_the_characters_between_pieces_are_dropped_ones_and_spaces(lowercase, tokenisers):
    for text in HARD:
        found = pieces(tokenisers, text, lowercase)
        end = 0
        for _, start, stop in found:
            assert pieces(tokenisers, text[end:start], lowercase) == [], text
            assert start >= end or text[start:stop] in "ﬃ한글"  # several pieces of one character
            assert stop > start and text[stop : stop + 1].strip() in {
                "",
                *(text[other] for _, other, _ in found),
            }
            end = stop
        assert pieces(tokenisers, text[end:], lowercase) == [], text


@pytest.mark.parametrize(
    "text, expected",
    [
        ("  Unaffable", [("un", 2, 4), ("##aff", 4, 7), ("##able", 7, 11)]),
        # Accents and invisible characters belong to the character before them.
        ("cafe\u0301\u200b the\xad.", [("cafe", 0, 6), ("the", 7, 11), (".", 11, 12)]),
        ("z\ud7ff ab", [("<unk>", 0, 2), ("a", 3, 4), ("##b", 4, 5)]),
        ("[SEP]", [("[", 0, 1), ("s", 1, 2), ("##e", 2, 3), ("##p", 3, 4), ("]", 4, 5)]),
        ("<s>", [("<", 0, 1), ("s", 1, 2), (">", 2, 3)]),
    ],
)
def test_a_piece_knows_its_characters(text, expected, tokenisers):
    assert pieces(tokenisers, text) == expected


def test_another_file_is_no_vocabulary(tmp_path):
    (tmp_path / "vocab.txt").write_bytes(b"[CLS]\n[SEP]\n")
    with pytest.raises(OptionError, match=r"has no \[PAD\], \[UNK\], \[MASK\]"):
        read_vocabulary(tmp_path / "vocab.txt")


def test_a_vocabulary_that_fairseq_reads_otherwise_is_refused(tmp_path):
    with pytest.raises(OptionError, match="cannot tell the words of this vocabulary apart"):
        write_dictionary([*SPECIAL, "a", "a"], tmp_path / "dict.txt", "vocab.txt")
