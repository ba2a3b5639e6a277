"""Dictionaries, binarised data, text and JSON that cannot be right: one line that names the file, and no training."""

import json
import re
import shutil
import struct
from functools import partial

import pytest
from bert.answers import read_spans
from bert.squad_data import SquadError, read_squad

from mixhead_plugin import untrusted
from mixhead_plugin.errors import OptionError
from tests.commands import PLUGIN, run
from tests.robustness.conftest import LM_TRAIN, TRANSLATION_TRAIN, USE
from tests.robustness.inprocess import ROOT, refusal, seen


def slow(cases):
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


# ---- binarised data --------------------------------------------------------------------------------------------------

HEAD = 26  # bytes of an .idx before the lengths of its sentences


def keep(part, suffix, prefix):
    path = prefix.with_name(prefix.name + suffix)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part) if isinstance(part, float) else part])


def append(suffix, prefix):
    with prefix.with_name(f"{prefix.name}{suffix}").open("ab") as file:
        file.write(b"\0")


def remove(suffix, prefix):
    prefix.with_name(f"{prefix.name}{suffix}").unlink()


def write(suffix, content, prefix):
    prefix.with_name(f"{prefix.name}{suffix}").write_bytes(content)


def overwrite(suffix, offset, content, prefix):
    with prefix.with_name(f"{prefix.name}{suffix}").open("r+b") as file:
        file.seek(offset)
        file.write(content)


def no_sentences(prefix):
    keep(18, ".idx", prefix)
    with prefix.with_name(f"{prefix.name}.idx").open("ab") as file:
        file.write(struct.pack("<Q", 0))
    write(".bin", b"", prefix)


def swapped(prefix):
    """The index of another set."""
    other = "valid" if prefix.name.startswith("train") else "train"
    name = re.sub("^(train|valid|test)", other, prefix.name)
    shutil.copy(prefix.with_name(f"{name}.idx"), f"{prefix}.idx")


MAGIC = "is empty or no index that fairseq-preprocess wrote"
SIZE = r"has [\d,]+ bytes, .* (need|is of) [\d,]+; run fairseq-preprocess again"
MISSING = r"(\.idx|\.bin): is missing beside|has no set"
DATA = {
    "half a .bin": (partial(keep, 0.5, ".bin"), rf"\.bin: {SIZE}"),
    "a .bin without its last byte": (partial(keep, -1, ".bin"), rf"\.bin: {SIZE}"),
    "a .bin with a byte more": (partial(append, ".bin"), rf"\.bin: {SIZE}"),
    "an empty .bin": (partial(write, ".bin", b""), rf"\.bin: {SIZE}"),
    "no .bin": (partial(remove, ".bin"), MISSING),
    "no .idx": (partial(remove, ".idx"), MISSING),
    "an empty .idx": (partial(write, ".idx", b""), rf"\.idx: {MAGIC}"),
    "five bytes of an .idx": (partial(keep, 5, ".idx"), rf"\.idx: {MAGIC}"),
    "twenty bytes of an .idx": (partial(keep, 20, ".idx"), r"\.idx: is truncated after 20 bytes"),
    "half an .idx": (partial(keep, 0.5, ".idx"), rf"\.idx: {SIZE}"),
    "an .idx without its last byte": (partial(keep, -1, ".idx"), rf"\.idx: {SIZE}"),
    "an .idx with a byte more": (partial(append, ".idx"), rf"\.idx: {SIZE}"),
    "an .idx that is HTML": (partial(write, ".idx", b"<html>404</html>" * 10), rf"\.idx: {MAGIC}"),
    "another magic": (partial(overwrite, ".idx", 0, b"MMIDIDY"), rf"\.idx: {MAGIC}"),
    "a later format": (partial(overwrite, ".idx", 9, struct.pack("<Q", 2)), r"\.idx: is of format 2"),
    "tokens of no type": (partial(overwrite, ".idx", 17, b"\x63"), r"\.idx: is of format 1 with tokens of type 99"),
    "no sentences": (no_sentences, r"\.idx: has no sentences"),
    "10 ** 18 sentences": (partial(overwrite, ".idx", 18, struct.pack("<Q", 10**18)), rf"\.idx: {SIZE}"),
    "a length below 0": (partial(overwrite, ".idx", HEAD, struct.pack("<i", -5)), r"\.idx: is damaged"),
    "a length of 2 ** 31": (partial(overwrite, ".idx", HEAD, struct.pack("<i", 2**31 - 1)), rf"\.bin: {SIZE}"),
    "the .idx of another set": (swapped, rf"\.bin: {SIZE}"),
    "a token of no dictionary": (partial(overwrite, ".bin", 4, b"\xff\xff"), r"\.bin: has the token 65535, its dict"),
    "zeros": (lambda prefix: write(".idx", bytes(500), prefix), rf"\.idx: {MAGIC}"),
}
FEW = ("half a .bin", "no .bin", "half an .idx", "no sentences", "a token of no dictionary")


