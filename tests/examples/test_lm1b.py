"""The One Billion Word recipe works on a small archive of the same layout."""

import hashlib
import json
import math
import os
import random
import re
import shlex
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy
import pytest
import sentencepiece
from common.perplexity import Counts, Unknown, perplexity
from fairseq.data import Dictionary, indexed_dataset
from fairseq.data.data_utils import load_indexed_dataset
from lm1b import prepare, shards
from recipes import dry_run, parse, refused_here, script, tar_of

from tests.commands import LM_SIZES
from tests.helpers import run_here

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples" / "lm1b"
TOP = "1-billion-word-language-modeling-benchmark-r13output"
TRAINING = [f"training-monolingual.tokenized.shuffled/news.en-{i:05}-of-00100" for i in range(1, 5)]
HELD_OUT = [
    f"heldout-monolingual.tokenized.shuffled/news.en.heldout-{i:05}-of-00050" for i in range(3)
]
LINES = 150

# Characters that the benchmark does not treat as spaces, and words that are symbols to fairseq.
ODD = [
    "a\u00a0b",
    "line\u2028end",
    "na\u00efve",
    "\u2014",
    "<unk>",
    "</s>",
    "<pad>",
    "madeupword0000",
]
COMMON = ["the", "of", ",", ".", "market", "said", "a", "in", "shares", "year", *ODD]


def sentences(seed: int, lines: int = LINES) -> list[str]:
    dice = random.Random(seed)
    text = [" ".join(dice.choices(COMMON, k=dice.randint(1, 25))) for _ in range(lines)]
    text[3] += f" rare{seed}"  # once in all
    if seed < 2:
        text[4] += " twice"
    if seed < 3:
        text[5] += " thrice"
    return text


CORPUS = {name: sentences(seed) for seed, name in enumerate(TRAINING + HELD_OUT)}
TEXT = {
    "train": list(chain.from_iterable(CORPUS[name] for name in TRAINING)),
    "valid": CORPUS[HELD_OUT[1]],
    "test": CORPUS[HELD_OUT[0]],
    "heldout": list(chain.from_iterable(CORPUS[name] for name in HELD_OUT)),
}


def words(text: list[str]) -> list[str]:
    return " ".join(text).split(" ")


TRAINING_WORDS = words(TEXT["train"])
EXPECTED = {
    "training set": {
        "shards": 4,
        "lines": 4 * LINES,
        "tokens": len(TRAINING_WORDS),
        "types": len(set(TRAINING_WORDS)),
    },
    "held-out set": {"shards": 3, "lines": 3 * LINES},
    "valid": {"lines": LINES, "tokens": len(words(TEXT["valid"]))},
    "test": {"lines": LINES, "tokens": len(words(TEXT["test"]))},
}


def pack(path: Path, corpus: dict[str, list[str]]) -> None:
    """Write the archive: folders, files in no order, and some that the recipe must skip."""
    extra = {
        "README": ["words"],
        "heldout-monolingual.tokenized.shuffled/news.en-00000-of-00100": ["all", "of it"],
    }
    files = {}
    for name, lines in {**extra, **dict(reversed(corpus.items()))}.items():
        files[f"{TOP}/{name}"] = "".join(f"{line}\n" for line in lines).encode()
    tar_of(path, files)


@pytest.fixture(autouse=True)
def environment(plain_environment, tmp_path):
    plain_environment.setenv("DATA", str(tmp_path / "data"))
    plain_environment.setenv("GPUS", "0")
    return plain_environment


@pytest.fixture
def archive(tmp_path, environment):
    """Return a local archive, whose checksum becomes the published one."""
    folder = tmp_path / "archives"
    folder.mkdir()
    path = folder / prepare.ARCHIVE.file
    pack(path, CORPUS)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    environment.setattr(prepare, "ARCHIVE", prepare.ARCHIVE._replace(sha256=digest))
    environment.setenv("ARCHIVES", str(folder))
    return path


def run(*arguments, expected=EXPECTED) -> int:
    return prepare.main(["--workers", "1", *arguments], expected)


def data() -> Path:
    return Path(os.environ["DATA"])


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def decoded(folder: Path, name: str) -> list[list[str]]:
    """Return the lines of a set as fairseq reads them."""
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    lines = load_indexed_dataset(str(folder / name), None)
    return [[dictionary[i] for i in line] for line in lines]


