"""Test that the page shows the heads of models of `transformers`, mixed or not."""

import pytest
import torch

from tests.heads.pages import assert_shows, read_page
from tests.hf.models import build, hf, transformers


class Letters:
    """Cut text into letters, as a tokenizer of `transformers` would be called."""

    def __call__(self, text=None, text_target=None, return_tensors="pt"):
        letters = text_target if text is None else text
        return transformers.BatchEncoding(
            {"input_ids": torch.tensor([[3 + ord(c) % 28 for c in letters]])}
        )

    def decode(self, tokens):
        return f" <{tokens[0]}>"


@pytest.mark.parametrize("mixing", ["position-wise", "position-independent", "differential", None])
@pytest.mark.parametrize(
    "name", ["BertForMaskedLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"]
)
def test_the_page_has_the_weights_that_the_model_returns(name, mixing, tmp_path):
    variant = {}
    if mixing is not None:
        variant["head_mixing"] = mixing
    model, _ = build(name, **variant)
    implementation = model.train().config._attn_implementation
    hf.view(model, Letters(), ["hello", "you"], tmp_path / "page.html", target=["welt", "du"])
    assert model.training and model.config._attn_implementation == implementation
    sentence, second = read_page(tmp_path / "page.html")
    tokens = Letters()("hello")["input_ids"]
    inputs = {"input_ids": tokens}
    translates = name.startswith("T5")
    if translates:
        labels = Letters()("welt")["input_ids"]
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=labels)
        assert (
            sentence["decoder_predicts"] == [f"<{token}>" for token in labels[0]]
            and len(second["decoder_predicts"]) == 2
        )
    side = "decoder_reads" if name.startswith("GPT2") else "encoder_reads"
    assert sentence[side] == [f"<{token}>" for token in tokens[0]] and len(second[side]) == 3
    if mixing is None:
        model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model.eval()(**inputs, output_attentions=True)
    names = {
        "encoder-self": "encoder_attentions",
        "decoder-self": "decoder_attentions",
        "cross": "cross_attentions",
    }
    assert len(sentence["attentions"]) == (6 if translates else 2)
    for found in sentence["attentions"]:
        weights = getattr(outputs, names[found["site"]] if translates else "attentions")[
            found["layer"]
        ][0].float()
        if mixing is None:
            assert_shows(found, weights, None, weights)
            continue
        product = "jqk,ji->iqk" if found["mixing"].ndim == 2 else "jqk,qji->iqk"
        source = torch.tensor(found["source"])
        matrix = torch.tensor(found["mixing"]).double()
        error = (torch.einsum(product, source, matrix) - weights).abs().max()
        # M and P of the page give the model's weights. P is wrong by half a step of 255, which M
        # adds up; a little more is left for rounding.
        assert error <= matrix.abs().sum(-2).max() * source.max() / 500
        assert_shows(found, source, torch.tensor(found["mixing"]), weights)


class TwoTowers(transformers.BertPreTrainedModel):
    """Has a layer 0 of an encoder twice, as models of images and texts have."""

    def __init__(self, config):
        super().__init__(config)
        self.first = transformers.BertModel(config)
        self.second = transformers.BertModel(config)
        self.post_init()

    def forward(self, **inputs):
        self.first(**inputs)
        return self.second(**inputs)


def test_attentions_of_one_site_have_numbers_of_their_own(tmp_path):
    plain, _ = build("BertForMaskedLM")
    model = hf.mix(TwoTowers(plain.config), "position-independent")
    hf.view(model, Letters(), "hello", tmp_path / "page.html")
    (sentence,) = read_page(tmp_path / "page.html")
    places = [(found["site"], found["layer"]) for found in sentence["attentions"]]
    assert places == [("encoder-self", layer) for layer in range(4)]


def test_what_has_no_page_is_refused_in_one_line(tmp_path):
    model, _ = build("BertForMaskedLM")
    for text, options, problem in (
        ("hello", {"length": 4}, "5 tokens: must have 1 to 4, as length or the positions of the"),
        ("h" * 99, {}, f"99 tokens: must have 1 to {model.config.max_position_embeddings}, as"),
        ("", {}, "0 tokens: must have 1 to"),
        ("hello", {"target": []}, "target: has 0"),
        (None, {}, "text None: must be a str, or a list of at least one"),
    ):
        with pytest.raises(ValueError, match=problem):
            hf.view(model, Letters(), text, tmp_path / "page.html", **options)
    with pytest.raises(ValueError, match="tokenizer 'gpt2': must be a tokenizer of transformers"):
        hf.view(model, "gpt2", "hello", tmp_path / "page.html")
    model.bert.encoder.layer = torch.nn.ModuleList()
    with pytest.raises(
        ValueError, match="has no attention that goes through the AttentionInterface"
    ):
        hf.view(model, Letters(), "hello", tmp_path / "page.html")


def test_what_a_model_generates_is_the_same_again_while_it_trains(tmp_path):
    """Dropout is off."""
    model, _ = build("T5ForConditionalGeneration")
    model.train()
    pages = [tmp_path / "first.html", tmp_path / "second.html"]
    for page in pages:
        hf.view(model, Letters(), "hello", page)
    assert pages[0].read_bytes() == pages[1].read_bytes()
    assert model.training


def test_a_model_generates_no_more_tokens_than_the_page_may_have(tmp_path):
    """Without a token for the end, it never ends its text itself."""
    model, _ = build("T5ForConditionalGeneration", {"eos_token_id": None})
    hf.view(model, Letters(), "hello", tmp_path / "page.html", length=5)
    (sentence,) = read_page(tmp_path / "page.html")
    assert len(sentence["decoder_reads"]) == len(sentence["decoder_predicts"]) == 5


def test_a_text_has_no_more_tokens_than_roberta_has_positions_behind_that_of_padding(tmp_path):
    model, _ = build("RobertaForMaskedLM", {"max_position_embeddings": 9, "pad_token_id": 1})
    hf.view(model, Letters(), "h" * 7, tmp_path / "page.html")
    with pytest.raises(ValueError, match="8 tokens: must have 1 to 7"):
        hf.view(model, Letters(), "h" * 8, tmp_path / "page.html")


@pytest.mark.parametrize(
    "path, title",
    [("/home/someone/models/mine/", "mine"), ("", "GPT2LMHeadModel"), ("gpt2", "gpt2")],
)
def test_the_title_is_the_name_of_the_model_without_the_path_to_it(path, title, tmp_path):
    model, _ = build("GPT2LMHeadModel")
    model.config.name_or_path = path
    hf.view(model, Letters(), "hello", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "someone" not in page and title in page
