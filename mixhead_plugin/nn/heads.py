"""Look at the heads of a torch model, silence them, weigh them and cut them off.

The functions are called as those of `mixhead_plugin.hf`.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

from torch import Tensor, nn

from mixhead_plugin.heads import ablation, cutting, views
from mixhead_plugin.heads import importance as weighing
from mixhead_plugin.heads.assembly import AssemblyAttention
from mixhead_plugin.heads.attention import Attention, HeadsError, LayerHeads
from mixhead_plugin.heads.gates import evaluating
from mixhead_plugin.heads.page import Sentence, ShownHeads, shown, write_page
from mixhead_plugin.heads.sites import Where, where
from mixhead_plugin.heads.text import sentence, with_targets, words
from mixhead_plugin.nn import sdpa
from mixhead_plugin.nn.attention import MixedAttention

# The arguments of one call of a model: by keyword, by position, or one tensor.
Inputs = Mapping[str, Any] | Sequence[Any] | Tensor


class SdpaAttention(AssemblyAttention):
    """The adapter of a module that calls F.scaled_dot_product_attention."""

    def __init__(self, name: str, module: nn.Module):
        super().__init__(name, vars(module)[sdpa.ATTRIBUTE])
        self.owner = module

    @property
    def heads(self) -> dict[str, int]:
        sizes = self.module.sizes
        if self.owner.head_mixing is None:
            return {"mixed": sizes.mixed_heads}
        return {"source": sizes.num_heads, "mixed": sizes.mixed_heads}

    def cut_problem(self, heads: Sequence[int]) -> str:
        return (
            "its module keeps its projections to itself, so no head can be cut; ablate them instead"
        )

    def cut(self, heads: Mapping[str, Sequence[int]]) -> None:
        raise HeadsError(f"{self.name}: {self.cut_problem([])}")


def of_mixed_attention(name: str, module: nn.Module) -> Attention | None:
    return AssemblyAttention(name, module) if isinstance(module, MixedAttention) else None


def of_mixed_sdpa(name: str, module: nn.Module) -> Attention | None:
    return SdpaAttention(name, module) if sdpa.is_mixed(module) else None


# What finds the attentions of a model. Each entry takes the name of a module and the module, and
# returns its adapter, or None if the module is not of its kind. A new kind of mixed attention adds
# an entry.
ADAPTERS: list[Callable[[str, nn.Module], Attention | None]] = [
    of_mixed_attention,
    of_mixed_sdpa,
]


def attentions_of(model: nn.Module) -> list[Attention]:
    """Return the mixed attentions of a model in its order; raise ValueError if there are none."""
    adapters = []
    for name, module in model.named_modules():
        for adapter in ADAPTERS:
            attention = adapter(name or type(module).__name__, module)
            if attention is not None:
                adapters.append(attention)
                break
    if not adapters:
        raise HeadsError(
            f"{type(model).__name__}: has no attention of mixhead_plugin.nn; mix(model, 'none') "
            "makes them without mixing"
        )
    return adapters


def ablate(
    model: nn.Module, heads: Mapping[int | str, Iterable[int]]
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the outputs of some heads are 0; where heads mix, of mixed heads.

    It acts on calls in the thread that opened it. Compiled models run uncompiled inside. Whoever
    trains with activation checkpointing calls `backward` inside, too, because it computes heads
    again.

    Args:
        model: has attentions that `mix` made, or `MixedAttention`
        heads: numbers of heads by layer; a layer is the number of an attention in the order of the
            model, from 0, or its name in the model

    Raises:
        ValueError: a model without such attentions; a layer or a head that does not exist
        RuntimeError: at the end, if no call passed any of the layers; a warning names single layers
    """
    return ablation.ablate(attentions_of(model), heads)