def test_words_that_occur_three_times_the_most_frequent_first(archive, environment):
    """Read a shard in many blocks, and write four bytes a number.

    So it is done with the words of the whole benchmark.
    """
    environment.setattr(shards, "BLOCK", 1000)
    environment.setattr(indexed_dataset, "best_fitting_int_dtype", lambda size: numpy.int32)
    assert run("--form", "word") == 0
    dictionary = Dictionary.load(str(data() / "word" / "dict.txt"))
    counts = Counter(words(TEXT["train"]))
    for symbol in ("<unk>", "</s>", "<pad>"):
        del counts[symbol]
    known = [word for word, number in counts.items() if number >= 3]
    known.sort(key=lambda word: (-counts[word], word))
    assert dictionary.symbols[4 : 4 + len(known)] == known
    assert "thrice" in known
    assert "twice" not in known
    assert len(dictionary) % 8 == 0

    def in_known_words(line):
        return [*(word if word in known else "<unk>" for word in line.split(" ")), "</s>"]

    for name, text in TEXT.items():
        expected = list(map(in_known_words, text))
        assert decoded(data() / "word", name) == expected
        assert (data() / "word" / f"{name}.bin").stat().st_size == 4 * sum(map(len, expected))

    statistics = json.loads((data() / "word" / "statistics.json").read_text())
    unknown = sum(word not in known for word in words(TEXT["test"]))
    tokens = len(words(TEXT["test"])) + LINES
    assert statistics["test"] == {
        "lines": LINES,
        "tokens": tokens,
        "unknown": unknown,
        "words": tokens,
    }
    assert sorted(path.name for path in data().iterdir()) == [
        "counts",
        "prepare.lock",
        "text",
        "word",
    ]


def test_subwords_hold_the_whole_text(archive):
    # Characters of the text that the sample lacks become bytes.
    assert run("--form", "subword", "--subwords", "320", "--sample", "40") == 0
    folder = data() / "subword"
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    assert len(dictionary) == 320
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.model"))
    for name, text in TEXT.items():
        lines = decoded(folder, name)
        assert all(line.pop() == "</s>" for line in lines)
        assert [pieces.decode_pieces(line) for line in lines] == text
    of_training = chain.from_iterable(decoded(folder, "train"))
    assert any(piece.startswith("<0x") for piece in of_training)
    statistics = json.loads((folder / "statistics.json").read_text())
    assert [statistics[name]["unknown"] for name in TEXT] == [0] * 4
    assert statistics["test"]["words"] == len(words(TEXT["test"])) + LINES
    assert statistics["test"]["tokens"] == sum(map(len, decoded(folder, "test")))


