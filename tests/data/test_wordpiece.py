"""Pieces are those of `transformers`, and each points to the characters that it stands for."""

# ruff: noqa: RUF001 (letters that look like others are meant)

import pickle

import pytest

from mixhead_plugin.data.wordpiece import UNKNOWN, Piece, WordPiece, read_vocabulary

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
OTHERS = "ABCÉéßσçñĭıﬃ日本語東京🗻𝒜한글한а.,;:!?'\"()[]$+<=>^`|~—„«»。、¿٪"
VOCABULARY = [
    *("[PAD]", UNKNOWN, "[CLS]", "[SEP]", "[MASK]"),
    *LETTERS,
    *OTHERS,
    *(f"##{character}" for character in LETTERS + OTHERS),
    *("the", "cafe", "##fe", "un", "##aff", "##able", "##ab", "##le", "##ﬀi", "straße", "Über", "##er"),
]
HARD = [
    "",
    " \t\r\n ",
    "the unaffable Café.",
    "ÉCOLE école e\u0301cole",  # composed and not
    "a\u0301\u0302b \u0301c",
    "naïve—„straße“ 'tis",
    "two  spaces\tand\ttabs\n\nand\xa0more\u3000of\u2003them\u2028\u2029",
    "日本語の東京 is東京!",
    "🗻 on𝒜b",  # beyond the basic plane
    "co\xadop zero\u200bwidth\u200d \ufeffmark",
    "con\x00trol\x07 re\ufffdplaced\x0b\x0c\x1c\x85",
    "private\ue000use \u0378unassigned",
    "$300 <b>x=1+2</b> ^`|~ ٪ ¿que? 3.14",
    "İstanbul ıI ΣΟΦΟΣ ﬃ ǅ",
    "한글 한",
    "a" * 100 + " " + "a" * 101 + " x",
    "unknown: жук ж, Ж",
]


@pytest.mark.parametrize("lowercase", [True, False])
def test_pieces_are_those_of_transformers(lowercase, tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in VOCABULARY), encoding="utf-8")
    theirs = transformers.BertTokenizerFast.from_pretrained(tmp_path, do_lower_case=lowercase)
    ours = WordPiece.from_file(tmp_path / "vocab.txt", lowercase)
    for text in HARD:
        expected = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        pieces = ours.pieces(text)
        assert [piece.piece for piece in pieces] == theirs.convert_ids_to_tokens(expected["input_ids"]), text
        assert ours.tokenise(text) == [piece.piece for piece in pieces]
        for piece, (start, end) in zip(pieces, expected["offset_mapping"]):
            assert piece.start == start and piece.end >= end, text
            dropped = text[end : piece.end]  # with us they belong to what they follow
            assert WordPiece(VOCABULARY, lowercase).pieces(dropped) == [], text


@pytest.mark.parametrize("text", HARD)
@pytest.mark.parametrize("lowercase", [True, False])
def test_every_visible_character_is_in_one_word(text, lowercase):
    """Nothing of the text gets lost between the pieces, and none overlap."""
    end = 0
    for piece in WordPiece(VOCABULARY, lowercase).pieces(text):
        assert WordPiece(VOCABULARY, lowercase).pieces(text[end : piece.start]) == []
        assert piece.start >= end or text[piece.start : piece.end] in "ﬃ한글"  # several pieces of one character
        assert piece.end > piece.start
        end = piece.end
    assert WordPiece(VOCABULARY, lowercase).pieces(text[end:]) == []


def test_a_piece_is_the_longest_that_fits():
    pieces = WordPiece(VOCABULARY).pieces("  Unaffable")
    assert pieces == [Piece("un", 2, 4), Piece("##aff", 4, 7), Piece("##able", 7, 11)]


def test_accents_and_invisible_characters_belong_to_what_they_follow():
    pieces = WordPiece(VOCABULARY).pieces("cafe\u0301\u200b the\xad.")
    assert pieces == [Piece("cafe", 0, 6), Piece("the", 7, 11), Piece(".", 11, 12)]


def test_what_the_vocabulary_cannot_spell_is_unknown_as_a_whole():
    assert WordPiece(["a", "##b"]).pieces("ab abc") == [Piece("a", 0, 1), Piece("##b", 1, 2), Piece(UNKNOWN, 3, 6)]


def test_special_tokens_in_a_text_are_text():
    assert WordPiece(VOCABULARY).tokenise("[SEP]") == ["[", "s", "##e", "##p", "]"]


def test_case_and_accents_stay_with_a_cased_vocabulary():
    assert WordPiece(VOCABULARY, lowercase=False).tokenise("Über é") == ["Über", "é"]
    assert WordPiece(VOCABULARY).tokenise("Über é") == ["u", "##b", "##er", "e"]


def test_a_tokeniser_goes_to_other_processes():
    copy = pickle.loads(pickle.dumps(WordPiece(VOCABULARY, lowercase=False)))
    assert copy.tokenise("Über é") == ["Über", "é"]


def test_pieces_that_are_line_breaks_to_python_stay_whole(tmp_path):
    (tmp_path / "vocab.txt").write_bytes("a\n\u2028\n\x85\nb".encode())
    assert read_vocabulary(tmp_path / "vocab.txt") == ["a", "\u2028", "\x85", "b"]
