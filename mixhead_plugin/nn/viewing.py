"""Write the page that shows the heads of a torch model on texts."""

from collections.abc import Sequence
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mixhead_plugin.heads.attention import HeadsError
from mixhead_plugin.heads.page import Sentence, ShownHeads, shown, write_page
from mixhead_plugin.heads.sites import counted, where
from mixhead_plugin.heads.text import check_tokenizer, sentence, with_targets, words
from mixhead_plugin.nn.adapter import attentions_of
from mixhead_plugin.nn.heads import attentions


class Text(NamedTuple):
    """One text as the model gets it.

    Attributes:
        inputs: tokens [1, N], and those that the decoder reads [1, N'] if there is a target
        encoder_reads: words
        decoder_reads: words; without a target the same as those of an encoder, because only the
            attentions tell which of both the model is
        decoder_predicts: the word that follows each of `decoder_reads`
    """

    inputs: list[Tensor]
    encoder_reads: list[str]
    decoder_reads: list[str]
    decoder_predicts: list[str]


def view(
    model: nn.Module,
    tokenizer: Any,
    text: str | Sequence[str],
    file: str | PathLike[str],
    target: str | Sequence[str] | None = None,
    length: int = 128,
) -> None:
    """Write one HTML file that shows the heads of a model on one text or several.

    Args:
        model: as in `ablate`; called with the tokens of a text [1, N], and with those that its
            decoder reads [1, N'] as a second argument if there is a `target`
        tokenizer: one of `transformers`, or what has its call with `return_tensors`, `decode` and
            `convert_ids_to_tokens`
        text: what the model reads
        file: the page
        target: the target text of an encoder-decoder; one for all texts or one for each. The
            decoder reads all tokens but the last one
        length: the largest number of tokens

    Raises:
        ValueError: a model without such attentions, or whose weights do not fit the tokens; targets
            that do not fit the texts, or have a single token; a text that is empty, or has more
            tokens than `length`
    """
    names = [attention.name for attention in attentions_of(model)]
    check_tokenizer(tokenizer)
    device = next(model.parameters()).device
    texts = []
    for source, its_target in with_targets(text, target):
        texts.append(_as_tokens(tokenizer, source, its_target, length, device))

    sites = {name: where(name).site for name in names}
    if target is None and texts:
        sites |= _sites_of_self_attentions(model, texts)
    sentences = [_sentence(model, each, sites) for each in texts]
    class_name = type(model).__name__
    write_page(file, class_name, f"{class_name}, {len(names)} attentions", sentences)


def _as_tokens(
    tokenizer: Any, text: str, target: str | None, length: int, device: torch.device
) -> Text:
    """Return a text, with its target if there is one, as tokens and words."""
    tokens = tokenizer(text, return_tensors="pt")["input_ids"].to(device)  # [1, N]
    read = words(tokenizer, tokens, length)
    if target is None:
        return Text(
            inputs=[tokens], encoder_reads=read, decoder_reads=read, decoder_predicts=read[1:]
        )

    output = tokenizer(text_target=target, return_tensors="pt")["input_ids"].to(device)
    if output.size(1) < 2:
        raise HeadsError(
            f"target {target!r}: is too short, must have 2 tokens or more; the decoder reads all "
            "but the last one"
        )
    return Text(
        inputs=[tokens, output[:, :-1]],
        encoder_reads=read,
        decoder_reads=words(tokenizer, output[:, :-1], length),
        decoder_predicts=words(tokenizer, output[:, 1:], length),
    )


def _sites_of_self_attentions(model: nn.Module, texts: Sequence[Text]) -> dict[str, str]:
    """Return the sites of attentions by name, those of a model without targets.

    Those of a decoder do not see later keys. The longest text tells it for all.
    """
    longest = max((text.inputs[0] for text in texts), key=lambda tokens: tokens.size(1))
    if longest.size(1) == 1:
        longest = longest.expand(-1, 2)  # a single token has no later key
    sites = {}
    for heads in attentions(model, [longest]).values():
        sees_later = bool(heads.source.triu(1).any())
        sites[heads.name] = "encoder-self" if sees_later else "decoder-self"
    return sites


def _sentence(model: nn.Module, text: Text, sites: dict[str, str]) -> Sentence:
    """Return one text with the heads of the model on it.

    Args:
        sites: those of all attentions, by name
    """
    found = attentions(model, text.inputs).values()
    positions = counted(sites[heads.name] for heads in found)
    shown_heads: list[ShownHeads] = []
    for heads, position in zip(found, positions):
        site = position.site
        n_queries = len(text.encoder_reads if site == "encoder-self" else text.decoder_reads)
        n_keys = len(text.decoder_reads if site == "decoder-self" else text.encoder_reads)
        if heads.source.shape[2:] != (n_queries, n_keys):
            raise HeadsError(
                f"{heads.name}: its weights are {list(heads.source.shape[2:])}, must be "
                f"{[n_queries, n_keys]}; the model must take tokens [1, N]"
            )
        shown_heads.append(shown(position, heads.source, heads.mixing))
    return sentence(text.encoder_reads, text.decoder_reads, text.decoder_predicts, shown_heads)
