"""The page that shows the heads of a torch model."""

import pytest

import mixhead_plugin.nn as door
from tests.heads.models import torch_model
from tests.heads.pages import assert_shows, read_page
from tests.nn.reading import LanguageModel, Letters, Reader


def test_the_page_shows_the_weights_of_an_encoder_decoder(tmp_path):
    model = torch_model({"head_mixing": "position-wise"}).train()
    door.view(model, Letters(), ["hello", "you"], tmp_path / "page.html", target=["welt", "dus"])
    assert model.training
    sentence, second = read_page(tmp_path / "page.html")
    source = Letters()("hello")["input_ids"]
    target = Letters()("welt")["input_ids"]
    words = [f"<{token}>" for token in target[0].tolist()]
    assert (sentence["decoder_reads"], sentence["decoder_predicts"]) == (words[:-1], words[1:])
    assert len(sentence["encoder_reads"]) == 5 and len(second["encoder_reads"]) == 3
    expected = door.attentions(model, (source, target[:, :-1]))
    sites = ["encoder-self", "decoder-self", "cross"]
    for found, site, heads in zip(sentence["attentions"], sites, expected.values(), strict=True):
        assert (found["site"], found["layer"]) == (site, 0)
        mixing = heads.mixing[0].detach().float()
        assert_shows(found, heads.source[0].detach(), mixing, heads.mixed[0].detach())


def test_the_page_of_a_language_model_has_the_words_that_follow(tmp_path):
    door.view(LanguageModel(), Letters(), "hello", tmp_path / "page.html")
    (sentence,) = read_page(tmp_path / "page.html")
    words = [f"<{token}>" for token in Letters()("hello")["input_ids"][0].tolist()]
    assert sentence["encoder_reads"] == []
    assert (sentence["decoder_reads"], sentence["decoder_predicts"]) == (words, words[1:])
    assert [found["site"] for found in sentence["attentions"]] == ["decoder-self"]


@pytest.mark.parametrize(
    "kind, site",
    [(Reader, "encoder-self"), (LanguageModel, "decoder-self")],
    ids=["reads", "writes"],
)
@pytest.mark.parametrize("texts", [["a"], ["a", "hello"]], ids=["alone", "beside another"])
def test_a_text_of_one_token_is_shown_as_longer_ones(kind, site, texts, tmp_path):
    door.view(kind(), Letters(), texts, tmp_path / "page.html")
    for sentence in read_page(tmp_path / "page.html"):
        assert [found["site"] for found in sentence["attentions"]] == [site]


class TimeFirst(LanguageModel):
    def forward(self, words):
        return super().forward(words.t())


REFUSED = {
    "a text that is too long": (
        lambda: door.view(LanguageModel(), Letters(), "hello", "page.html", length=4),
        "a text of 5 tokens: must have 1 to 4, as length or the positions of the model allow",
    ),
    "the name of a tokenizer": (
        lambda: door.view(LanguageModel(), "gpt2", "hello", "page.html"),
        "tokenizer 'gpt2': must be a tokenizer of transformers, or what is called as one",
    ),
    "tokens in place of a text": (
        lambda: door.view(LanguageModel(), Letters(), Letters()("hello")["input_ids"], "page.html"),
        "text is a Tensor: must be a str, or a list of at least one",
    ),
    "no text": (
        lambda: door.view(LanguageModel(), Letters(), [], "page.html"),
        "text is a list: must be a str, or a list of at least one",
    ),
    "a target of one token": (
        lambda: door.view(
            torch_model({"head_mixing": "position-wise"}), Letters(), "a", "page.html", target="b"
        ),
        "target 'b': is too short, must have 2 tokens or more; the decoder reads all but the last "
        "one",
    ),
    "words as sentences": (
        lambda: door.view(TimeFirst(), Letters(), "hello", "page.html"),
        "attention: its weights are [1, 1], must be [5, 5]; the model must take tokens [1, N]",
    ),
}


@pytest.mark.parametrize("call, message", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_shown_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message