def reading(command, lab, data, save):
    """The command line that reads `data`, and the prefix of the files that it reads."""
    return {
        "train": (["fairseq-train", data, *TRANSLATION_TRAIN, "--save-dir", save], "train.de-en.de"),
        "train's target": (["fairseq-train", data, *TRANSLATION_TRAIN, "--save-dir", save], "train.de-en.en"),
        "generate": (["fairseq-generate", data, *USE, "--path", lab / "de-en.pt"], "test.de-en.de"),
        "validate": (["fairseq-validate", data, *USE, "--path", lab / "de-en.pt"], "valid.de-en.en"),
        "train a language model": (["fairseq-train", data, *LM_TRAIN, "--save-dir", save], "train"),
        "eval-lm": (["fairseq-eval-lm", data, *USE, "--path", lab / "text.pt"], "test"),
    }[command]


READERS = ("train", "train's target", "generate", "validate", "train a language model", "eval-lm")


def copy_of(lab, command, tmp_path):
    name = "text" if command in ("train a language model", "eval-lm") else "de-en"
    return shutil.copytree(lab / name, tmp_path / name)


def check_data_refused(kind, command, lab, tmp_path):
    damage, expected = DATA[kind]
    data = copy_of(lab, command, tmp_path)
    words, prefix = reading(command, lab, data, tmp_path / "save")
    if command == "validate":
        words = [*words, "--task", "translation"]
    damage(data / prefix)
    line = refusal(*words)
    assert re.search(expected, line), line
    assert str(data) in line
    assert not list(tmp_path.glob("save/*.pt"))


@pytest.mark.parametrize("kind, command", [(FEW[i % len(FEW)], command) for i, command in enumerate(READERS)])
def test_every_command_refuses_damaged_data(kind, command, lab, tmp_path):
    check_data_refused(kind, command, lab, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("kind", DATA)
def test_every_command_refuses_all_damaged_data(kind, command, lab, tmp_path):
    check_data_refused(kind, command, lab, tmp_path)


@pytest.mark.parametrize("kind", DATA)
def test_damaged_data_are_refused_before_they_are_read(kind, lab, tmp_path):
    damage, expected = DATA[kind]
    data = shutil.copytree(lab / "text", tmp_path / "text")
    untrusted.check_binarised(str(data / "test"), 30)
    damage(data / "test")
    with pytest.raises(OptionError, match=expected) as error:
        untrusted.check_binarised(str(data / "test"), 30)
    assert "\n" not in str(error.value)


LEGACY = {
    "half a .bin": (partial(keep, 0.5, ".bin"), SIZE),
    "half an .idx": (partial(keep, 0.5, ".idx"), SIZE),  # fairseq takes what is in the memory for the rest
    "twenty bytes of an .idx": (partial(keep, 20, ".idx"), "is truncated after 20 bytes"),
    "no .bin": (partial(remove, ".bin"), "is missing beside"),
    "a later format": (partial(overwrite, ".idx", 8, struct.pack("<Q", 9)), "is of format 9"),
}


@pytest.mark.parametrize("kind", LEGACY)
def test_damaged_data_of_the_older_format_are_refused(kind, tmp_path):
    import torch
    from fairseq.data.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "test.bin"))
    for length in range(3, 40):
        builder.add_item(torch.arange(length))
    builder.finalize(str(tmp_path / "test.idx"))
    untrusted.check_binarised(str(tmp_path / "test"))
    damage, expected = LEGACY[kind]
    damage(tmp_path / "test")
    with pytest.raises(OptionError, match=expected):
        untrusted.check_binarised(str(tmp_path / "test"))


