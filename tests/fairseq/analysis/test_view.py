"""Test that the page of `view` shows the numbers of the model, and shows all text as text."""

import functools
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from mixhead_plugin.fairseq.analysis.loading import load
from mixhead_plugin.heads.page import Sentence, ShownHeads, write_page
from tests.commands import LM_SIZES, ROBERTA_SIZES, ROOT, SIZES
from tests.fairseq.analysis.pages import by_definition
from tests.heads.pages import assert_shows, read_page

WORDS = "der hund sieht"


@pytest.fixture(scope="module")
def checkpoint(request, write_checkpoint):
    """Write a model of a task with a head mixing, the same one only once."""

    @functools.cache
    def write(task, mixing):
        if task == "translation":
            data = "translation_data"
            arch = "mixhead_transformer"
            flags = SIZES
        elif task == "language_modeling":
            data = "text_data"
            arch = "mixhead_transformer_lm"
            flags = [*LM_SIZES, "--tokens-per-sample", 16]
        else:
            data = "text_data"
            arch = "mixhead_roberta_base"
            flags = [*ROBERTA_SIZES, "--tokens-per-sample", 16]
        flags = [*flags, "--task", task, "--head-mixing", mixing]
        return write_checkpoint(f"{task}-{mixing}", request.getfixturevalue(data), arch, *flags)

    return write


@pytest.mark.parametrize(
    "task, mixing",
    [
        ("translation", "position-wise"),
        ("translation", "position-independent"),
        ("translation", "none"),
        ("language_modeling", "differential"),
        ("masked_lm", "position-wise"),
    ],
)
def test_the_numbers_of_the_page_are_those_of_the_reference(
    task, mixing, checkpoint, analysis, tmp_path
):
    path = checkpoint(task, mixing)
    page = tmp_path / "page.html"
    loaded = load(path, cpu=True)
    source = loaded.task.source_dictionary
    target = loaded.task.target_dictionary
    words = [source[i] for i in (5, 9, 6, 7)]
    translates = task == "translation"
    extra = ["--target", " ".join(target[i] for i in (8, 5, 6))] if translates else []
    assert analysis("view", path, "--text", " ".join(words), *extra, "--output", page)[::2] == (
        0,
        "",
    )
    tokens = torch.tensor([5, 9, 6, 7])
    end = tokens.new_tensor([source.eos()])
    begin = tokens.new_tensor([source.bos()])
    if translates:
        net_input = {"src_tokens": torch.cat([tokens, end])[None], "src_lengths": torch.tensor([5])}
        net_input["prev_output_tokens"] = torch.tensor([[target.eos(), 8, 5, 6]])
    else:
        read = torch.cat([begin, tokens, end] if task == "masked_lm" else [end, tokens])
        net_input = {"src_tokens": read[None], "src_lengths": torch.tensor([len(read)])}
    (sentence,) = read_page(page)
    expected = by_definition(loaded, net_input)
    assert len(sentence["attentions"]) == len(expected) == (6 if translates else 2)
    for found in sentence["attentions"]:
        assert_shows(found, *expected[found["site"], found["layer"]])
    ends = (
        (["<s>"], ["</s>"])
        if task == "masked_lm"
        else ([], ["</s>"])
        if translates
        else (["</s>"], [])
    )
    side = "decoder_reads" if task == "language_modeling" else "encoder_reads"
    assert sentence[side] == ends[0] + words + ends[1]