def test_another_sample_is_refused_and_subwords_that_were_begun_with_it_are_learnt_again(
    archive, environment, capsys
):
    flags = ["--form", "subword", "--subwords", "320"]
    real = prepare._binarise

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    environment.setattr(prepare, "_binarise", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(*flags, "--sample", "40")
    environment.setattr(prepare, "_binarise", real)
    begun = (data() / "subword.parts" / "sentencepiece.model").read_bytes()
    run(*flags, "--sample", "80")
    folder = data() / "subword"
    assert (folder / "sentencepiece.model").read_bytes() != begun

    run(*flags, "--sample", "80")
    message = refused_here(capsys, run, *flags, "--sample", "40")
    assert message == (
        f"{folder}: made with --sample 80, not 40; remove it, or choose another DATA"
    )
    (folder / "settings.json").unlink()  # as an older version left it
    assert run(*flags, "--sample", "40") == 0


def test_an_interrupted_run_goes_on_with_the_shard_in_work(archive, environment, tmp_path):
    """Press Ctrl-C in the work on the sixth shard, after its folder was begun."""
    run("--form", "word")
    undisturbed = contents(data() / "word")
    environment.setenv("DATA", str(tmp_path / "again"))
    real = shards.binarise_shard
    seen = []

    def work(shard, folder, *rest):
        seen.append(shard.name)
        if len(seen) == 6:
            folder.mkdir()
            (folder / "tokens.bin").write_bytes(b"half")
            raise KeyboardInterrupt
        real(shard, folder, *rest)

    environment.setattr(shards, "binarise_shard", work)
    with pytest.raises(KeyboardInterrupt):
        run("--form", "word")
    assert not (data() / "word").exists()
    archive.write_bytes(b"is not needed any more")
    run("--form", "word")
    assert len(seen) == 8 and len(set(seen)) == 7
    assert contents(data() / "word") == undisturbed


def test_other_text_than_the_published_is_refused(archive, capsys):
    with pytest.raises(SystemExit):
        run(expected=prepare.PUBLISHED)
    assert "must be 6,206; " in capsys.readouterr().err


LOG = [
    "| INFO | Evaluated 1,200 tokens in 0.1s\n",
    "| INFO | Loss (base 2): 3.0000, Perplexity: 8.00\n",
]


def test_the_likelihood_is_shared_out_among_subwords_and_among_words():
    result = perplexity(LOG, Counts(tokens=1200, words=1000))
    assert result.token == 8
    assert math.log2(result.word) * 1000 == pytest.approx(3 * 1200)
    assert perplexity(LOG, Counts(tokens=1200, words=1200)) == (8, 8)


def test_tokens_that_are_only_read_have_the_mean_loss_of_the_others():
    result = perplexity(LOG, Counts(tokens=1240, words=1000), only_read=40)
    assert result.token == 8
    assert math.log2(result.word) * 1000 == pytest.approx(3 * 1240)


@pytest.mark.parametrize(
    "lines, tokens, reason",
    [
        (LOG, 1300, "1,200 of 1,300 tokens were evaluated"),
        ([], 1200, "no loss"),
        ([LOG[0], LOG[1].replace("3.0000", "nan").replace("8.00", "nan")], 1200, "the loss is nan"),
    ],
)
def test_a_part_of_the_set_has_no_perplexity(lines, tokens, reason):
    with pytest.raises(Unknown, match=reason):
        perplexity(lines, Counts(tokens, words=1000))


def command(step: str, *arguments: str, **environment) -> list[str]:
    """Return the command that a script would run."""
    (words,) = dry_run(shlex.join([str(RECIPE / f"{step}.sh"), *arguments]), **environment)
    return words


@pytest.mark.parametrize(
    "model, arch, form, length, tokens",
    [
        ("baevski", "sigsoftmax_transformer_lm_gbw_512", "word", 512, 65_536),
        ("fixhead", "l2_transformer_lm_lm1b", "subword", 256, 32_768),
    ],
)
def test_the_architecture_decides_and_the_batch_stays(model, arch, form, length, tokens):
    named = parse(command("train", "--arch", arch, GPUS=8))
    args = parse(command("train", MODEL=model, GPUS=8))
    assert named.arch == arch and args.arch.endswith(arch.partition("_")[2])
    assert Path(args.save_dir).parts[-2:] == ("lm1b", args.arch)
    for found in (named, args):
        assert (Path(found.data).name, found.tokens_per_sample) == (form, length)
        assert found.max_tokens * found.update_freq[0] * 8 == tokens
    evaluation = parse(command("evaluate", MODEL=model))
    assert (Path(evaluation.data).name, evaluation.tokens_per_sample) == (form, length)


TRAINED = {
    "word": (
        "--arch mixhead_transformer_lm_gbw_512 --adaptive-input-cutoff 4,8 "
        "--adaptive-softmax-cutoff 4,8"
    ),
    "subword": "--arch fixhead_transformer_lm_lm1b",
}


@pytest.mark.slow
@pytest.mark.parametrize("form", TRAINED)
def test_each_form_is_trained_on_and_evaluated(form, archive, tmp_path):
    run("--form", form, "--subwords", "320")
    statistics = json.loads((data() / form / "statistics.json").read_text())["valid"]
    tokens = statistics["tokens"]
    number = statistics["words"]
    flags = [
        *TRAINED[form].split(),
        *LM_SIZES,
        "--max-update=2",
        "--warmup-updates=1",
        "--update-freq=1",
        "--tokens-per-sample=32",
        "--max-tokens=256",
        "--num-workers=0",
    ]
    run_here(*command("train", *flags, SAVE=tmp_path / "save"))
    window = "--gen-subset valid --context-window 8 --tokens-per-sample 32"
    result = script(f"{RECIPE}/evaluate.sh {window}", SAVE=tmp_path / "save")
    figures = dict(re.findall(r"(perplexity per \w+) = (\S+)", result.stdout))
    by_token = float(re.search(r"Perplexity: (\S+)", result.stderr)[1])
    if form == "subword":
        assert tokens > 1.1 * number
        assert float(figures.pop("perplexity per subword")) == pytest.approx(by_token, rel=1e-3)
    assert [*figures] == ["perplexity per word"]
    by_word = by_token ** (tokens / number)
    assert float(figures["perplexity per word"]) == pytest.approx(by_word, rel=1e-3)
