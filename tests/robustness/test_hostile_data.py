"""Text, tables and JSON that cannot be right: each reader refuses them in one line that names the file."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from mixhead_plugin.data.answers import read_spans
from mixhead_plugin.data.squad import SquadError, read_squad
from mixhead_plugin.data.wordpiece import WordPiece
from mixhead_plugin.errors import OptionError
from tests.commands import PLUGIN

ROOT = Path(PLUGIN).parent

ODD = {
    "empty lines": b"\n\n\n",
    "white space": b" \t \n\xc2\xa0\n",
    "NUL bytes": b"hund \0 katze\n\0\n",
    "CR and LF": b"hund katze\r\nkatze hund\r\n",
    "a byte-order mark": b"\xef\xbb\xbfhund katze\n",
    "U+2028 and U+0085": "hund\u2028katze\u0085mann\n".encode(),
    "no line end": b"hund katze",
    "noncharacters": "hund \uffff \U0010ffff katze\n".encode(),
    "right to left": "\u202ehund \u0627\u0644 katze\n".encode(),
}


@pytest.mark.parametrize("kind", ODD)
def test_wordpiece_finds_every_piece_of_odd_text(kind):
    text = ODD[kind].decode()
    tokeniser = WordPiece(["hund", "katze", "mann", "##e", "[UNK]"])
    pieces = tokeniser.pieces(text)
    assert all(0 <= piece.start < piece.end <= len(text) for piece in pieces)
    assert [piece.piece for piece in pieces] == tokeniser.tokenise(text)
    assert [piece.piece for piece in pieces].count("hund") == text.count("hund")


def test_wordpiece_of_a_million_letters_and_of_a_million_words():
    tokeniser = WordPiece(["a", "##a", "[UNK]"])
    assert [piece.piece for piece in tokeniser.pieces("a" * 1_000_000)] == ["[UNK]"]
    assert len(tokeniser.tokenise("a " * 1_000_000)) == 1_000_000


QUESTION = {"id": "1", "question": "who?", "answers": [{"text": "a", "answer_start": 0}]}


def squad_with(**changes):
    paragraph = {"context": "a b", "qas": [{**QUESTION, **changes.pop("question", {})}]}
    return {"data": [{"title": "t", "paragraphs": [{**paragraph, **changes}]}]}


def as_json(value):
    return json.dumps(value).encode()


SQUADS = {
    "nothing": (b"", "Expecting value"),
    "half": (as_json(squad_with())[:60], "Unterminated|Expecting"),
    "not UTF-8": (b'{"data": "\xff"}', "utf-8"),
    "HTML": (b"<html></html>", "Expecting value"),
    "a list": (b"[]", "the file: must be an object"),
    "a number": (b"17", "the file: must be an object"),
    "null": (b"null", "the file: must be an object"),
    "NaN": (b"NaN", "the file: must be an object"),
    "no data": (b"{}", "the file: has no data"),
    "data of words": (as_json({"data": "all"}), "the file: data must be a list"),
    "an article of words": (as_json({"data": ["all"]}), r"data\[0\]: must be an object"),
    "no paragraphs": (as_json({"data": [{}]}), r"data\[0\]: has no paragraphs"),
    "a context of numbers": (as_json(squad_with(context=3)), r"paragraphs\[0\]: context must be a string"),
    "questions of null": (as_json(squad_with(qas=None)), "qas must be a list"),
    "a start of NaN": (as_json(squad_with()).replace(b'start": 0', b'start": NaN'), "answer_start must be a whole"),
    "a start of words": (as_json(squad_with()).replace(b'start": 0', b'start": "0"'), "answer_start must be a whole"),
    "a start of true": (as_json(squad_with()).replace(b'start": 0', b'start": true'), "answer_start must be a whole"),
    "a number of 5,000 digits": (
        as_json(squad_with()).replace(b'start": 0', b'start": ' + b"9" * 5000),
        "Exceeds the limit",
    ),
    "a name twice": (as_json(squad_with()).replace(b'"context"', b'"qas": [], "context"'), "an object has 'qas' twice"),
    "deep nesting": (b"[" * 100_000 + b"]" * 100_000, "is nested too deeply"),
    "deep nesting of objects": (b'{"data":' * 100_000, "is nested too deeply"),
    "two ids": (as_json({"data": squad_with()["data"] * 2}), "the id '1' was there before"),
    "SQuAD 2.0": (as_json(squad_with(question={"is_impossible": True})), "is_impossible is of SQuAD 2.0"),
    "a byte-order mark": (b"\xef\xbb\xbf" + as_json(squad_with()), "BOM"),
}


@pytest.mark.parametrize("kind", SQUADS)
def test_a_malformed_squad_is_refused(kind, tmp_path):
    content, expected = SQUADS[kind]
    path = tmp_path / "train.json"
    path.write_bytes(content)
    with pytest.raises(SquadError, match=rf"^{re.escape(str(path))}: .*({expected})") as error:
        read_squad(path)
    assert "\n" not in str(error.value)


def test_an_answer_far_outside_its_context_is_nowhere(tmp_path):
    from mixhead_plugin.data.squad import locate

    path = tmp_path / "train.json"
    path.write_bytes(as_json(squad_with()).replace(b'start": 0', b'start": ' + b"9" * 100))
    squad = read_squad(path)
    assert locate(squad.contexts[0], squad.questions[0].answers) is None


SPANS = [
    b"",
    b"{",
    b"[]",
    b"17",
    b"null",
    b'{"id": "1"}',
    b'{"id": 1, "window": 3, "spans": []}',
    b"\xff",
    b"[" * 100_000,
]


@pytest.mark.parametrize("line", SPANS, ids=range(len(SPANS)))
def test_malformed_spans_are_refused(line, tmp_path):
    path = tmp_path / "nbest"
    path.write_bytes(line + b"\n")
    with pytest.raises(SquadError, match="line 1 is not of fairseq-validate --nbest-file"):
        read_spans(path, [])


GRIDS = {
    "nothing.toml": (b"", "the file: must be a table"),
    "half.toml": (b'example = "wiki', "Illegal|Unterminated|closing|Unclosed"),
    "twice.toml": (b'example = "a"\nexample = "b"\n', "Cannot overwrite"),
    "not-utf8.toml": (b'example = "\xff"\n', "utf-8"),
    "numbers.toml": (b'example = 3\n[axes.a]\nb = "--c"\n', "example: must be a text"),
    "axes-of-numbers.toml": (b'example = "a"\naxes = 3\n', "axes: must be a table"),
    "nothing.json": (b"", "Expecting value"),
    "half.json": (b'{"example": "wikitext2", ', "Expecting"),
    "a-list.json": (b"[]", "the file: must be a table"),
    "twice.json": (b'{"example": "a", "example": "b"}', "'example' is there twice"),
    "deep.json": (b"[" * 100_000, "nested too deeply"),
    "nan.json": (b'{"example": "wikitext2", "axes": NaN}', "axes: must be a table"),
    "null.json": (b'{"example": "wikitext2", "axes": {"a": {"b": null}}}', "must be flags, or train and evaluate"),
    "digits.json": (b'{"example": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
    "unknown.json": (b'{"example": "wikitext2", "axes": {"a": {"b": ""}}, "code": "x"}', "code: must be among"),
    "leads-out.json": (b'{"example": "../../etc", "axes": {"a": {"b": ""}}}', "must be a file that ends in"),
    "a-quote.json": (b'{"example": "wikitext2", "axes": {"a": {"b": "--c \\"d"}}}', "No closing quotation"),
    "nul.json": (b'{"example": "wiki\\u0000text2", "axes": {"a": {"b": ""}}}', "must be a file that ends in"),
}


def refused(capsys, monkeypatch, script, *arguments):
    """Return the one line that a script of this project ends with."""
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
    monkeypatch.syspath_prepend(str(script.parent))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    said = ended.value.code if isinstance(ended.value.code, str) else capsys.readouterr().err
    assert ended.value.code not in (0, None) and "Traceback" not in said
    return said.strip().splitlines()[-1]


@pytest.mark.parametrize("name", GRIDS)
def test_a_malformed_grid_is_refused(name, tmp_path, capsys, monkeypatch):
    content, expected = GRIDS[name]
    (tmp_path / name).write_bytes(content)
    line = refused(capsys, monkeypatch, ROOT / "examples" / "sweep.py", tmp_path / name, "--out", tmp_path / "out")
    assert re.match("sweep: error: ", line) and re.search(expected, line), line
    assert not list(tmp_path.glob("out/*"))


CONFIGS = {
    "nothing": b"",
    "a list": b"[]",
    "half": b'{"hidden_size": 1',
    "deep": b"[" * 100_000,
    "not UTF-8": b'{"a": "\xff"}',
    "words": b'{"hidden_size": "large"}',
    "true": b'{"hidden_size": true}',
    "below 0": b'{"num_hidden_layers": -1}',
    "too many": b'{"num_hidden_layers": 1000000000000}',
    "digits": b'{"num_hidden_layers": ' + b"9" * 5000 + b"}",
    "NaN": b'{"layer_norm_eps": NaN}',
    "infinite": b'{"layer_norm_eps": 1e999}',
    "another model": b'{"model_type": "gpt2"}',
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_malformed_config_is_not_converted(kind, tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_bytes(CONFIGS[kind])
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    script = ROOT / "scripts" / "convert_bert.py"
    line = refused(capsys, monkeypatch, script, "to-fairseq", tmp_path, tmp_path / "out")
    assert line.startswith(f"convert_bert.py: error: {tmp_path / 'config.json'}: "), line
    assert not (tmp_path / "out").exists()


def said_in_the_end(capsys, function, *arguments):
    """The one line that a function of the recipes ends the program with."""
    with pytest.raises(SystemExit) as ended:
        function(*arguments)
    assert ended.value.code == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if ": error: " in line]
    assert len(lines) == 1
    return lines[0]


HEADER = b"index\tsentence\tlabel\n"
TABLES = {
    "nothing": (b"", "is empty"),
    "not UTF-8": (HEADER + b"1\th\xf6rt\t1\n", "line 2 is not UTF-8"),
    "HTML": (b"<html>\n", "has no column sentence, label, but <html>"),
    "no label": (b"index\tsentence\n", "has no column label"),
    "zeros": (bytes(100), "has no column"),
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_malformed_table_of_glue_is_refused(kind, recipes, tmp_path, capsys):
    from glue.rows import read_table
    from glue.tasks import TASKS

    content, expected = TABLES[kind]
    path = tmp_path / "train.tsv"
    path.write_bytes(content)
    line = said_in_the_end(capsys, read_table, path, TASKS["SST-2"], True)
    assert line.startswith(f"prepare: error: {path}: ") and expected in line, line


def test_odd_rows_of_glue_are_read_or_listed(recipes, tmp_path):
    from glue.rows import read_table
    from glue.tasks import TASKS

    rows = ["a\0b", "a\u2028b", "a\x85b", "a\r", "a\x1b[2J", "", "x " * 1_000_000]
    content = "".join(f"{row}\t1\n" for row in rows) + "no label\n\n\t\t\t\n" + "a\tNaN\n"
    path = tmp_path / "train.tsv"
    path.write_bytes(b"\xef\xbb\xbfsentence\tlabel\n" + content.encode())
    table = read_table(path, TASKS["SST-2"], True)
    assert [example.texts[0] for example in table.examples] == [row.strip() for row in rows]
    assert table.left_out


def test_parallel_text_breaks_at_line_feeds_alone(recipes, tmp_path, capsys):
    from common.parallel_text import pairs_of, read_lines

    path = tmp_path / "train.de"
    path.write_bytes("eins\r\nzwei\u2028drei\x85vier\0\n\n".encode() + b"x " * 1_000_000)
    lines = read_lines(path)
    assert [line[:20] for line in lines[:3]] == ["eins\r", "zwei\u2028drei\x85vier\0", ""] and len(lines) == 4
    assert "4 German and 3 English lines" in said_in_the_end(capsys, pairs_of, lines, lines[1:], "train")
    path.write_bytes(b"eins\nzw\xe4i\n")
    assert said_in_the_end(capsys, read_lines, path) == f"prepare: error: {path}: not UTF-8 at byte 7"


RECORDS = [b"", b"[]", b"17", b"null", b"{", b"[" * 100_000, b"\xff", b'"settings"']


@pytest.mark.parametrize("content", RECORDS, ids=range(len(RECORDS)))
def test_settings_that_prepare_did_not_write(content, recipes, tmp_path, capsys):
    from common.perplexity import Unknown
    from common.translation_data import is_ready
    from lm1b.perplexity import statistics

    for name in ("settings.json", "statistics.json"):
        (tmp_path / name).write_bytes(content)
    line = said_in_the_end(capsys, is_ready, tmp_path, {"--vocabulary": 10})
    assert str(tmp_path) in line, line
    with pytest.raises(Unknown):
        statistics(tmp_path, "test")


@pytest.mark.parametrize("part", [0, 5, 20, 0.5, None], ids=str)
def test_the_perplexity_of_a_damaged_index_is_not_known(part, recipes, text_data, tmp_path):
    from common.perplexity import Unknown, counts_of_index

    index = tmp_path / "test.idx"
    whole = (text_data / "test.idx").read_bytes()
    index.write_bytes(whole)
    assert counts_of_index(tmp_path, "test").tokens > 0
    index.unlink() if part is None else index.write_bytes(whole[: int(part * len(whole)) if part == 0.5 else part])
    with pytest.raises(Unknown, match=re.escape(str(index))):
        counts_of_index(tmp_path, "test")


IMPORTANCES = [b"", b"[]", b"{}", b'{"sets": []}', b'{"sets": [{"attentions": 3}]}', b"[" * 100_000, b"\xff", b"NaN"]


@pytest.mark.parametrize("content", IMPORTANCES, ids=range(len(IMPORTANCES)))
def test_malformed_importances_are_refused(content, tmp_path):
    from mixhead_plugin.analysis.head_numbers import read_importance

    path = tmp_path / "importance.json"
    path.write_bytes(content)
    with pytest.raises(OptionError, match=f"--importance {re.escape(str(path))}: "):
        read_importance(str(path), {})


LOGS = [
    b"",
    b"\0" * 1000,
    b"\xff\xfe\n",
    b"{" * 100_000 + b"\n",
    b'{"loss": NaN}\n',
    b'[{"a":' * 50_000,
    b"x" * 2_000_000,
]


@pytest.mark.parametrize("content", LOGS, ids=range(len(LOGS)))
def test_logs_without_figures_are_refused(content, tmp_path):
    from mixhead_plugin.analysis.curves import read

    path = tmp_path / "train.log"
    path.write_bytes(content)
    with pytest.raises(OptionError, match=f"{re.escape(str(path))}: has no JSON of fairseq-train"):
        read(str(path))
