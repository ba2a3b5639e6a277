"""Look at the heads of a model of `transformers`, silence, weigh and cut them.

The model may be mixed or not.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from mixhead_plugin.heads import ablation, cutting, views
from mixhead_plugin.heads import importance as weighing
from mixhead_plugin.heads.attention import Heads, HeadsError, LayerHeads
from mixhead_plugin.heads.gates import evaluating
from mixhead_plugin.hf import pruning
from mixhead_plugin.hf.checks import check_outputs
from mixhead_plugin.hf.layouts import MIXHEAD, Site, sites_of
from mixhead_plugin.hf.mixed import MixedHeads
from mixhead_plugin.hf.mixing import (
    PRUNED,
    attach,
    refuse_adapters,
    refuse_offloaded,
    refuse_quantised,
    unfit,
)
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.reference import source_weights
from mixhead_plugin.parts import Variant


class SiteAttention:
    """The adapter of one attention, a `heads.Attention`."""

    def __init__(self, site: Site, model: PreTrainedModel):
        self.site = site
        self.model = model
        self.name = site.name
        self.mixed: MixedHeads | None = vars(site.module).get(MIXHEAD)
        self.is_checked = self.mixed is not None  # by `mix`

    @property
    def heads(self) -> dict[str, int]:
        return {"mixed": self.site.heads if self.mixed is None else self.mixed.sizes.mixed_heads}

    @property
    def value_dim(self) -> int:
        return self.site.head_dim if self.mixed is None else self.mixed.sizes.value_dim

    def _check_order(self) -> None:
        """Raise ValueError if the numbers of heads would mean others for the output projection."""
        if not self.is_checked:
            check_outputs(self.site, self.model)
            self.is_checked = True

    def gate(self, stage: str, change: Callable[[Tensor], Tensor]) -> RemovableHandle:
        assert stage == "mixed"  # what gives the outputs; `heads` has no other
        self._check_order()
        number = self.heads["mixed"]
        features = number * self.value_dim
        around = self._modules_around()

        def gated(projection: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if any(module.training and module.gradient_checkpointing for module in around):
                raise ValueError(
                    f"{type(self.model).__name__}: gradient checkpointing may compute heads again "
                    "without their gates; "
                    "call model.eval() or model.gradient_checkpointing_disable()"
                )
            if args[0].size(-1) != features:
                raise ValueError(
                    f"{self.name}: its outputs have {args[0].size(-1)} features, must be "
                    f"{features} of {number} heads in one process"
                )
            outputs = args[0].unflatten(-1, (number, -1))  # [B, Nq, H', Dv]
            return change(outputs).flatten(-2), *args[1:]

        return self.model.get_submodule(self.site.paths["output"]).register_forward_pre_hook(gated)

    def _modules_around(self) -> list[Any]:
        """Return the attention and what it is in, as far as they may be checkpointed."""
        parts = self.name.split(".")
        paths = [".".join(parts[:number]) for number in range(len(parts) + 1)]
        around = [self.model.get_submodule(path) for path in paths]
        return [module for module in around if hasattr(module, "gradient_checkpointing")]

    def view(self, see: Callable[[Heads], None]) -> RemovableHandle:
        if self.mixed is None:
            return self._view_eager(see)

        def computed(mixed: MixedHeads, inputs: AttentionInputs, outputs: Tensor) -> None:
            see(Heads(inputs.matrix(), partial(source_weights, inputs)))

        return self.mixed.register_attention_hook(computed)

    def _view_eager(self, see: Callable[[Heads], None]) -> RemovableHandle:
        """Let `see` have the weights that the eager attention of transformers returns."""
        self._check_order()

        def returned(module: nn.Module, args: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            weights = [each for each in outputs if self._are_weights(each)]
            if len(weights) > 1:
                raise HeadsError(
                    f"{self.name}: returns several tensors that may be its weights; mix it first, "
                    "as by hf.mix(model, 'none')"
                )
            if weights:  # else another implementation than eager computed it
                see(Heads(None, lambda: weights[0]))

        return self.site.module.register_forward_hook(returned)

    def _are_weights(self, output: Any) -> bool:
        """Return whether an output has a distribution of each head: T5 returns its bias, too."""
        if not isinstance(output, Tensor) or output.dim() != 4:
            return False
        if output.size(1) != self.site.heads or not output.is_floating_point():
            return False
        # Rows of half precision sum to 1 but for their rounding; with sinks, to less.
        sums = output.float().sum(-1)
        return bool((output >= 0).all() and (sums < 1.01).all() and (sums > 0).any())

    def cut_problem(self, heads: Sequence[int]) -> str:
        return pruning.problem(self.model, self.site, heads)

    def cut(self, heads: Mapping[str, Sequence[int]]) -> None:
        pruning.cut(self.model, self.site, heads["mixed"])


def attentions_of(model: PreTrainedModel) -> list[SiteAttention]:
    """Return the attentions of a model in its order; raise ValueError if there are none."""
    return [SiteAttention(site, model) for site in sites_of(model)]


def ablate(
    model: PreTrainedModel, heads: Mapping[int | str, Iterable[int]]
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the outputs of some heads are 0; where heads mix, of mixed heads.

    It acts on calls in the thread that opened it. Compiled models run uncompiled inside.

    Args:
        model: any model that `mix` takes, mixed or not
        heads: numbers of heads by layer; a layer is the number of an attention in the order of the
            model, from 0, or its name in the model. An encoder comes before its decoder.

    Raises:
        ValueError: a layer or a head that does not exist; in a call, a model that trains with
            gradient checkpointing
        RuntimeError: at the end, if no call passed any of the layers; a warning names single layers
    """
    return ablation.ablate(attentions_of(model), heads)


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
        ValueError: no batch, a loss without a gradient, or an importance that is not finite
        RuntimeError: the loss calls the model in no way that passes its attentions; a warning names
            single layers
    """
    with evaluating(model):
        numbers, _ = weighing.importance(
            attentions_of(model), batches, lambda batch: loss(model, batch), _sentences
        )
    return weighing.by_layer(numbers)


def _sentences(batch: Mapping[str, Any]) -> int:
    """Return the first dimension of the first tensor of a batch."""
    for entry in batch.values():
        if isinstance(entry, Tensor):
            return entry.size(0)
    raise HeadsError("importance: a batch has no tensor that counts its sentences")


def attentions(model: PreTrainedModel, inputs: Mapping[str, Any]) -> dict[int, LayerHeads]:
    """Return source weights, M and mixed weights of every attention, by layer.

    An attention that a call does not use is left out. Layers are those of `ablate`.

    Args:
        model: any model that `mix` takes, mixed or not
        inputs: the arguments of one call of the model, which is made without dropout and cache
    """
    found = attentions_of(model)
    plain = all(each.mixed is None for each in found)
    former = model.config._attn_implementation
    arguments = dict(inputs)
    if model.can_generate():
        arguments["use_cache"] = False
    if plain:
        model.set_attn_implementation("eager")  # the others return no weights
    try:
        with evaluating(model):
            return views.seen(found, lambda: model(**arguments))
    finally:
        if plain:
            model.set_attn_implementation(former)


def prune(model: PreTrainedModel, heads: Mapping[int | str, Iterable[int]]) -> PreTrainedModel:
    """Remove some heads of `model`, in place, and return it.

    It computes what it does while they are ablated.

    Where heads mix, mixed heads lose their values, their columns of M and their share of the output
    projection. Else queries and keys shrink, too. `save_pretrained` writes the smaller model, and
    `load` reads it.

    Args:
        model: any model that `mix` takes, mixed or not
        heads: as in `ablate`, in the present numbering. Where queries share keys (grouped-query
            attention), whole groups must go.

    Raises:
        ValueError: a layer or a head that does not exist, a part of a group, all heads of a layer,
            heads that need each other, or a model with adapters, or with weights that are offloaded
            or quantised
    """
    refuse_adapters(model, "pruned before they are added")
    refuse_offloaded(model, "pruned")
    refuse_quantised(model, "pruned")

    found = attentions_of(model)
    mixed = [each.site.kind for each in found if each.mixed is not None]
    # What is mixed was checked then.
    problems = {} if mixed else unfit(model, [each.site for each in found], Variant())
    kinds = set(mixed) or {each.site.kind for each in found} - problems.keys()
    for layer, some in cutting.cuttable(found, heads).items():
        site = found[layer].site
        if site.kind not in kinds:
            problem = f"{site.kind}: is not mixed, other attentions of the model are"
            raise ValueError(problems.get(site.kind, problem))
        pruning.try_out(model, site, some)

    if not mixed:
        attach(model, Variant(), kinds)
    return cut(model, heads)


def cut(model: PreTrainedModel, heads: Mapping[int | str, Iterable[int]]) -> PreTrainedModel:
    """Cut heads of a model that `attach` has seen; its weights may be empty and loaded later."""
    found = attentions_of(model)
    for layer, some in cutting.cuttable(found, heads).items():
        found[layer].cut({"mixed": some})
    gone = {}
    for layer, each in enumerate(found):
        mixed: Any = each.mixed
        if mixed is None:
            continue
        if left_out := sorted({*range(mixed.outputs)} - {*mixed.kept["mixed"]}):
            gone[layer] = left_out
    config: Any = model.config
    setattr(config, PRUNED, gone)
    return model
