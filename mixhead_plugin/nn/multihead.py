"""Put a `MixedAttention` in the place of an `nn.MultiheadAttention`, and the other way round."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from mixhead_plugin.nn.attention import MixedAttention
from mixhead_plugin.parts import PARTS, first_part_with_effect
from mixhead_plugin.parts.tables import PART_NAMES

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")

# What somebody puts on the class acts on every attention, until they are replaced.
_FORWARD = nn.MultiheadAttention.forward


@torch.inference_mode(False)  # of tensors that were made in it, none can be trained
def mixed_of(old: nn.MultiheadAttention, keywords: dict[str, Any]) -> MixedAttention:
    """Return a mixed attention with the weights, hooks, mode and frozen parameters of torch's.

    A parameter of the same shape is the same object, so others may share it and go on with it.

    Args:
        old: torch's own class, no subclass
        keywords: the keywords of `MixedAttention` that it does not share with torch's

    Raises:
        ValueError: keywords that cannot work, or an attention with constant keys
    """
    new = MixedAttention(
        old.embed_dim,
        old.num_heads,
        dropout=old.dropout,
        bias=old.in_proj_bias is not None,
        add_bias_kv=old.bias_k is not None,
        add_zero_attn=old.add_zero_attn,
        kdim=old.kdim,
        vdim=old.vdim,
        batch_first=old.batch_first,
        device=old.out_proj.weight.device,
        dtype=old.out_proj.weight.dtype,
        **keywords,
    )
    for name, size in (("head_dim", new.head_dim), ("value_head_dim", new.value_head_dim)):
        if size != old.head_dim:
            raise ValueError(
                f"{name} {size}: must be {old.head_dim} or left out, nn.MultiheadAttention has its "
                "own"
            )

    given = old.state_dict(keep_vars=True)
    # Its own tensors come first: a sink has no start that a checkpoint without it could mean.
    new.load_state_dict({**new.state_dict(), **given})
    for name, parameter in list(new.named_parameters()):
        former = given.get(_former_name(name, given))
        if former is None:  # of a part
            continue
        if former.shape == parameter.shape:
            owner, _, entry = name.rpartition(".")  # "out_proj", "weight"
            setattr(new.get_submodule(owner), entry, former)
        else:
            parameter.requires_grad_(former.requires_grad)
            vars(parameter).update(vars(former))  # such as a factor on its learning rate

    _move_attributes(old, new)
    _move_attributes(old.out_proj, new.out_proj)
    _move_hooks(old, new)
    return new.train(old.training)


def _former_name(name: str, given: dict[str, Any]) -> str:
    """Return what torch calls a parameter.

    `q_proj.weight` is a part of `in_proj_weight`, or it is `q_proj_weight` where queries, keys and
    values have their own sizes.

    Args:
        name: in a mixed attention
        given: the tensors of torch's attention, by name
    """
    if name in given:
        return name
    apart = name.replace(".", "_")
    if apart in given:
        return apart
    return f"in_{apart[2:]}"  # "q_proj_weight" -> "in_proj_weight"


@torch.inference_mode(False)  # as above
def plain_of(mixed: MixedAttention) -> nn.MultiheadAttention:
    """Return torch's attention with the weights of a mixed one whose mixing does nothing."""
    weight = mixed.out_proj.weight
    bias = mixed.out_proj.bias
    new = nn.MultiheadAttention(
        mixed.embed_dim,
        mixed.num_heads,
        dropout=mixed.dropout,
        bias=bias is not None,
        kdim=mixed.kdim,
        vdim=mixed.vdim,
        batch_first=mixed.batch_first,
        device=weight.device,
        dtype=weight.dtype,
    )
    projections = [mixed.q_proj, mixed.k_proj, mixed.v_proj]
    weights = [projection.weight for projection in projections]
    if new.in_proj_weight is not None:
        _take(new.in_proj_weight, *weights)
    else:
        # torch calls it q_proj_weight where queries, keys and values have their own sizes.
        new.q_proj_weight, new.k_proj_weight, new.v_proj_weight = weights
    if bias is not None:
        _take(new.in_proj_bias, *(projection.bias for projection in projections))
    new.out_proj.weight = weight
    new.out_proj.bias = bias

    _move_attributes(mixed, new)
    _move_attributes(mixed.out_proj, new.out_proj)
    _move_hooks(mixed, new)
    return new.train(mixed.training)


def _take(parameter: Any, *parts: Tensor) -> None:
    """Copy tensors, one below the other; frozen if all of them are."""
    with torch.no_grad():
        parameter.copy_(torch.cat(parts))
    parameter.requires_grad_(any(part.requires_grad for part in parts))
    for part in parts:
        vars(parameter).update(vars(part))


def _move_attributes(old: nn.Module, new: nn.Module) -> None:
    """Let a module have what a program has written on another, such as the number of its layer."""
    for name, value in _written_on(old).items():
        # torch never calls its `out_proj`, so what somebody has put over a method does nothing.
        if not hasattr(type(old), name):
            setattr(new, name, value)