def importance(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
) -> dict[int, Tensor]:
    """Return the importance of every head by layer, as in `ablate`, each [H'] in float64.

    The importance of head h is I_h, the mean over the sentences of |dL/d xi_h|, for a gate xi_h = 1
    on its output (Michel et al. 2019, section 4.1; sixteen-heads essay). Compiled models run
    uncompiled.

    Args:
        model: as in `ablate`
        batches: what `loss` takes: dicts, tuples or tensors; the first dimension of their first
            tensor counts sentences
        loss: takes the model and a batch, and returns the sum of the losses of its sentences

    Raises:
        ValueError: a model without such attentions, no batch, a loss without a gradient, or an
            importance that is not finite
        RuntimeError: the loss calls the model in no way that passes its attentions; a warning names
            single layers
    """
    layers = attentions_of(model)
    return weighing.importance_by_layer(model, layers, batches, lambda batch: loss(model, batch))


def attentions(model: nn.Module, inputs: Inputs) -> dict[int, LayerHeads]:
    """Return source weights, M and mixed weights of every attention, by layer.

    An attention that a call does not use is left out. Layers are those of `ablate`.

    Args:
        model: as in `ablate`
        inputs: the arguments of one call of the model, which is made without dropout: a dict of
            keywords, a tuple, or one tensor

    Raises:
        ValueError: a model without such attentions
    """
    layers = attentions_of(model)
    with evaluating(model):
        return views.seen(layers, lambda: _call(model, inputs))


def prune(model: nn.Module, heads: Mapping[int | str, Iterable[int]]) -> nn.Module:
    """Remove some heads of `model`, in place, and return it.

    It computes what it does while they are ablated.

    Where heads mix, mixed heads lose their values, their columns of M and their share of the output
    projection. Else queries and keys shrink, too. A state dict of the smaller model loads into a
    model that was pruned by the same heads. Parameters are new, so make the optimizer afterwards.

    Args:
        model: as in `ablate`
        heads: as in `ablate`, in the present numbering

    Raises:
        ValueError: a model without such attentions, a layer or a head that does not exist, all
            heads of a layer, or heads that need each other
    """
    cutting.prune(attentions_of(model), heads)
    return model


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
        target: for an encoder-decoder; one for all texts or one for each. The decoder reads all
            tokens but the last one
        length: the largest number of tokens

    Raises:
        ValueError: a model without such attentions, or whose weights do not fit the tokens; targets
            that do not fit the texts; a text that is empty, or has more tokens than `length`
    """
    layers = attentions_of(model)
    sentences = []
    for read, written in with_targets(text, target):
        sentences.append(_sentence(model, tokenizer, read, written, length))
    name = type(model).__name__
    write_page(file, name, f"{name}, {len(layers)} attentions", sentences)


def _sentence(
    model: nn.Module, tokenizer: Any, text: str, target: str | None, length: int
) -> Sentence:
    """Return one text with the heads of the model on it."""
    device = next(model.parameters()).device
    tokens = tokenizer(text, return_tensors="pt")["input_ids"].to(device)  # [1, N]
    read = words(tokenizer, tokens, length)
    if target is None:
        written = read
        follows = read[1:]
        inputs = [tokens]
    else:
        output = tokenizer(text_target=target, return_tensors="pt")["input_ids"].to(device)
        written = words(tokenizer, output[:, :-1], length)
        follows = words(tokenizer, output[:, 1:], length)
        inputs = [tokens, output[:, :-1]]

    shown_heads: list[ShownHeads] = []
    layers: dict[str, int] = {}
    for heads in attentions(model, inputs).values():
        site = where(heads.name).site if target is not None else _site(heads.source)
        layer = layers.setdefault(site, 0)
        layers[site] += 1
        n_queries = len(read if site == "encoder-self" else written)
        n_keys = len(written if site == "decoder-self" else read)
        if heads.source.shape[2:] != (n_queries, n_keys):
            raise HeadsError(
                f"{heads.name}: its weights are {list(heads.source.shape[2:])}, must be "
                f"{[n_queries, n_keys]}; the model must take tokens [1, N]"
            )
        shown_heads.append(shown(Where(site, layer), heads.source, heads.mixing))
    return sentence(read, written, follows, shown_heads)


def _site(source: Tensor) -> str:
    """Return the site of a self-attention by its weights P [B, H, N, N].

    Those of a decoder do not see later keys.
    """
    return "encoder-self" if source.triu(1).any() else "decoder-self"


def _call(model: nn.Module, inputs: Inputs) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(*inputs)
