"""Look at the heads of a model of `transformers`, silence, weigh and cut them.

The model may be mixed or not.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from mixhead_plugin.errors import wrong_argument
from mixhead_plugin.heads import ablation, cutting, views
from mixhead_plugin.heads.attention import HeadsError, LayerHeads
from mixhead_plugin.heads.choosing import choose
from mixhead_plugin.heads.gates import evaluating
from mixhead_plugin.heads.importance import importance_by_layer
from mixhead_plugin.hf import pruning
from mixhead_plugin.hf.mixing import add_mixing, unfit
from mixhead_plugin.hf.refusals import (
    check_model,
    refuse_adapters,
    refuse_computed,
    refuse_offloaded,
    refuse_own_functions,
    refuse_quantised,
    refuse_shared_outputs,
    refuse_shared_weights,
)
from mixhead_plugin.hf.saving import PRUNED, removed_heads
from mixhead_plugin.hf.studied_attention import StudiedAttention, attentions_of
from mixhead_plugin.parts import Variant


def ablate(
    model: PreTrainedModel, heads: Mapping[int | str, Iterable[int]]
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the outputs of some heads are 0; where heads mix, of mixed heads.

    It acts on calls in the thread that opened it, and in every backward pass. Compiled models run
    uncompiled inside.

    Args:
        model: any model that `mix` takes, mixed or not
        heads: numbers of heads by layer; a layer is the number of an attention in the order of the
            model, from 0, or its name in the model. An encoder comes before its decoder.

    Raises:
        ValueError: a layer or a head that does not exist; in a call, a model that trains with
            gradient checkpointing
        RuntimeError: at the end, if no call passed any of the layers; a warning names single layers
    """
    return ablation.ablate(_silenced(model), heads)


def importance(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Any]],
    loss: Callable[[PreTrainedModel, Mapping[str, Any]], Tensor],
) -> dict[int, Tensor]:
    """Return the importance of every head by layer, as in `ablate`, each [H'] in float64.

    The importance of head h is I_h, the mean over the sentences of |dL/d xi_h|, for a gate xi_h = 1
    on its output (Michel et al. 2019, section 4.1; sixteen-heads essay), as in `python -m
    mixhead_plugin.analysis importance`. Compiled models run uncompiled.

    Args:
        model: any model that `mix` takes, mixed or not
        batches: arguments of the model; the first dimension of their first tensor counts sentences
        loss: takes the model and a batch, and returns the sum of the losses of its sentences

    Raises:
        ValueError: no batch, a loss that is not one number with a gradient, or an importance that
            is not finite
        RuntimeError: the loss calls the model in no way that passes its attentions; a warning names
            single layers
    """
    layers = _silenced(model)
    return importance_by_layer(model, layers, batches, loss)


def _silenced(model: PreTrainedModel) -> list[StudiedAttention]:
    """Return the attentions of a model; raise ValueError if gates on one would act on another."""
    layers = attentions_of(model)
    refuse_shared_outputs(model, [each.attention for each in layers])
    return layers


def attentions(model: PreTrainedModel, inputs: Mapping[str, Any]) -> dict[int, LayerHeads]:
    """Return source weights, M and mixed weights of every attention, by layer.

    An attention that a call does not use is left out. Layers are those of `ablate`.

    Args:
        model: any model that `mix` takes, mixed or not
        inputs: the arguments of one call of the model, which is made without dropout and cache

    Raises:
        ValueError: a model without attentions that are known, one whose attention or mask function
            is not of transformers, or inputs that are no dict of tensors
    """
    check_model(model)
    layers = attentions_of(model)
    if not isinstance(inputs, Mapping):
        wanted = "a dict of arguments, as {'input_ids': ids} or a tokenizer returns"
        raise HeadsError(wrong_argument("inputs", inputs, wanted))
    tokens = inputs.get("input_ids")
    if tokens is not None and not isinstance(tokens, Tensor):
        wanted = "a tensor, as a tokenizer gives it with return_tensors='pt'"
        raise HeadsError(wrong_argument("inputs['input_ids']", tokens, wanted))
    arguments = dict(inputs)
    if model.can_generate():
        arguments["use_cache"] = False
    plain = [each for each in layers if each.mixed is None]
    for each in plain:
        refuse_own_functions(each.attention)
    with contextlib.ExitStack() as stack:
        if plain:
            # No other attention of transformers returns weights. Towers that are mixed stay mixed.
            stack.enter_context(_eager(model))
        stack.enter_context(evaluating(model))
        return views.heads_in_call(layers, lambda: model(**arguments))


@contextlib.contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    """Let a model compute its attentions by eager; each tower returns to its own way."""
    former = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            former.append((module.config, module.config._attn_implementation))
    try:
        model.set_attn_implementation("eager")
        yield
    finally:
        for config, implementation in former:
            config._attn_implementation_internal = implementation


def prune(model: PreTrainedModel, heads: Mapping[int | str, Iterable[int]]) -> PreTrainedModel:
    """Remove some heads of `model`, in place, and return it.

    It computes what it does while they are ablated. Without any head in `heads`, nothing changes.

    Where heads mix, mixed heads lose their values, their columns of M and their share of the output
    projection. Else queries and keys shrink, too. `save_pretrained` writes the smaller model, and
    `load` reads it.

    Args:
        model: any model that `mix` takes, mixed or not
        heads: numbers of heads by layer, in the present numbering; a layer is the number of an
            attention in the order of the model, from 0, or its name in the model. Where queries
            share keys (grouped-query attention), whole groups must go

    Raises:
        ValueError: a layer or a head that does not exist, a part of a group, all heads of a layer,
            heads that need each other, or a model with adapters, or with weights that are
            offloaded, quantised or computed in each call (weight_norm)
    """
    check_model(model)
    layers = attentions_of(model)
    all_found = [each.attention for each in layers]
    refuse_adapters(model, "pruned before they are added")
    refuse_offloaded(model, "pruned")
    refuse_quantised(model, all_found, "pruned")
    refuse_computed(model, all_found, "pruned")
    refuse_shared_weights(model, all_found, "pruned")

    chosen = {layer: some for layer, some in choose(layers, heads).items() if some}
    if not chosen:
        return model  # and its config does not tell of a change

    is_plain = all(each.mixed is None for each in layers)
    problems = {}
    if is_plain:  # what is mixed was checked when it was mixed
        problems = unfit(model, all_found, Variant())
    for layer in chosen:
        class_name = layers[layer].attention.class_name
        if class_name in problems:
            raise ValueError(problems[class_name])
        if not is_plain and layers[layer].mixed is None:
            raise ValueError(f"{class_name}: is not mixed, other attentions of the model are")
    cutting.refuse_what_cannot_go(layers, chosen)
    for layer, some in chosen.items():
        pruning.try_out(layers[layer].attention, model, some)

    if is_plain:
        # Plain heads can be cut only where hooks keep count of them.
        fitting = [attention for attention in all_found if attention.class_name not in problems]
        add_mixing(model, Variant(), fitting)
    cut_and_note_in_config(model, layers, chosen)
    return model


def cut_and_note_in_config(
    model: PreTrainedModel, layers: Sequence[StudiedAttention], chosen: Mapping[int, Sequence[int]]
) -> None:
    """Cut heads of a model that `add_mixing` has seen, and note in its config which are gone.

    Args:
        model: its weights may be empty, and loaded later
        layers: its attentions, in its order
        chosen: the heads that go, as `choose` returns them; they must be such that can go
    """
    cutting.cut_chosen(layers, chosen)
    gone = removed_heads(model)
    if gone:
        config: Any = model.config
        setattr(config, PRUNED, gone)