# ---- dictionaries ----------------------------------------------------------------------------------------------------

DICTIONARIES = {
    "no count": (b"hund 5\nkatze\n", "line 2 is 'katze', must be '<symbol> <count>'"),
    "a word as the count": (b"hund five\n", "line 1 is 'hund five', must be"),
    "a count below 0": (b"hund 5\nkatze -1\n", "line 2 has the count -1, must be at least 0"),
    "a count with a point": (b"hund 5.5\n", "line 1 is 'hund 5.5', must be"),
    "a word twice": (b"hund 5\nkatze 4\nhund 3\n", "line 3 has 'hund' again, it was in line 1"),
    "another encoding": ("hört 5\n".encode("latin-1"), "is not UTF-8"),
    "UTF-16": ("hund 5\n".encode("utf-16"), "is not UTF-8"),
    "nothing": (b"", "has no symbols; must have a line '<symbol> <count>' for each"),
    "an empty line": (b"hund 5\n\nkatze 3\n", "line 2 is '', must be"),
    "zeros": (bytes(100), r"line 1 is '(\\x00)+', must be"),
    "HTML": (b"<html><title>Not Found</title></html>", "line 1 is '<html><title>Not Found</title></html>', must be"),
    "a checkpoint": (b"PK\x03\x04\x80\xff\x00\x00", "is not UTF-8"),
    "a line of a million": (b"x" * 1_000_000 + b"\n", "line 1 is 'x+', must be"),
    "a number of 5,000 digits": (b"hund " + b"9" * 5000 + b"\n", "line 1 is 'hund 9+', must be"),
}


@pytest.mark.parametrize("kind", DICTIONARIES)
def test_a_malformed_dictionary_is_refused_by_line(kind, tmp_path):
    from fairseq.data import Dictionary

    content, expected = DICTIONARIES[kind]
    path = tmp_path / "dict.de.txt"
    path.write_bytes(content)
    with pytest.raises(OptionError, match=rf"^{re.escape(str(path))}: {expected}") as error:
        Dictionary.load(str(path))
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)


def check_dictionary_refused(kind, command, lab, tmp_path):
    data = copy_of(lab, command, tmp_path)
    path = data / ("dict.txt" if data.name == "text" else "dict.de.txt")
    path.write_bytes(DICTIONARIES[kind][0])
    words, _ = reading(command, lab, data, tmp_path / "save")
    line = refusal(*words)
    assert re.search(rf": error: {re.escape(str(path))}: {DICTIONARIES[kind][1]}", line), line


@pytest.mark.parametrize(
    "kind, command", [("no count", "train"), ("nothing", "generate"), ("another encoding", "eval-lm")]
)
def test_commands_refuse_a_malformed_dictionary(kind, command, lab, tmp_path):
    check_dictionary_refused(kind, command, lab, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "generate", "train a language model", "eval-lm"])
@pytest.mark.parametrize("kind", DICTIONARIES)
def test_all_commands_refuse_every_malformed_dictionary(kind, command, lab, tmp_path):
    check_dictionary_refused(kind, command, lab, tmp_path)