def _written_on(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module, of either class or a projection, that are not its own."""
    usual = _usual_attributes(nn.Linear)
    for cls in (nn.MultiheadAttention, MixedAttention):
        if isinstance(module, cls):
            usual = _usual_attributes(cls)
    return {name: value for name, value in vars(module).items() if name not in usual}


@functools.cache
def _usual_attributes(cls: Any) -> frozenset[str]:
    """Return the names of the attributes that a module of a class gets when it is built."""
    # On another device it would draw weights, and so change the random numbers of the program.
    with torch.device("meta"):
        return frozenset(vars(cls(1, 1)))


@functools.cache
def _tensors_of_torch() -> frozenset[str]:
    """Return all names that tensors of an `nn.MultiheadAttention` may have."""
    with torch.device("meta"):
        packed = nn.MultiheadAttention(1, 1, add_bias_kv=True)
        apart = nn.MultiheadAttention(1, 1, kdim=2, vdim=2)
    return frozenset({*packed.state_dict(), *apart.state_dict()})


def copied_of(attention: nn.MultiheadAttention | MixedAttention) -> list[nn.Parameter]:
    """Return the parameters that are one in torch's attention and three in a mixed one.

    The other class gets copies of them, so nothing else can share them.
    """
    copied: list[Any]
    if isinstance(attention, nn.MultiheadAttention):
        copied = [attention.in_proj_weight, attention.in_proj_bias]
    else:
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        copied = [projection.bias for projection in projections]
        # Where queries, keys and values have their own sizes, torch's has their weights apart, too.
        if attention.kdim == attention.vdim == attention.embed_dim:
            copied += [projection.weight for projection in projections]
    return [parameter for parameter in copied if parameter is not None]


def problem_of(old: nn.MultiheadAttention) -> str:
    """Return in a few words what a tool has changed, so that it cannot be replaced; empty if not.

    Only what is certainly torch's own is copied.
    """
    if nn.MultiheadAttention.forward is not _FORWARD:
        return "has another nn.MultiheadAttention.forward"
    for name in old.state_dict():
        if name not in _tensors_of_torch():
            return f"has {name}"
    problem = _addition(old)
    if problem:
        return problem

    # torch takes the weight of any `out_proj`, and never calls it.
    if old.out_proj.weight.shape != (old.embed_dim, old.embed_dim):
        return "has another out_proj"
    if (old.out_proj.bias is None) != (old.in_proj_bias is None):
        return "has another out_proj"
    for name, parameter in old.named_parameters():
        # Types of their own are those of quantised and of sharded weights.
        if type(parameter) is not nn.Parameter:
            return f"has a {type(parameter).__name__} as {name}"
    return _hook_of_gradient(old)


def problem_of_mixed(mixed: MixedAttention) -> str:
    """Return in a few words what a tool has changed, so that torch's cannot replace it."""
    if type(mixed) is not MixedAttention:
        return f"is a {type(mixed).__name__}"
    problem = _addition(mixed)
    if problem:
        return problem
    if mixed._attention_pre_hooks or mixed._attention_hooks:
        return "has hooks of its heads"
    for place in PROJECTIONS:
        projection = mixed.get_submodule(place)
        is_linear = type(projection) is nn.Linear and "forward" not in vars(projection)
        if not is_linear or projection._parameters.keys() != {"weight", "bias"}:
            return f"has another {place}"
        # torch's attention has no modules for the others, which could have what was written there.
        if place != "out_proj":
            for name in _written_on(projection):
                return f"has {place}.{name}"
        for table, hooks in vars(projection).items():
            if "_hook" in table and "state_dict" not in table and hooks:
                return f"has hooks of {place}"
    return _hook_of_gradient(mixed)


def _addition(module: nn.MultiheadAttention | MixedAttention) -> str:
    """Return in a few words what was put on an attention and cannot move; empty if nothing.

    What acts instead of a method of the class is called with the old module, as a patched `forward`
    or the graph of `module.compile()`. Other names mean something to the other class.
    """
    both = _usual_attributes(nn.MultiheadAttention) | _usual_attributes(MixedAttention)
    for name in _written_on(module):
        if hasattr(type(module), name) or name in both:
            return f"has a {name} of its own"
    for name in (*module._buffers, *module._modules):
        if name not in (*PROJECTIONS, *PART_NAMES):
            return f"has {name}"
    return ""


def _hook_of_gradient(attention: nn.MultiheadAttention | MixedAttention) -> str:
    """Return in a few words which copied parameter has a hook, which its copies would not have."""
    copied = {id(parameter) for parameter in copied_of(attention)}
    for name, parameter in attention.named_parameters():
        hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        if id(parameter) in copied and hooks:
            return f"has a hook on the gradient of {name}"
    return ""


def _move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Let a module have torch's hooks of another.

    But not those of state dicts, which know names of the old one.
    """
    for name in vars(nn.Module()):
        if "_hook" in name and "state_dict" not in name:
            setattr(new, name, getattr(old, name))


def is_pruned(mixed: MixedAttention) -> bool:
    """Return whether heads were cut off a mixed attention; torch's has no place for fewer."""
    heads_per_mixed = mixed.variant.part_kinds()["head_mixing"].heads_per_mixed
    if mixed.num_mixed_heads * heads_per_mixed != mixed.num_heads:
        return True
    # Where heads do not mix, pruning cuts queries and keys, too. Another `head_dim` is no pruning.
    is_smaller = mixed.num_heads * mixed.head_dim != mixed.embed_dim
    return is_smaller and mixed.variant.head_dim is None


def lost_without(mixed: MixedAttention) -> str:
    """Return in a few words why torch's attention would compute something else; empty if not."""
    if mixed.normalizer != "softmax":
        return f"normalizer {mixed.normalizer}"
    if mixed.causal:
        return "causal"
    if mixed.num_heads * mixed.head_dim != mixed.embed_dim:
        return f"head_dim {mixed.head_dim}"
    if mixed.value_head_dim != mixed.head_dim:
        return f"value_head_dim {mixed.value_head_dim}"
    parts = {option: getattr(mixed, option) for option in PARTS}
    return first_part_with_effect({**parts, "relative_gain": mixed.relative_gain})
