"""WikiText-2 and WikiText-103 are prepared, trained on and evaluated.

Their archives have the same layout.
"""

import io
import re
import sys

import pytest
from common import archives, masked, perplexity, wikitext
from common.perplexity import Counts, Cut, Perplexity
from common.wikitext import articles
from fairseq import options
from fairseq.data import Dictionary, data_utils
from fairseq.examples.truncated_bptt.truncated_bptt_lm_task import (
    TruncatedBPTTLMConfig,
    TruncatedBPTTLMTask,
)
from fairseq_cli.preprocess import main as fairseq_preprocess
from recipes import dry_run, script, zip_of
from wikitext2.prepare import WIKITEXT2
from wikitext103.prepare import WIKITEXT103

from tests.helpers import run_here

pytestmark = pytest.mark.usefixtures("plain_environment")

CORPORA = {"wikitext2": WIKITEXT2, "wikitext103": WIKITEXT103}
TINY = """--decoder-layers 1 --decoder-embed-dim 16 --decoder-input-dim 16 --decoder-output-dim 16
    --decoder-ffn-embed-dim 16 --decoder-attention-heads 2 --num-workers 0
    --log-format json --log-interval 1"""


def article(title, *sections):
    """Return an article as WikiText writes it.

    Blank lines are around the titles, spaces around everything.
    """
    lines = [f" = {title} = ", " "]
    for section in sections:
        lines += [
            " ",
            f" = = {section} = = ",
            " ",
            f" The {section} of {title} is <unk> , 1 @,@ 024 \u2013 so . ",
            " ",
        ]
    return "".join(f"{line}\n" for line in lines)


TEXTS = {
    # One line of text looks like a title.
    "train": " \n".join(
        [
            "",
            article("A", "x", "y") + " Key : Pld \n = Played ; L = \n",
            article("B"),
            article("C", "z"),
        ]
    ),
    "valid": " \n" + article("B", "x"),
    "test": " \n" + article("C", "y") + " \n" + article("A", "x"),
}


@pytest.fixture
def corpus(request, server):
    """Return the description of a corpus whose archive has TEXTS and is served on loopback."""
    published = CORPORA[request.param]
    files = {f"{published.name}/wiki.{split}.tokens": text for split, text in TEXTS.items()}
    digest = archives.sha256(zip_of(server.folder / published.archive.file, files))
    counts = {
        "train": {"lines": 26, "tokens": 97, "types": 25},
        "valid": {"lines": 8},
        "test": {"lines": 16},
    }
    archive = published.archive._replace(
        urls=(f"{server.url}/{published.archive.file}",), sha256=digest
    )
    return published._replace(archive=archive, counts=counts)


def articles_of(text):
    return list(articles(text.splitlines(keepends=True)))


def prepare(corpus, data, monkeypatch, *flags):
    monkeypatch.setenv("DATA", str(data))
    monkeypatch.setattr(sys, "argv", ["prepare", "--workers", "1", *flags])
    wikitext.main(corpus)


def preprocess_here(destination, workers, flags):
    """Run fairseq-preprocess without the seconds that it takes to start."""
    parser = options.get_preprocessing_parser()
    fairseq_preprocess(
        parser.parse_args([*flags, "--destdir", str(destination), "--workers", str(workers)])
    )


def test_articles_begin_at_titles_between_blank_lines():
    found = articles_of(TEXTS["train"])
    assert [words[1] for words in found] == ["A", "B", "C"]
    assert found[0][-5:] == ["=", "Played", ";", "L", "="]
    assert [word for words in found for word in words] == TEXTS["train"].split()
    assert articles_of("") == []