def test_a_decoder_that_reads_the_source_in_its_own_attention_is_shown(
    translation_data, write_checkpoint, analysis, tmp_path
):
    """With --cross-self-attention the words of the source come before those of the target."""
    flags = [*SIZES, "--cross-self-attention", "--no-cross-attention"]
    path = write_checkpoint("joint", translation_data, "mixhead_transformer", *flags)
    page = tmp_path / "page.html"
    loaded = load(path, cpu=True)
    source = loaded.task.source_dictionary
    target = loaded.task.target_dictionary
    read = " ".join(source[i] for i in (5, 9, 6, 7))
    written = " ".join(target[i] for i in (8, 5))
    answer = analysis("view", path, "--text", read, "--target", written, "--output", page)
    assert answer[::2] == (0, "")
    net_input = {
        "src_tokens": torch.tensor([[5, 9, 6, 7, source.eos()]]),
        "src_lengths": torch.tensor([5]),
        "prev_output_tokens": torch.tensor([[target.eos(), 8, 5]]),
    }
    expected = by_definition(loaded, net_input)
    (sentence,) = read_page(page)
    for found in sentence["attentions"]:
        assert_shows(found, *expected[found["site"], found["layer"]])
        assert found["reads_both"] == (found["site"] == "decoder-self")
        assert found["source"].shape == ((4, 3, 8) if found["reads_both"] else (4, 5, 5))


@pytest.mark.parametrize("task", ["translation", "language_modeling", "masked_lm"])
def test_without_a_text_sentences_of_the_data_are_shown(task, checkpoint, analysis, tmp_path):
    flags = ["--sentences", "2", "--length", "3", "--output", tmp_path / "page.html"]
    assert analysis("view", checkpoint(task, "position-wise"), *flags)[0] == 0
    sentences = read_page(tmp_path / "page.html")
    assert len(sentences) == 2
    for sentence in sentences:
        for found in sentence["attentions"]:
            assert found["source"].shape == (4, 3, 3) and found["mixing"].shape == (3, 4, 4)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--target", "a"], "--target: 1 given; must be 0, one for each --text"),
        (
            ["--text", "a", "--text", "b", "--target", "a"],
            "--target: 1 given; must be 2, one for each --text",
        ),
        (["--text", "a", "--target", "b"], "--target b: must be left out, .*pt does not translate"),
        (["--text", "  "], "--text '  ': has no words"),
        (["--data", "nowhere", "--text", "a"], "nowhere"),
        (["--text", "a", "--sentencepiece", "missing.model"], "missing.model"),
    ],
)
def test_bad_input_ends_in_one_line(flags, words, lm_checkpoint, analysis, tmp_path):
    status, _, errors = analysis("view", lm_checkpoint, *flags, "--output", tmp_path / "page.html")
    assert status == 1 and errors.count("\n") == 1 and re.search(words, errors)
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    "task, flags",
    [
        ("translation_multi_simple_epoch", ["--lang-pairs", "de-en", "--encoder-langtok", "tgt"]),
        ("translation_from_pretrained_bart", ["--langs", "de,en"]),
    ],
    ids=["multi", "bart"],
)
def test_a_text_is_refused_where_the_task_adds_tokens_of_its_own(
    task, flags, translation_data, write_checkpoint, analysis, tmp_path
):
    """The model has never read a text without them."""
    flags = [*SIZES, "--task", task, *flags]
    path = write_checkpoint(task, translation_data, "mixhead_transformer", *flags)
    for target in ([], ["--target", "dog"]):
        page = tmp_path / "page.html"
        status, _, errors = analysis("view", path, "--text", "hund", *target, "--output", page)
        assert status == 1 and errors.endswith(
            f"--text 'hund': --task {task} adds tokens of its own to a text; must be left out, and "
            "the page shows sentences of --subset\n"
        )
        assert not page.exists()


def test_a_language_model_reads_the_tokens_of_add_bos_token(
    text_data, write_checkpoint, analysis, tmp_path
):
    flags = [*LM_SIZES, "--task", "language_modeling", "--tokens-per-sample", 16]
    path = write_checkpoint("bos", text_data, "mixhead_transformer_lm", *flags, "--add-bos-token")
    page = tmp_path / "page.html"
    assert analysis("view", path, "--text", "dog sees", "--output", page)[0] == 0
    (sentence,) = read_page(page)
    assert sentence["decoder_reads"] == ["<s>", "</s>", "dog", "sees"]
    assert sentence["decoder_predicts"] == ["<s>", "dog", "sees", "</s>"]


