"""Look at the heads of a model of `transformers`, silence them, weigh them and cut them off; mixed
or not.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from mixhead_plugin.heads import study as heads_of
from mixhead_plugin.heads.study import LayerHeads
from mixhead_plugin.hf import pruning
from mixhead_plugin.hf.attend import MixedHeads
from mixhead_plugin.hf.layouts import NAME, Site, sites_of
from mixhead_plugin.hf.mixing import (
    PRUNED,
    attach,
    has_adapters,
    refuse_offloaded,
    refuse_quantised,
)
from mixhead_plugin.hf.trial import check_row
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.reference import mix_heads, reference_with_weights
from mixhead_plugin.parts import complete


class SiteHeads:
    """The adapter of one attention, a `heads.Attention`."""

    def __init__(self, site: Site, model: PreTrainedModel):
        self.site, self.model, self.name = site, model, site.name
        self.mixed: MixedHeads | None = vars(site.module).get(NAME)

    @property
    def heads(self) -> int:
        return self.site.heads if self.mixed is None else self.mixed.sizes.mixed_heads

    @property
    def value_dim(self) -> int:
        return self.site.head_dim if self.mixed is None else self.mixed.sizes.value_dim

    def gate(self, change: Callable[[Tensor], Tensor]) -> RemovableHandle:
        parts = self.name.split(".")
        around = [self.model.get_submodule(".".join(parts[:n])) for n in range(len(parts) + 1)]

        def gated(projection: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if any(
                module.training and getattr(module, "gradient_checkpointing", False)
                for module in around
            ):
                raise ValueError(
                    f"{type(self.model).__name__}: gradient checkpointing may compute heads again "
                    "without their gates; "
                    "call model.eval() or model.gradient_checkpointing_disable()"
                )
            if args[0].size(-1) != self.heads * self.value_dim:
                wanted = f"must be {self.heads * self.value_dim} of {self.heads} heads"
                raise ValueError(
                    f"{self.name}: its outputs have {args[0].size(-1)} features, {wanted} in one "
                    "process"
                )
            outputs = args[0].unflatten(-1, (self.heads, -1))  # [B, Nq, H', Dv]
            return change(outputs).flatten(-2), *args[1:]

        return self.model.get_submodule(self.site.path("output")).register_forward_pre_hook(gated)

    def view(self, see: Callable[[LayerHeads], None]) -> RemovableHandle:
        if self.mixed is None:  # the weights that the eager attention returns

            def returned(module: nn.Module, args: Any, output: Any) -> None:
                see(LayerHeads(self.name, output[-1], None, output[-1]))

            return self.site.module.register_forward_hook(returned)

        def computed(inputs: AttentionInputs) -> None:
            source = reference_with_weights(inputs._replace(mixing=None, value=inputs.key))[1]
            see(LayerHeads(self.name, source, inputs.mixing, mix_heads(source, inputs.mixing)))

        number = RemovableHandle(self.mixed.viewers)
        self.mixed.viewers[number.id] = computed
        return number

    def cut(self, heads: Sequence[int]) -> None:
        pruning.cut(self.model, self.site, heads)


def heads_in(model: PreTrainedModel) -> list[SiteHeads]:
    """Return the attentions of a model in its order; raise ValueError if there are none."""
    return [SiteHeads(site, model) for site in sites_of(model)]


def ablate(
    model: PreTrainedModel, heads: Mapping[int | str, Iterable[int]]
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the outputs of some heads are 0; where heads mix, of mixed heads.

    It acts on calls in the thread that opened it. Compiled models run uncompiled inside.

    Args:
        heads: numbers of heads by layer; a layer is the number of an attention in the order of the
            model, from 0, or its name in the model. An encoder comes before its decoder.

    Raises:
        ValueError: a layer or a head that does not exist; in a call, a model that trains with
            gradient checkpointing
        RuntimeError: at the end, if no call passed any of the layers; a warning names single layers
    """
    return heads_of.ablate(heads_in(model), heads)


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
        batches: arguments of the model; the first dimension of their first tensor counts sentences
        loss: takes the model and a batch, and returns the sum of the losses of its sentences

    Raises:
        ValueError: no batch, a loss without a gradient, or an importance that is not finite
        RuntimeError: the loss calls the model in no way that passes its attentions; a warning names
            single layers
    """
    training = model.training
    model.eval()
    try:
        return heads_of.importance(heads_in(model), batches, lambda batch: loss(model, batch))
    finally:
        model.train(training)


def attentions(model: PreTrainedModel, inputs: Mapping[str, Any]) -> dict[int, LayerHeads]:
    """Return source weights, M and mixed weights of every attention that a call uses, by layer, as
    in `ablate`.

    Args:
        inputs: the arguments of one call of the model, which is made without dropout and cache
    """
    found = heads_in(model)
    plain = all(each.mixed is None for each in found)
    former, training = model.config._attn_implementation, model.training
    arguments = {**inputs, **({"use_cache": False} if model.can_generate() else {})}
    if plain:
        model.set_attn_implementation("eager")  # the others return no weights
    model.eval()
    try:
        return heads_of.seen(found, lambda: model(**arguments))
    finally:
        if plain:
            model.set_attn_implementation(former)
        model.train(training)


def prune(model: PreTrainedModel, heads: Mapping[int | str, Iterable[int]]) -> PreTrainedModel:
    """Remove some heads of `model`, in place, and return it; it computes what it does while they
    are ablated.

    Where heads mix, mixed heads lose their values, their columns of M and their share of the output
    projection. Else queries and keys shrink, too. `save_pretrained` writes the smaller model, and
    `load` reads it.

    Args:
        heads: as in `ablate`, in the present numbering; grouped keys lose whole groups

    Raises:
        ValueError: a layer or a head that does not exist, a part of a group, all heads of a layer,
            heads that need each other, or a model with adapters, or with weights that are offloaded
            or quantised
    """
    if has_adapters(model):
        raise ValueError(
            f"{type(model).__name__}: has adapters; must be pruned before they are added"
        )
    refuse_offloaded(model, "pruned")
    refuse_quantised(model, "pruned")

    found = heads_in(model)
    for each in found:
        if each.mixed is None:  # what is mixed was checked then
            each.site.check_sizes(model)
            check_row(each.site, model)
    for layer, some in heads_of.choose(found, heads).items():
        pruning.check(model, found[layer].site, layer, some)
        pruning.try_out(model, found[layer].site, some)

    return prune_checked(model, heads)


def prune_checked(
    model: PreTrainedModel, heads: Mapping[int | str, Iterable[int]]
) -> PreTrainedModel:
    """Prune a model whose weights may be empty, because they are loaded later."""
    found = heads_in(model)
    chosen = heads_of.choose(found, heads)
    for layer, some in chosen.items():
        pruning.check(model, found[layer].site, layer, some)
    if found[0].mixed is None:
        attach(model, complete({}), "auto")
        found = heads_in(model)
    for layer, some in chosen.items():
        found[layer].cut(some)
    gone = {}
    for layer, each in enumerate(found):
        mixed: Any = each.mixed
        if left_out := sorted({*range(mixed.outputs)} - {*mixed.kept["mixed"]}):
            gone[layer] = left_out
    config: Any = model.config
    setattr(config, PRUNED, gone)
    return model
