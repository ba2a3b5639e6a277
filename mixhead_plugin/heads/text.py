"""Texts for the page: pair them with their targets, and show their tokens as words."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from mixhead_plugin.errors import wrong_argument
from mixhead_plugin.heads.attention import HeadsError
from mixhead_plugin.heads.page import Sentence, ShownHeads


def with_targets(
    text: str | Sequence[str], target: str | Sequence[str] | None
) -> list[tuple[str, str | None]]:
    """Return each text with its target; one target is that of all texts.

    Raise HeadsError for what is no text, or if the targets are not as many as the texts.
    """
    texts = _listed(text)
    if not texts:
        raise HeadsError(wrong_argument("text", text, "a str, or a list of at least one"))
    if target is None or isinstance(target, str):
        return [(one, target) for one in texts]

    targets = _listed(target)
    if targets is None:
        wanted = "a str, a list with one for each text, or None"
        raise HeadsError(wrong_argument("target", target, wanted))
    if len(targets) != len(texts):
        raise HeadsError(f"target: has {len(targets)}, must be one for each of {len(texts)} texts")
    return list(zip(texts, targets))


def _listed(given: object) -> list[str] | None:
    """Return a text, or each of several, in a list; None for what is neither."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Iterable):
        return None
    texts = list(given)
    return texts if all(isinstance(one, str) for one in texts) else None


def check_tokenizer(tokenizer: object) -> None:
    if not callable(tokenizer):
        wanted = "a tokenizer of transformers, or what is called as one"
        raise HeadsError(wrong_argument("tokenizer", tokenizer, wanted))


def words(tokenizer: Any, tokens: Tensor, length: int) -> list[str]:
    """Return the words of the only sentence of tokens [1, N].

    Args:
        tokenizer: a tokenizer with `decode` and `convert_ids_to_tokens`, as those of transformers
        tokens: their numbers
        length: the largest number of tokens

    Raises:
        HeadsError: no token, or more than `length`
    """
    if not 0 < tokens.size(1) <= length:
        raise HeadsError(
            f"a text of {tokens.size(1)} tokens: must have 1 to {length}, as length or the "
            "positions of the model allow"
        )
    readable = []
    for token in tokens[0].tolist():
        word = tokenizer.decode([token]).strip()
        readable.append(word or tokenizer.convert_ids_to_tokens(token))
    return readable


def sentence(
    encoder_reads: list[str],
    decoder_reads: list[str],
    decoder_predicts: list[str],
    attentions: Iterable[ShownHeads],
) -> Sentence:
    """Return one sentence of the page, with the words of those sides alone that attentions read.

    Args:
        encoder_reads: words
        decoder_reads: words
        decoder_predicts: the word that follows each of `decoder_reads`
        attentions: the heads of the model on them
    """
    shown = list(attentions)
    sites = {heads.site for heads in shown}
    if sites == {"decoder-self"}:
        encoder_reads = []
    if sites == {"encoder-self"}:
        decoder_reads = []
        decoder_predicts = []
    return Sentence(
        encoder_reads=encoder_reads,
        decoder_reads=decoder_reads,
        decoder_predicts=decoder_predicts,
        attentions=shown,
    )
