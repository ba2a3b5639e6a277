"""Write the page of `page` for models of Hugging Face's `transformers`."""

import re
from collections.abc import Sequence
from os import PathLike
from pathlib import PurePath
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel

from mixhead_plugin.heads.page import Attention, Sentence, write_page
from mixhead_plugin.heads.study import LayerHeads
from mixhead_plugin.hf.adapter import attentions


def view(
    model: PreTrainedModel,
    tokenizer: Any,
    text: str | Sequence[str],
    file: str | PathLike[str],
    target: str | Sequence[str] | None = None,
    length: int = 128,
) -> None:
    """Write one HTML file that shows the heads of a model, mixed or not, on one text or several.

    An encoder-decoder reads `target` in its decoder, one for all texts or one for each; without it,
    what `generate` gives. ValueError if no attention is in `hf.LAYOUTS`, if targets do not fit the
    texts, or if a text is empty, or has more tokens than `length` or the positions of the model.
    """
    texts = [text] if isinstance(text, str) else list(text)
    targets = [target] * len(texts) if target is None or isinstance(target, str) else list(target)
    if len(targets) != len(texts):
        raise ValueError(f"target: has {len(targets)}, must be one for each of {len(texts)} texts")
    length = min(length, getattr(model.config, "max_position_embeddings", length))
    # transformers does not type what only some models have
    sentences, generates = [], cast(Any, model)
    for one, its_target in zip(texts, targets):
        inputs = tokenizer(one, return_tensors="pt").to(model.device)
        read = _words(tokenizer, inputs["input_ids"], length)
        written, follows = read, read[1:]
        if model.config.is_encoder_decoder:
            if its_target is None:
                output = generates.generate(**inputs)[:, 1:]
            else:
                output = tokenizer(text_target=its_target, return_tensors="pt")["input_ids"].to(
                    model.device
                )
            inputs["decoder_input_ids"] = generates.prepare_decoder_input_ids_from_labels(
                labels=output
            )
            written, follows = (
                _words(tokenizer, inputs["decoder_input_ids"], length),
                _words(tokenizer, output, length),
            )
        found = [_heads(model, heads) for heads in attentions(model, inputs).values()]
        sites = {attention.site for attention in found}
        encoder, decoder = "encoder-self" in sites, "decoder-self" in sites
        sides = read if encoder else [], written if decoder else [], follows if decoder else []
        sentences.append(Sentence(*sides, found))
    # Only the last part of the path: whoever shares the page need not share where the model lies.
    name = PurePath(model.config.name_or_path or "").name
    write_page(file, name or type(model).__name__, type(model).__name__, sentences)


def _words(tokenizer: Any, tokens: Tensor, length: int) -> list[str]:
    """Return the words of the first sentence of tokens [1, N]."""
    if not 0 < tokens.size(1) <= length:
        raise ValueError(f"a text of {tokens.size(1)} tokens: must have 1 to length {length}")
    return [
        tokenizer.decode([t]).strip() or tokenizer.convert_ids_to_tokens(t)
        for t in tokens[0].tolist()
    ]


def _heads(model: PreTrainedModel, heads: LayerHeads) -> Attention:
    """Return the heads of one attention on the first sentence."""
    cross = re.search("cross|encoder_attn|EncDec", heads.name)
    causal = "decoder" in heads.name.split(".") or getattr(
        model.get_submodule(heads.name), "is_causal", False
    )
    site = "cross" if cross else "decoder-self" if causal else "encoder-self"
    layer = int(re.findall(r"\.(\d+)\.", heads.name)[0])
    mixing = heads.mixing
    return Attention(
        site,
        layer,
        heads.source[0],
        mixing[0] if mixing is not None and mixing.dim() == 4 else mixing,
    )
