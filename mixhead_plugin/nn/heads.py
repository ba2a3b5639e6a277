"""Leave out the heads of a torch model, weigh them, look at them and cut them off.

The functions are called as those of `mixhead_plugin.hf`.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mixhead_plugin.errors import wrong_argument
from mixhead_plugin.heads import ablation, cutting, views
from mixhead_plugin.heads.attention import HeadsError, LayerHeads
from mixhead_plugin.heads.gates import evaluating
from mixhead_plugin.heads.importance import importance_by_layer
from mixhead_plugin.nn.adapter import attentions_of
from mixhead_plugin.nn.refusals import refuse_shared

# The arguments of one call of a model: by keyword, by position, or one tensor.
Inputs = Mapping[str, Any] | Sequence[Any] | Tensor


def ablate(
    model: nn.Module, heads: Mapping[int | str, Iterable[int]]
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the outputs of some heads are 0; where heads mix, of mixed heads.

    It acts on calls in the thread that opened it. Compiled models run uncompiled inside. Whoever
    trains with activation checkpointing calls `backward` inside, too, because it computes heads
    again; what a backward pass computes counts in every thread.

    Args:
        model: a model with attentions that `mix` made, or with `MixedAttention`
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
        model: a model with attentions that `mix` made, or with `MixedAttention`
        batches: what `loss` takes: dicts, tuples or tensors; the first dimension of their first
            tensor counts sentences
        loss: takes the model and a batch, and returns the sum of the losses of its sentences

    Raises:
        ValueError: a model without such attentions, no batch, a loss that is not one number with a
            gradient, or an importance that is not finite
        RuntimeError: the loss calls the model in no way that passes its attentions; a warning names
            single layers
    """
    layers = attentions_of(model)
    return importance_by_layer(model, layers, batches, loss)


def attentions(model: nn.Module, inputs: Inputs) -> dict[int, LayerHeads]:
    """Return source weights, M and mixed weights of every attention, by layer.

    An attention that a call does not use is left out. Layers are those of `ablate`.

    Args:
        model: a model with attentions that `mix` made, or with `MixedAttention`
        inputs: the arguments of one call of the model, which is made without dropout: a dict of
            keywords, a tuple, or one tensor

    Raises:
        ValueError: a model without such attentions, or inputs of another kind
    """
    layers = attentions_of(model)
    if isinstance(inputs, str) or not isinstance(inputs, (Mapping, Sequence, Tensor)):
        wanted = "a tensor, a tuple of arguments, or a dict of keywords"
        raise HeadsError(wrong_argument("inputs", inputs, wanted))
    with evaluating(model):
        return views.heads_in_call(layers, lambda: _call(model, inputs))


def prune(model: nn.Module, heads: Mapping[int | str, Iterable[int]]) -> nn.Module:
    """Remove some heads of `model`, in place, and return it.

    It computes what it does while they are ablated.

    Where heads mix, mixed heads lose their values, their columns of M and their share of the output
    projection. Else queries and keys shrink, too. A state dict of the smaller model loads into a
    model that was pruned by the same heads. Parameters are new, so make the optimizer afterwards.

    Args:
        model: a model with attentions that `mix` made, or with `MixedAttention`
        heads: numbers of heads by layer, in the present numbering; a layer is the number of an
            attention in the order of the model, from 0, or its name in the model

    Raises:
        ValueError: a model without such attentions, a layer or a head that does not exist, all
            heads of a layer, heads that need each other, or an attention that shares a parameter
            with another module
    """
    layers = attentions_of(model)
    chosen = cutting.chosen_to_cut(layers, heads)
    modules = {name or type(model).__name__: module for name, module in model.named_modules()}
    replaced: list[nn.Parameter] = []
    for layer, some in chosen.items():
        if some:
            replaced += modules[layers[layer].name].parameters()
    refuse_shared(model, replaced)
    cutting.cut_chosen(layers, chosen)
    return model


def _call(model: nn.Module, inputs: Inputs) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(*inputs)
