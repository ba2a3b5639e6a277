"""Look at the heads of a model, silence them, and weigh them; mixed or not."""

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mixhead_plugin.hf.attend import NAME
from mixhead_plugin.hf.layouts import Site, sites_of
from mixhead_plugin.ops.reference import mix_heads, reference_with_weights


class LayerHeads(NamedTuple):
    """The heads of one attention in one call."""

    name: str  # of the attention in the model
    source: Tensor  # P [B, H, Nq, Nk]
    mixing: Tensor | None  # M [H, H'] or [B, Nq, H, H']; None where heads do not mix
    mixed: Tensor  # [B, H', Nq, Nk]; P where heads do not mix


def outputs_of(site: Site) -> int:
    """Return the number of heads whose outputs an attention gives to its output projection."""
    mixed = vars(site.module).get(NAME)
    return site.heads if mixed is None else mixed.sizes.mixed_heads


def choose(model: nn.Module, heads: Mapping[int | str, Iterable[int]]) -> dict[int, list[int]]:
    """Return the chosen heads by the number of their layer; raise ValueError if a layer or a head does not exist."""
    sites = sites_of(model)
    found: dict[int, list[int]] = {}
    numbers: dict[int | str, int] = {site.name: number for number, site in enumerate(sites)}
    for layer, some in heads.items():
        number = numbers.get(layer, layer)
        if not isinstance(number, int) or not 0 <= number < len(sites):
            raise ValueError(f"layer {layer!r}: must be from 0 to {len(sites) - 1}, or a name such as {sites[0].name}")
        found[number] = sorted({*map(operator.index, some), *found.get(number, ())})
        if wrong := [head for head in found[number] if head not in range(outputs_of(sites[number]))]:
            raise ValueError(f"head {wrong[0]} of layer {layer}: must be from 0 to {outputs_of(sites[number]) - 1}")
    return found


def ablate(model: PreTrainedModel, heads: Mapping[int | str, Iterable[int]]) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the outputs of some heads are 0; where heads mix, of mixed heads.

    Args:
        heads: numbers of heads by layer; a layer is the number of an attention in the order of the model, from 0, or
            its name in the model. An encoder comes before its decoder.

    Raises:
        ValueError: a layer or a head that does not exist
    """
    gates, sites = {}, sites_of(model)
    for layer, some in choose(model, heads).items():
        gates[layer] = torch.ones(outputs_of(sites[layer]))
        gates[layer][some] = 0
    return _gated(model, gates)


@contextlib.contextmanager
def _gated(model: nn.Module, gates: Mapping[int, Tensor]) -> Iterator[None]:
    """Multiply the outputs of heads by gates, by layer, each [H'] or [B, 1, H']."""
    sites, hooks = sites_of(model), []
    try:
        for layer, gate in gates.items():
            projection = model.get_submodule(sites[layer].path("output"))
            hooks.append(projection.register_forward_pre_hook(partial(_gate, gate)))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _gate(gate: Tensor, projection: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    heads = args[0].unflatten(-1, (gate.size(-1), -1))  # [B, Nq, H', Dv]
    return (heads * gate.to(heads)[..., None]).flatten(-2), *args[1:]


def importance(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Any]],
    loss: Callable[[PreTrainedModel, Mapping[str, Any]], Tensor],
) -> dict[int, Tensor]:
    """Return the importance of every head by layer, as in `ablate`, each [H'] in float64.

    The importance of head h is I_h, the mean over the sentences of |dL/d xi_h|, for a gate xi_h = 1 on its output
    (Michel et al. 2019, section 4.1; sixteen-heads essay), as in `python -m mixhead_plugin.analysis importance`.

    Args:
        batches: arguments of the model; the first dimension of their first tensor counts sentences
        loss: takes the model and a batch, and returns the sum of the losses of its sentences

    Raises:
        ValueError: no batch, or an importance that is not finite
    """
    sites, sentences, training = sites_of(model), 0, model.training
    sums = [torch.zeros(outputs_of(site), dtype=torch.float64) for site in sites]
    model.eval()
    try:
        for batch in batches:
            rows = next(x.size(0) for x in batch.values() if isinstance(x, Tensor))
            gates = {}
            for layer, (site, total) in enumerate(zip(sites, sums)):
                weight = next(site.module.parameters())
                dtype = torch.promote_types(weight.dtype, torch.float32)
                gates[layer] = torch.ones(rows, 1, len(total), dtype=dtype, device=weight.device, requires_grad=True)
            with torch.enable_grad(), _gated(model, gates):
                given = list(gates.values())
                gradients = torch.autograd.grad(loss(model, batch), given, allow_unused=True, materialize_grads=True)
            for total, gradient in zip(sums, gradients):
                total += gradient.double().abs().sum((0, 1)).cpu()
            sentences += rows
    finally:
        model.train(training)
    if not sentences or not all(total.isfinite().all() for total in sums):
        raise ValueError(f"importance: must have a batch and be finite; {sentences} sentences were seen")
    return {layer: total / sentences for layer, total in enumerate(sums)}


@torch.no_grad()
def attentions(model: PreTrainedModel, inputs: Mapping[str, Any]) -> dict[int, LayerHeads]:
    """Return source weights, M and mixed weights of every attention that a call uses, by layer, as in `ablate`.

    Args:
        inputs: the arguments of one call of the model, which is made without dropout and cache
    """
    sites = sites_of(model)
    found: dict[int, Any] = {}
    mixed = [vars(site.module)[NAME] for site in sites if hasattr(site.module, NAME)]
    former, training = model.config._attn_implementation, model.training
    hooks = [] if mixed else [s.module.register_forward_hook(partial(_see, found, i)) for i, s in enumerate(sites)]
    if not mixed:
        model.set_attn_implementation("eager")  # the others return no weights
    try:
        for heads in mixed:
            heads.seen = []
        model.eval()(**inputs, **({"use_cache": False} if model.can_generate() else {}))
        for layer, heads in enumerate(mixed):
            for call in heads.seen[:1]:
                source = reference_with_weights(call._replace(mixing=None, value=call.key))[1]
                found[layer] = source, call.mixing, mix_heads(source, call.mixing)
    finally:
        for heads in mixed:
            heads.seen = None
        for hook in hooks:
            hook.remove()
        if not mixed:
            model.set_attn_implementation(former)
        model.train(training)
    return {layer: LayerHeads(sites[layer].name, *found[layer]) for layer in sorted(found)}


def _see(found: dict[int, Any], layer: int, module: nn.Module, args: Any, output: Any) -> None:
    found.setdefault(layer, (output[-1], None, output[-1]))