def test_sentencepiece_is_asked_for_where_it_is_missing(lm_checkpoint, analysis, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    status, _, errors = analysis("view", lm_checkpoint, "--text", "a", "--sentencepiece", "m.model")
    assert status == 1
    assert errors.endswith(
        "--sentencepiece m.model: needs sentencepiece: pip install sentencepiece\n"
    )


def test_a_page_that_cannot_be_written_is_refused_before_the_work(analysis, tmp_path, monkeypatch):
    (tmp_path / "no").write_text("")
    (tmp_path / "page.html").write_text("")
    # root may write anywhere
    monkeypatch.setattr("os.access", lambda path, mode: path != str(tmp_path / "page.html"))
    for page in (
        tmp_path,
        f"{tmp_path}/new/",
        tmp_path / "no/such/folder/page.html",
        tmp_path / "page.html",
    ):
        status, _, errors = analysis("view", "x.pt", "--output", page)
        assert status == 2 and "argument --output: " in errors


def test_a_text_is_cut_before_the_model_reads_or_translates_it(translator, analysis, tmp_path):
    pages = []
    for text in ("hund katze sieht", "hund katze mag vogel"):
        flags = ["--text", text, "--length", "2", "--output", tmp_path / "new" / "page.html"]
        status, printed, _ = analysis("view", translator, *flags)
        assert status == 0 and "--length 2: the model reads only the first 2 of " in printed
        pages.append(read_page(tmp_path / "new" / "page.html")[0])
    assert (
        pages[0]["encoder_reads"] == pages[1]["encoder_reads"]
        and len(pages[0]["encoder_reads"]) == 2
    )
    assert (
        pages[0]["decoder_predicts"] == pages[1]["decoder_predicts"]
    )  # the translation of what was read


def test_no_text_is_longer_than_the_positions_of_the_model(
    text_data, write_checkpoint, analysis, tmp_path
):
    flags = [*ROBERTA_SIZES, "--tokens-per-sample", 8, "--max-positions", 8, "--task", "masked_lm"]
    path = write_checkpoint("short", text_data, "mixhead_roberta_base", *flags)
    status, printed, errors = analysis(
        "view", path, "--text", "a " * 30, "--output", tmp_path / "page.html"
    )
    assert (status, errors) == (0, "")
    assert printed.count("--length 8: the model reads only the first 8 of 32 tokens") == 1


def test_words_that_the_dictionary_lacks_are_shown(checkpoint, analysis, tmp_path):
    flags = ["--text", "nie hund war", "--target", "never dog", "--output", tmp_path / "page.html"]
    status, printed, _ = analysis("view", checkpoint("translation", "none"), *flags)
    assert status == 0 and "--text: the dictionary lacks nie, war" in printed
    (sentence,) = read_page(tmp_path / "page.html")
    assert sentence["encoder_reads"] == ["nie (unknown)", "hund", "war (unknown)", "</s>"]
    assert (
        sentence["decoder_reads"][:2] == ["</s>", "never (unknown)"]
        and sentence["decoder_predicts"][0] == "never (unknown)"
    )


def sentence_of(layers=2, heads=4, tokens=6, words=None):
    """Return a sentence of a translation model with made-up heads."""
    found = []
    for layer in range(layers):
        for site in ("encoder-self", "decoder-self", "cross"):
            both = site == "decoder-self"  # the decoder's own attention reads the source, too
            keys = 2 * tokens if both else tokens
            weights = (3 * torch.randn(heads, tokens, keys)).softmax(-1)
            mixing = torch.eye(heads) + 0.3 * torch.randn(tokens, heads, heads)
            found.append(ShownHeads(site, layer, weights, mixing, reads_both=both))
    words = words or [f"token{i}" for i in range(tokens)]
    return Sentence(words, words, words, attentions=found)


def test_a_large_page_is_below_two_megabytes(tmp_path):
    write_page(tmp_path / "page.html", "large", "", [sentence_of(layers=6, heads=8, tokens=40)])
    assert (tmp_path / "page.html").stat().st_size < 2_000_000


def test_a_page_is_the_same_under_autocast(tmp_path):
    pages = [tmp_path / "plain.html", tmp_path / "autocast.html"]
    sentence = sentence_of()
    write_page(pages[0], "a", "b", [sentence])
    with torch.autocast("cpu", torch.bfloat16):
        write_page(pages[1], "a", "b", [sentence])
    assert pages[1].read_bytes() == pages[0].read_bytes()


class Elements(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append(tag)


def test_text_of_users_stays_text(tmp_path):
    plain = tmp_path / "plain.html"
    evil = tmp_path / "evil.html"
    words = ["</script><img src=x onerror=alert(1)>", "<!--<script>", "&amp;", '"', "'", "\u2028"]
    write_page(plain, "a", "b", [sentence_of()])
    write_page(evil, "<b>$data", "<i onclick=x>", [sentence_of(words=words)])
    assert Elements(evil.read_text("utf-8")).found == Elements(plain.read_text("utf-8")).found
    (sentence,) = read_page(evil)
    assert sentence["encoder_reads"] == words


def test_weights_that_are_not_finite_are_refused(tmp_path):
    broken = ShownHeads("cross", 1, torch.tensor([[[1.0, float("nan")]]]))
    with pytest.raises(ValueError, match="cross 1 are not finite"):
        write_page(tmp_path / "page.html", "", "", [Sentence(["a", "b"], ["a"], [], [broken])])


@pytest.mark.parametrize(
    "heads, words",
    [
        (ShownHeads("encoder-self", 0, torch.ones(1, 3, 2)), "encoder-self 0 .*[3, 2] .*[2, 2]"),
        (ShownHeads("decoder-self", 0, torch.ones(1, 3, 5)), "decoder-self 0 .*[3, 5] .*[3, 3]"),
        (ShownHeads("cross", 4, torch.ones(1, 3, 3)), "cross 4 .*[3, 3] .*[3, 2]"),
        (
            ShownHeads("decoder-self", 0, torch.ones(1, 3, 3), reads_both=True),
            "decoder-self 0 .*[3, 3] .*[3, 5]",
        ),
    ],
    ids=["encoder", "decoder", "cross", "both"],
)
def test_weights_of_other_tokens_are_refused(heads, words, tmp_path):
    sentence = Sentence(["a", "b"], ["a", "b", "c"], [], [heads])
    with pytest.raises(ValueError, match=words.replace("[", r"\[")):
        write_page(tmp_path / "page.html", "", "", [sentence])
    assert not (tmp_path / "page.html").exists()


CLICKS = """
const seen = { errors: [], says: [], tips: [] };
addEventListener("error", (event) => seen.errors.push(event.message));
addEventListener("unhandledrejection", (event) => seen.errors.push(String(event.reason)));
const find = (query) => document.querySelector(query);
const all = (query) => [...document.querySelectorAll(query)];
const point = (query, kind, row, column) => {
  const box = find(query).getBoundingClientRect();
  const at = { clientX: box.left + column * CELL(query)[0], clientY: box.top + row * CELL(query)[1], bubbles: true };
  find(query).dispatchEvent(new PointerEvent(kind, at));
};
const CELL = (query) => ["--width", "--height"].map((name) =>
  parseFloat(find(query).parentElement.style.getPropertyValue(name)));
setTimeout(() => {
  for (const site of [0, 1, 2]) {
    all("#sites button")[site].click();
    for (const layer of [0, 1]) {
      all("#layers button")[layer].click();
      all("#matrix .side > *")[2].click();
      point("#matrix .field", "pointermove", 2.5, 1.5);
      seen.tips.push(find("#tip").textContent);
      point("#mixing .field", "pointermove", 1.5, 3.5);
      seen.tips.push(find("#tip").textContent);
      point("#mixing .field", "click", 1.5, 3.5);
      point("#matrix .field", "pointermove", 2.5, 1.5);
      seen.tips.push(find("#tip").textContent);
      for (const key of ["i", "ArrowRight", "ArrowDown", "m", "ArrowLeft", "ArrowUp", "Escape", "i"])
        document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
      seen.says.push(find("#says").textContent);
      all("#all .row")[layer].querySelector("button").click();
    }
  }
  const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const tap = (kind) => find("#matrix .field").dispatchEvent(new PointerEvent(kind, { pointerType: "touch" }));
  all("#heads button")[3].focus();
  press("ArrowRight");
  all("#heads button")[1].click();
  seen.focus = [document.activeElement.id];
  press("j");
  seen.focus.push(document.activeElement.id, all("#sources button").length);
  tap("pointermove");
  tap("pointerleave");
  seen.focus.push(find("#tip").hidden);
  seen.text = find("#text").textContent;
  seen.resources = performance.getEntriesByType("resource").map(({ name }) => name);
  const result = document.createElement("pre");
  result.id = "seen";
  result.textContent = JSON.stringify(seen);
  document.body.append(result);
}, 1000);
"""


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [True, False])
def test_a_browser_shows_every_part_without_errors_or_requests(mixed, tmp_path):
    browser = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if browser is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    sentence = sentence_of()
    if not mixed:
        sentence = sentence._replace(
            attentions=[one._replace(mixing=None) for one in sentence.attentions]
        )
    page = tmp_path / "page.html"
    write_page(page, "clicks", "", [sentence, sentence])
    clicks = CLICKS if mixed else re.sub(r"(?s)      point\(\"#mixing.*?(?=      for)", "", CLICKS)
    page.write_text(
        page.read_text("utf-8").replace("</body>", f"<script>{clicks}</script></body>"), "utf-8"
    )
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command += [
        "--enable-logging=stderr",
        "--virtual-time-budget=20000",
        "--dump-dom",
        page.as_uri(),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert not [line for line in ended.stderr.splitlines() if "CONSOLE" in line]
    (text,) = re.findall(r'<pre id="seen">(.*?)</pre>', ended.stdout)
    seen = json.loads(text)
    assert seen["errors"] == [] and seen["resources"] == []
    assert len(set(seen["says"])) == 6
    # isolated, whatever their directions are
    assert "\u2068token0\u2069 \u2068token1\u2069" in seen["text"]
    assert seen["focus"] == ["head-3", "head-3", 4 if mixed else 0, False]
    order = {site: k for k, site in enumerate(("encoder-self", "decoder-self", "cross"))}
    expected = []
    rows = []
    for _, _, source, mixing, _ in sorted(
        sentence.attentions, key=lambda one: (order[one.site], one.layer)
    ):
        mixes = torch.einsum("jqk,qji->iqk", source, mixing) if mixed else source
        expected.append(mixes[0, 2, 1])
        if mixed:
            expected += [mixing[2, 1, 3], mixing[2, 1, 3] * source[1, 2, 1]]
            rows.append(mixes[3, 2])

    def numbers(pattern, text):
        return [
            float(number) for number in re.findall(pattern, text.replace("\N{MINUS SIGN}", "-"))
        ]

    tips = torch.tensor([numbers(r"\S+$", tip)[0] for tip in seen["tips"]])
    torch.testing.assert_close(tips, torch.stack(expected), rtol=0, atol=0.005)
    # the largest weight of the row, what source heads give it, the row's sum
    for said, row in zip(seen["says"], rows):
        largest, *given, total = numbers(
            r"(?:Of the|gives|all others|adds up to) (-?\d+\.\d\d)", said
        )
        assert abs(largest) == pytest.approx(row.abs().max().item(), abs=0.01)
        assert (sum(given), total) == pytest.approx((largest, row.sum().item()), abs=0.03)


def test_the_best_hypothesis_of_the_demos_checkpoint_is_shown(analysis, tmp_path):
    folder = ROOT / "examples" / "demo" / "pretrained"
    page = tmp_path / "page.html"
    text = "mein Bruder hat am Wochenende das Wohnzimmer gestrichen ."
    assert (
        analysis(
            "view", folder / "translator.pt", "--data", folder, "--text", text, "--output", page
        )[0]
        == 0
    )
    (sentence,) = read_page(page)
    written = "my brother painted the living room at the weekend . </s>".split()
    assert (sentence["decoder_predicts"], sentence["decoder_reads"]) == (
        written,
        ["</s>", *written[:-1]],
    )
    assert sentence["encoder_reads"][-1] == "</s>"
    assert all(abs(found["mixing"] - np.eye(8)).max() > 0.1 for found in sentence["attentions"])