@pytest.mark.parametrize("command", ["generate", "eval-lm", "restore"])
def test_a_dictionary_of_another_size_than_the_checkpoints(command, lab, tmp_path):
    data = copy_of(lab, command, tmp_path)
    for path in data.glob("dict*.txt"):
        symbols = len(path.read_text().splitlines()) + 4
        with path.open("a") as file:
            file.write("unheard 1\nunseen 1\n")
    if command == "restore":
        flags = ["--save-dir", tmp_path / "save", "--restore-file", lab / "de-en.pt"]
        words = ["fairseq-train", data, *TRANSLATION_TRAIN, *flags]
    else:
        words, _ = reading(command, lab, data, tmp_path / "save")
    line = refusal(*words)
    trained = lab / ("text.pt" if command == "eval-lm" else "de-en.pt")
    expected = f"{trained}: was trained with a dictionary of {symbols} symbols, that of the data has {symbols + 2}; "
    assert expected in line, line


def test_a_dictionary_that_lacks_symbols_of_the_data(lab, tmp_path):
    data = copy_of(lab, "train", tmp_path)
    for path in data.glob("dict*.txt"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    line = refusal("fairseq-train", data, *TRANSLATION_TRAIN, "--save-dir", tmp_path / "save")
    assert re.search(r"train\.de-en\.de\.bin: has the token \d+, its dictionary has 7 symbols", line), line


@pytest.mark.parametrize("what", ["missing", "a folder"])
def test_no_dictionary(what, lab, tmp_path):
    data = copy_of(lab, "generate", tmp_path)
    (data / "dict.en.txt").unlink()
    if what == "a folder":
        (data / "dict.en.txt").mkdir()
    line = refusal("fairseq-generate", data, *USE, "--path", lab / "de-en.pt")
    assert f"{data / 'dict.en.txt'}: " in line, line


# ---- text that fairseq's commands read -------------------------------------------------------------------------------

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
NOT_UTF8 = {
    "latin-1": "hört\n".encode("latin-1"),
    "half a character": "hund\nhö".encode()[:-1],
    "the first byte": b"\xff" * 20 + b"\n",
    "UTF-16": "hund katze\n".encode("utf-16"),
    "surrogates": "hund \ud800\n".encode("utf-8", "surrogatepass"),
}


def interactive(lab, *flags):
    return ["fairseq-interactive", lab / "de-en", "--user-dir", PLUGIN, "--cpu", "--path", lab / "de-en.pt", *flags]


def test_odd_lines_are_translated(lab):
    found = seen(*interactive(lab, "--beam", "2", "--max-len-b", "5"), stdin=b"".join(ODD.values()))
    assert found.status == 0, found.err[-2000:]
    lines = len(b"".join(ODD.values()).splitlines())  # at CR and LF alone, bytes know no others
    assert len(re.findall(r"^H-\d+\t", found.out, re.MULTILINE)) == lines


@pytest.mark.parametrize("kind", ["latin-1", "UTF-16", *slow(k for k in NOT_UTF8 if k not in ("latin-1", "UTF-16"))])
def test_lines_that_are_not_utf8_are_refused(kind, lab, tmp_path):
    path = tmp_path / "input"
    path.write_bytes(NOT_UTF8[kind])
    flags = ["--input", path] if kind == "latin-1" else []
    line = refusal(*interactive(lab, *flags), stdin=NOT_UTF8[kind])
    assert re.search(": error: the text to read is not UTF-8: byte 0x", line), line


def test_a_line_that_is_too_long_is_refused(lab):
    line = refusal(*interactive(lab), stdin=b"hund katze\n" + b"hund " * 3000 + b"\n")
    assert re.search(": error: sentence 0 has 3001 tokens, the model takes 1024 and 1024; must be shorter", line), line


@pytest.mark.slow
def test_a_line_of_a_million_words_is_refused(lab):
    line = refusal(*interactive(lab), stdin=b"hund " * 1_000_000 + b"\n")
    assert ": error: sentence 0 has 1000001" in line, line


def text_files(folder, de, en=None):
    for split in ("train", "valid", "test"):
        (folder / f"{split}.de").write_bytes(de)
        (folder / f"{split}.en").write_bytes(de if en is None else en)
    prefixes = [word for split in ("train", "valid", "test") for word in (f"--{split}pref", folder / split)]
    flags = ["--source-lang", "de", "--target-lang", "en", "--destdir", folder / "data", "--user-dir", PLUGIN]
    return ["fairseq-preprocess", *prefixes, *flags]


@pytest.mark.parametrize("kind, workers", [("latin-1", 3), ("the first byte", 3), *((kind, 1) for kind in NOT_UTF8)])
def test_preprocess_names_the_file_that_is_not_utf8(kind, workers, tmp_path):
    command = text_files(tmp_path, b"hund katze\n" * 50 + NOT_UTF8[kind] + b"hund katze\n" * 50, b"dog\n")
    line = refusal(*command, "--workers", workers)
    assert line == f"fairseq-preprocess: error: {tmp_path / 'train.de'}: is not UTF-8", line


def test_preprocess_takes_odd_lines(tmp_path):
    command = text_files(tmp_path, b"".join(ODD.values()) + b"hund katze\n" * 30)
    found = seen(*command)
    assert found.status == 0, found.err[-2000:]
    untrusted.check_binarised(str(tmp_path / "data" / "train.de-en.de"))


@pytest.mark.slow
def test_a_training_takes_odd_lines(tmp_path):
    assert seen(*text_files(tmp_path, b"".join(ODD.values()) + b"hund katze\n" * 30)).status == 0
    trained = seen("fairseq-train", tmp_path / "data", *TRANSLATION_TRAIN, "--save-dir", tmp_path / "save")
    assert trained.status == 0, trained.err[-2000:]


def test_sides_of_different_lengths_are_refused(tmp_path):
    """A lone CR ends a line for fairseq-preprocess, on the side that has it."""
    assert seen(*text_files(tmp_path, b"hund\rkatze\n" * 30, b"dog cat\n" * 30)).status == 0
    line = refusal("fairseq-train", tmp_path / "data", *TRANSLATION_TRAIN, "--save-dir", tmp_path / "save")
    assert ": error: data: source and target have different numbers of sentences" in line, line


# ---- text that the project reads -------------------------------------------------------------------------------------


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
    from bert.squad_data import locate

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


@pytest.mark.parametrize("kind", ["too many", *slow(kind for kind in CONFIGS if kind != "too many")])
def test_a_malformed_config_is_not_converted(kind, tmp_path):
    (tmp_path / "config.json").write_bytes(CONFIGS[kind])
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    line = refusal(str(ROOT / "examples" / "bert" / "convert_bert.py"), "to-fairseq", tmp_path, tmp_path / "out")
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
    from bert.glue.rows import read_table
    from bert.glue.tasks import TASKS

    content, expected = TABLES[kind]
    path = tmp_path / "train.tsv"
    path.write_bytes(content)
    line = said_in_the_end(capsys, read_table, path, TASKS["SST-2"], True)
    assert line.startswith(f"prepare: error: {path}: ") and expected in line, line


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


@pytest.mark.parametrize(
    "kind", ["half an .idx", "twenty bytes of an .idx", "an empty .idx", "no .idx", "another magic"]
)
def test_the_perplexity_of_damaged_data_is_not_known(kind, recipes, lab, tmp_path):
    from common.perplexity import Unknown, counts_of_index

    data = copy_of(lab, "eval-lm", tmp_path)
    assert counts_of_index(data, "test").tokens > 0
    DATA[kind][0](data / "test")
    with pytest.raises(Unknown, match=re.escape(str(data / "test.idx"))):
        counts_of_index(data, "test")


@pytest.mark.slow
def test_the_real_commands_say_it_in_one_line(lab, tmp_path):
    """Not in a fork: as a user types them."""
    data = copy_of(lab, "train", tmp_path)
    keep(0.5, ".bin", data / "train.de-en.de")
    result = run("fairseq-train", data, *TRANSLATION_TRAIN, "--save-dir", tmp_path / "save", check=False)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith(f"fairseq-train: error: {data}/train.de-en.de.bin: has ")