@pytest.mark.parametrize(
    "corpus, breaks, ends",
    [
        ("wikitext103", "lines", {split: text.splitlines() for split, text in TEXTS.items()}),
        (
            "wikitext2",
            "articles",
            {split: [" ".join(a) for a in articles_of(text)] for split, text in TEXTS.items()},
        ),
        (
            "wikitext2",
            "bytes",
            {s: [a.encode().hex(" ") for a in text.splitlines()] for s, text in TEXTS.items()},
        ),
    ],
    indirect=["corpus"],
)
def test_it_is_fetched_counted_and_binarised(
    corpus, breaks, ends, server, tmp_path, monkeypatch, capfd
):
    data = tmp_path / "data"
    server.faults += ["drop"]
    monkeypatch.setattr(wikitext, "preprocess", preprocess_here)
    prepare(corpus, data, monkeypatch, "--breaks", breaks)
    words = Dictionary.load(str(data / breaks / "dict.txt"))
    for split, lines in ends.items():
        binary = data_utils.load_indexed_dataset(str(data / breaks / split), words)
        # An empty line is a bare </s>.
        assert [words.string(line) for line in binary] == [" ".join(line.split()) for line in lines]
        assert all(line[-1] == words.eos() for line in binary)
    assert [asked for _, asked in server.requests] == [
        None,
        f"bytes={(server.folder / corpus.archive.file).stat().st_size // 2}-",
    ]
    assert sorted(path.name for path in data.iterdir()) == sorted(
        ["archives", breaks, "prepare.lock", "text"]
    )

    capfd.readouterr()
    prepare(corpus, data, monkeypatch, "--breaks", breaks)
    assert capfd.readouterr().err == f"prepare: {data / breaks} is there already\n"


@pytest.mark.parametrize("corpus", ["wikitext2"], indirect=True)
def test_own_text_needs_the_flag_that_says_so(corpus, tmp_path, monkeypatch, capfd):
    own = corpus._replace(counts=WIKITEXT2.counts)
    monkeypatch.setattr(
        wikitext, "preprocess", lambda destination, *rest: destination.mkdir(exist_ok=True)
    )
    with pytest.raises(SystemExit):
        prepare(own, tmp_path, monkeypatch)
    assert "wikitext-2/wiki.train.tokens: 26 lines, must be 36,718; " in capfd.readouterr().err
    prepare(own, tmp_path, monkeypatch, "--any-counts")
    assert (tmp_path / "lines").is_dir()
    with pytest.raises(SystemExit):  # what is there was never checked
        prepare(own, tmp_path, monkeypatch)
    assert f"prepare: error: {tmp_path / 'lines'}: made with --any-counts" in capfd.readouterr().err


TINY_XL = """--n-layer 1 --d-model 16 --n-head 2 --d-head 4 --d-inner 16 --cutoffs 4,8 --mem-len 8
    --tokens-per-sample 8 --batch-size 2 --max-update 2 --num-workers 0"""
