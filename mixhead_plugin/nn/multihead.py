"""Put a `MixedAttention` in the place of an `nn.MultiheadAttention`, and the other way round."""

from typing import Any

import torch
from torch import Tensor, nn

from mixhead_plugin.nn.attention import MixedAttention
from mixhead_plugin.parts import PARTS, effective


def mixed_of(old: nn.MultiheadAttention, keywords: dict[str, Any]) -> MixedAttention:
    """Return a mixed attention with the weights, hooks, mode and frozen parameters of torch's.

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
    for name, parameter in new.named_parameters():
        former = given.get(_former_name(name, given))
        if former is not None:
            parameter.requires_grad_(former.requires_grad)
            vars(parameter).update(vars(former))  # such as a factor on its learning rate
    _move_attributes(old, new)
    _move_hooks(old, new)
    return new.train(old.training)


def _former_name(name: str, given: dict[str, Any]) -> str:
    """Return what torch calls a parameter.

    `q_proj.weight` is a part of `in_proj_weight`, or it is `q_proj_weight` where queries, keys and
    values have their own sizes.
    """
    if name in given:
        return name
    apart = name.replace(".", "_")
    return apart if apart in given else f"in{apart[1:]}"


def plain_of(mixed: MixedAttention) -> nn.MultiheadAttention:
    """Return torch's attention with the weights of a mixed one whose mixing does nothing."""
    weight, bias = mixed.out_proj.weight, mixed.out_proj.bias
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
    # torch calls it q_proj_weight where queries, keys and values have their own sizes.
    apart = [new.q_proj_weight, new.k_proj_weight, new.v_proj_weight]
    if new.in_proj_weight is not None:
        _take(new.in_proj_weight, *weights)
    else:
        for parameter, former in zip(apart, weights):
            _take(parameter, former)
    if bias is not None:
        _take(new.in_proj_bias, *(projection.bias for projection in projections))
        _take(new.out_proj.bias, bias)
    _take(new.out_proj.weight, weight)
    _move_attributes(mixed, new)
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
    kind: Any = type(old)
    usual = vars(kind(1, 1))
    for name, value in vars(old).items():
        if name not in usual and name not in vars(new):
            setattr(new, name, value)


def problem_of(old: nn.MultiheadAttention) -> str:
    """Return in a few words what a tool has changed, so that it cannot be replaced; empty if not.

    Only what is certainly torch's own is copied.
    """
    if "forward" in vars(old):
        return "has a forward of its own"
    usual = set(nn.MultiheadAttention(1, 1, add_bias_kv=True).state_dict())
    usual |= set(nn.MultiheadAttention(1, 1, kdim=2, vdim=2).state_dict())
    for name in old.state_dict():
        if name not in usual:
            return f"has {name}"
    return ""


def _move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Let a module have torch's hooks of another.

    But not those of state dicts, which know names of the old one.
    """
    for name in vars(nn.Module()):
        if "_hook" in name and "state_dict" not in name:
            setattr(new, name, getattr(old, name))


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
    return effective({**parts, "relative_gain": mixed.relative_gain})
