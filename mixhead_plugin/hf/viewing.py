"""Write the page of `page` for models of Hugging Face's `transformers`."""

from collections.abc import Sequence
from os import PathLike
from pathlib import PurePath
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from mixhead_plugin.heads.gates import evaluating
from mixhead_plugin.heads.page import Sentence, ShownHeads, shown, write_page
from mixhead_plugin.heads.sites import counted, where
from mixhead_plugin.heads.text import check_tokenizer, sentence, with_targets, words
from mixhead_plugin.hf.heads import attentions
from mixhead_plugin.hf.refusals import check_model


def view(
    model: PreTrainedModel,
    tokenizer: Any,
    text: str | Sequence[str],
    file: str | PathLike[str],
    target: str | Sequence[str] | None = None,
    length: int = 128,
) -> None:
    """Write one HTML file that shows the heads of a model, mixed or not, on one text or several.

    Args:
        model: any model that `mix` takes, mixed or not
        tokenizer: the tokenizer of the model
        text: what the model reads
        file: the page
        target: what the decoder of an encoder-decoder reads, one for all texts or one for each;
            None for what `generate` gives, at most `length` tokens
        length: the largest number of tokens

    Raises:
        ValueError: no attention is known, targets do not fit the texts, the weights of an attention
            do not fit the tokens, or a text is empty, or has more tokens than `length` or than the
            model has positions
    """
    check_model(model)
    check_tokenizer(tokenizer)
    length = min(length, _positions(model) or length)
    sentences = []
    for source, its_target in with_targets(text, target):
        sentences.append(_sentence(model, tokenizer, source, its_target, length))
    # Only the last part of the path: whoever shares the page need not share where the model lies.
    name = PurePath(model.config.name_or_path or "").name
    write_page(file, name or type(model).__name__, type(model).__name__, sentences)


def _positions(model: PreTrainedModel) -> int | None:
    """Return how many tokens a model has positions for; None if nothing tells."""
    for name, module in model.named_modules():
        # RoBERTa and its relatives count positions from behind that of padding: of 514, the first
        # token has number 2.
        is_of_positions = "position" in name and isinstance(module, nn.Embedding)
        if is_of_positions and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    return getattr(model.config, "max_position_embeddings", None)


def _sentence(
    model: PreTrainedModel, tokenizer: Any, text: str, target: str | None, length: int
) -> Sentence:
    """Return one text with the heads of the model on it."""
    inputs = tokenizer(text, return_tensors="pt").to(model.device)
    encoder_reads = words(tokenizer, inputs["input_ids"], length)
    # A model of one side reads the same, whichever side it is.
    decoder_reads = encoder_reads
    decoder_predicts = encoder_reads[1:]
    if model.config.is_encoder_decoder:
        generates: Any = model  # transformers does not type what only some models have
        if target is None:
            # Without dropout, as `attentions` below; and a model that does not end its text, as an
            # untrained one, must not write more than the page takes.
            with evaluating(model):
                generated = generates.generate(**inputs, max_new_tokens=length)
            output = generated[:, 1:]  # behind the token that the decoder starts with
        else:
            encoded = tokenizer(text_target=target, return_tensors="pt")
            output = encoded["input_ids"].to(model.device)
        decoder_inputs = generates.prepare_decoder_input_ids_from_labels(labels=output)
        inputs["decoder_input_ids"] = decoder_inputs
        decoder_reads = words(tokenizer, decoder_inputs, length)
        decoder_predicts = words(tokenizer, output, length)
    found = attentions(model, inputs).values()
    positions = counted(_site(model, heads.name) for heads in found)
    shown_heads: list[ShownHeads] = []
    for heads, position in zip(found, positions):
        shown_heads.append(shown(position, heads.source, heads.mixing))
    return sentence(encoder_reads, decoder_reads, decoder_predicts, shown_heads)


def _site(model: PreTrainedModel, name: str) -> str:
    """Return the site of the attention `name`, one of `heads.sites.SITES`."""
    causal = getattr(model.get_submodule(name), "is_causal", False)
    return where(name, causal).site