TINY_SYNTHESIZER = f"""{TINY} --adaptive-input-cutoff 4,8 --adaptive-softmax-cutoff 4,8
    --tokens-per-sample 8 --max-tokens 32 --max-update 2 --update-freq 1
    --warmup-updates 1 --lr 0.01"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "corpus, model, train, evaluate",
    [
        ("wikitext103", "transformer-xl", TINY_XL, "--tokens-per-sample 8"),
        (
            "wikitext103",
            "synthesizer",
            TINY_SYNTHESIZER,
            "--tokens-per-sample 8 --context-window 4",
        ),
    ],
    indirect=["corpus"],
)
def test_other_models_are_trained_and_evaluated(
    corpus, model, train, evaluate, tmp_path, monkeypatch
):
    """Check, too, that evaluation has a longer memory than training, as its authors have it."""
    monkeypatch.setattr(wikitext, "preprocess", preprocess_here)
    prepare(corpus, tmp_path / "data", monkeypatch)
    recipe = corpus.name.replace("-", "")
    environment = {"MODEL": model, "SAVE": tmp_path / "save", "OMP_NUM_THREADS": 1, "GPUS": 0}
    (command,) = dry_run(f"examples/{recipe}/train.sh {' '.join(train.split())}", **environment)
    run_here(*command)
    result = script(f"examples/{recipe}/evaluate.sh {evaluate}", **environment)
    *title, last = result.stdout.splitlines()
    assert last == f"perplexity = {re.search(r'Perplexity: (.+)', result.stderr)[1]}"
    if model == "synthesizer":
        assert title == []
        return
    assert title == ["test: 50 of 58 tokens are predicted, all but the first of every 8"]
    assert "'mem_len': 640" in result.stderr
    # A hardly trained model knows little more than the number of words.
    words = len((tmp_path / "data" / "lines" / "dict.txt").read_text().splitlines())
    assert 0.3 * words < float(last.rpartition(" = ")[2]) < 3 * words


@pytest.mark.slow
@pytest.mark.parametrize("corpus", ["wikitext2"], indirect=True)
def test_a_masked_model_is_trained_and_evaluated_on_the_same_masked_words(
    corpus, tmp_path, monkeypatch
):
    monkeypatch.setattr(wikitext, "preprocess", preprocess_here)
    prepare(corpus, tmp_path / "data", monkeypatch)
    environment = {"MODEL": "masked", "SAVE": tmp_path / "save", "OMP_NUM_THREADS": 1, "GPUS": 0}
    sizes = """--encoder-layers 1 --encoder-embed-dim 16 --gau-query-dim 4 --tokens-per-sample 8
        --max-tokens 32 --max-update 2 --update-freq 1 --num-workers 0"""
    (command,) = dry_run(f"examples/wikitext2/train.sh {' '.join(sizes.split())}", **environment)
    run_here(*command)
    line = "examples/wikitext2/evaluate.sh --gen-subset valid"
    first, second = (script(f"{line}{more}", **environment) for more in ("", " --batch-size 2"))
    assert re.fullmatch(r"perplexity = \d+\.\d{3}\n", first.stdout)
    assert first.stdout == second.stdout


def test_the_perplexity_of_masked_words_is_that_of_the_log(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", "data", "--valid-subset", "test"])
    log = '2026 | INFO | test | {"epoch": 1, "test_loss": "3.5", "test_ppl": "11.31"}\n'
    monkeypatch.setattr(sys, "stdin", io.StringIO(log))
    masked.main()
    assert capsys.readouterr().out == f"perplexity = {2**3.5:.3f}\n"
    for wrong, message in (
        ("Killed\n", "fairseq-validate has logged no loss; its messages are above"),
        (log.replace("3.5", "nan"), "fairseq-validate: the loss is nan"),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO(wrong))
        with pytest.raises(SystemExit):
            masked.main()
        assert capsys.readouterr().err.endswith(f"evaluate: error: {message}\n")


def test_bytes_are_evaluated_in_bits(tmp_path):
    for name, line in (("bytes", "bits per byte = 1.7856"), ("lines", "perplexity = 3.45")):
        assert perplexity.report_of_tokens(
            tmp_path / name, "test", Counts(9, 9), Perplexity(3.45, 2**1.7856)
        ) == [line]


# ---- perplexity --------------------------------------------------------------------------------


def figures_of(tmp_path, monkeypatch, *flags):
    """Let the program of evaluate.sh read a Transformer-XL's log, in this process.

    Return its exit status.
    """
    log = b"Evaluated 50 tokens in 0.1s\nLoss (base 2): 3.0000, Perplexity: 8.01\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(log)))
    monkeypatch.setattr(
        sys, "argv", ["", str(tmp_path / "data" / "lines"), "--task", "truncated_bptt_lm", *flags]
    )
    return perplexity.main()


@pytest.mark.parametrize("corpus", ["wikitext2"], indirect=True)
def test_the_words_that_fairseq_only_reads_are_counted(corpus, tmp_path, monkeypatch, capsys):
    """Compare with the targets of truncated_bptt_lm.

    The windows fill the text, and in another case they do not.
    """
    monkeypatch.setattr(wikitext, "preprocess", preprocess_here)
    prepare(corpus, tmp_path / "data", monkeypatch)
    for window in (1, 8, 29, 64):
        folder = str(tmp_path / "data" / "lines")
        cut = {"tokens_per_sample": window, "batch_size": 1}
        one_worker = {"data_parallel_rank": 0, "data_parallel_size": 1}
        task = TruncatedBPTTLMTask(TruncatedBPTTLMConfig(data=folder, **cut, **one_worker))
        task.load_dataset("test")
        batches = list(task.eval_lm_dataloader(task.dataset("test"), num_workers=0))
        targets = sum(int(batch["target"].ne(task.dictionary.pad()).sum()) for batch in batches)
        assert sum(batch["ntokens"] for batch in batches) == targets  # what fairseq-eval-lm prints
        assert Cut("truncated_bptt_lm", window).without_target(Counts(58, 58)) == 58 - targets
    assert Cut("language_modeling", 8).without_target(Counts(58, 58)) == 0

    assert figures_of(tmp_path, monkeypatch, "--tokens-per-sample=8") == 0
    title = "test: 50 of 58 tokens are predicted, all but the first of every 8"
    assert capsys.readouterr().out == f"{title}\nperplexity = 8.01\n"
