"""Write the page of `page` for models of Hugging Face's `transformers`."""

import re
from collections.abc import Sequence
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from mixhead_plugin import hf
from mixhead_plugin.analysis.page import Attention, Sentence, write_page


def view(
    model: PreTrainedModel,
    tokenizer: Any,
    text: str | Sequence[str],
    file: str | PathLike[str],
    target: str | None = None,
) -> None:
    """Write one HTML file that shows the heads of a model, mixed or not, on one text or several.

    An encoder-decoder reads `target` in its decoder; without it, what `generate` gives. ValueError if no attention is
    in `hf.LAYOUTS`.
    """
    sentences = []
    for one in [text] if isinstance(text, str) else text:
        inputs = tokenizer(one, return_tensors="pt").to(model.device)
        read, written = _words(tokenizer, inputs["input_ids"]), []
        if model.config.is_encoder_decoder:
            if target is None:
                output = model.generate(**inputs)[:, 1:]
            else:
                output = tokenizer(text_target=target, return_tensors="pt")["input_ids"].to(model.device)
            inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=output)
            written = _words(tokenizer, inputs["decoder_input_ids"]), _words(tokenizer, output)
        found = _heads(model, inputs)
        sides = (
            (read, *written) if written else (read, [], []) if found[0].site == "encoder-self" else ([], read, read[1:])
        )
        sentences.append(Sentence(*sides, found))
    write_page(file, model.config.name_or_path or type(model).__name__, type(model).__name__, sentences)


def _words(tokenizer: Any, tokens: Tensor) -> list[str]:
    """Return the words of the first sentence of tokens [1, N]."""
    return [tokenizer.decode([t]).strip() or tokenizer.convert_ids_to_tokens(t) for t in tokens[0].tolist()]


def _heads(model: PreTrainedModel, inputs: Any) -> list[Attention]:
    """Return the heads of all attentions for one sentence."""
    modules = {name: module for name, module in model.named_modules() if type(module).__name__ in hf.LAYOUTS}
    if not modules:
        raise ValueError(f"{type(model).__name__}: has none of the attentions of hf.LAYOUTS: {', '.join(hf.LAYOUTS)}")
    found: dict[str, Attention] = {}
    hooks = [m.register_forward_hook(partial(_see, found, name), with_kwargs=True) for name, m in modules.items()]
    mixed = any(hasattr(module, hf.NAME) for module in modules.values())
    former, training = model.config._attn_implementation, model.training
    AttentionInterface.register(hf.NAME, _with_weights)
    if not mixed:
        model.set_attn_implementation("eager")  # the others return no weights
    try:
        with torch.no_grad():
            model.eval()(**inputs, **({"use_cache": False} if model.can_generate() else {}))
    finally:
        AttentionInterface.register(hf.NAME, hf.mixed_attention)
        if not mixed:
            model.set_attn_implementation(former)
        model.train(training)
        for hook in hooks:
            hook.remove()
    return list(found.values())


def _with_weights(*tensors: Any, **settings: Any) -> tuple[Tensor, Tensor | None]:
    return hf.mixed_attention(*tensors, **settings | {"output_attentions": True})


def _see(found: dict[str, Attention | None], name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Keep the heads of an attention. Where they are mixed, call it again with a mixing that copies source heads."""
    if name in found:
        return
    found[name] = None  # such a call of its own
    weights, mixings = [output[-1][0]], []
    if getattr(module, "head_mixing", None) is not None:
        sizes = getattr(module, hf.NAME).sizes
        weights = []
        for copied in torch.eye(sizes.num_heads, device=output[0].device).split(sizes.mixed_heads, 1):

            def replace(part: nn.Module, inputs: Any, mixing: Tensor, copied: Tensor = copied) -> Tensor:
                mixings.append(mixing)
                return copied

            with module.head_mixing.register_forward_hook(replace):
                weights.append(module(*args, **kwargs)[-1][0])
    mixing = mixings[0] if mixings else None
    cross = re.search("cross|encoder_attn|EncDec", name)
    decoder = "decoder" in name.split(".") or getattr(module, "is_causal", False)
    site = "cross" if cross else "decoder-self" if decoder else "encoder-self"
    layer = int(re.search(r"\.(\d+)\.", name)[1])
    found[name] = Attention(
        site, layer, torch.cat(weights), mixing[0] if mixing is not None and mixing.dim() == 4 else mixing
    )
