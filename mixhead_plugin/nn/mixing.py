"""Mix the heads of any torch model, and take the mixing away again.

mix(model, example=...)
  which modules compute attention?             nn/example.py
  can they be mixed?                           nn/refusals.py
  nn.MultiheadAttention -> MixedAttention      nn/multihead.py, nn/attention.py
  a module that calls F.scaled_dot_product_attention
    gets the parts as its children             parts/hosted.py
    and a subclass of its class                nn/mixed_class.py
  which attentions were left out?              nn/left_out.py

model(x)
  MixedAttention.forward       or   the module's own forward,     nn/attention.py, nn/sdpa.py
            |                       whose call of the function
            |                       becomes MixedCall.attend      nn/sdpa.py
            |                       HostedAttention.attend_in     parts/hosted.py
            |                                  |
  UsesParts.inputs_of: what M, sinks and positions make of it     parts/assembly.py
  Hooked.attend: studies of heads may look and change it          parts/hooks.py
  ops.attention                                                   ops/api.py
  UsesParts.mix_and_gate_outputs: mixed features and gates        parts/assembly.py
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mixhead_plugin.nn import example as examples
from mixhead_plugin.nn import mixed_class, multihead, sdpa
from mixhead_plugin.nn.attention import MixedAttention
from mixhead_plugin.nn.example import Example, ExampleRun, same_random_numbers
from mixhead_plugin.nn.left_out import warn_of_callers, warn_of_others
from mixhead_plugin.nn.refusals import (
    check_calling,
    check_module,
    check_of_torch,
    name_of,
    nothing_found,
    of_transformers,
    refuse_kept,
    refuse_loss,
    refuse_mixed,
    refuse_tied,
)
from mixhead_plugin.ops.call_checks import FLOATS
from mixhead_plugin.parts import (
    Assembly,
    Variant,
    check_any_given,
    check_keywords,
    place_parts,
    warn_of_half_precision,
)
from mixhead_plugin.parts.wrappers import refuse_wrapped


def mix(
    model: nn.Module,
    head_mixing: str | None = None,
    *,
    example: Example | None = None,
    impl: str = "auto",
    **variant: Any,
) -> nn.Module:
    """Mix the heads of every attention of `model`, in place, and return it.

    A trained mixing starts as the identity, so the outputs stay. Every `nn.MultiheadAttention`
    becomes a `MixedAttention`. With an `example`, every module that calls
    `F.scaled_dot_product_attention` is mixed, too. Weights, hooks, mode and what is frozen stay.
    Make the optimizer afterwards, because the parameters of the mixing are new.

    A warning names attentions that stay as they are: of the same class as a mixed one, but not
    reached by the example; computed by another function, such as `F.multi_head_attention_forward`;
    or without an example, those whose code calls `F.scaled_dot_product_attention`. Another warning
    names parts that training would not move, because the model is in half precision.

    Args:
        model: any module; a model of transformers belongs to `mixhead_plugin.hf.mix`
        head_mixing: where M comes from, a key of PARTS["head_mixing"]: "position-wise" (Mixhead B),
            "position-independent" (Mixhead A), "low-rank", "differential", "random", "average", or
            "none" for plain heads; None for another field alone
        example: a tuple of arguments, a dict of keywords, or a function that takes the model. It
            runs once, without gradients; afterwards the model is as before. Meanwhile a copy of
            all parameters and buffers takes as much memory again. None for a model of
            `nn.MultiheadAttention` alone
        impl: which code computes the attention: "auto", "reference", "blockwise" or "triton"
        variant: other fields of `Variant`, such as normalizer="l2", and `causal` of
            `MixedAttention`. `causal` and the fields with `of_projections`, such as head_dim, are
            for `nn.MultiheadAttention` alone

    Raises:
        ValueError: an unknown value, nothing that is asked for, no attention, or one that cannot be
            mixed, with its name and the reason. The model is as before.
    """
    check_module(model)
    mix_as_asked(model, asked_for(head_mixing, variant), example, impl)
    warn_of_half_precision(model)
    return model


def mix_as_asked(
    model: nn.Module, asked: Mapping[str, Any], example: Example | None, impl: str
) -> None:
    """Mix the heads of a model as `mix` does, but without its warning of half precision.

    Args:
        model: as in `mix`
        asked: the fields of a variant, as from `asked_for`
        example: as in `mix`
        impl: as in `mix`
    """
    check_any_given(asked)
    refuse_mixed(model)
    refuse_wrapped(model)

    example_run = ExampleRun({}, {}) if example is None else examples.run(model, example)
    # A `MixedAttention` that was built by hand may call the function, too, and stays.
    calling = {m: sizes for m, sizes in example_run.calling.items() if not isinstance(m, Assembly)}
    of_torch = [
        module
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention) and module not in calling
    ]
    if not of_torch and not calling:
        raise ValueError(nothing_found(model, example))
    if of_torch:
        check_of_torch(model, of_torch, asked)
    if calling:
        check_calling(model, calling, asked)

    keywords = {**asked, "impl": impl}
    hosted = {}
    if calling:
        fields = Variant.of(keywords)
        for module, sizes in calling.items():
            hosted[module] = sdpa.MixedSdpa(name_of(model, module), fields, sizes)
    carry_out(model, Plan(dict.fromkeys(of_torch, keywords), hosted))
    warn_of_others(model, hosted, example_run.others)
    if example is None:
        warn_of_callers(model)


class Plan(NamedTuple):
    """Which modules of a model will be mixed, and how.

    Attributes:
        of_torch: for each attention of torch, the keywords of the `MixedAttention` in its place
        calling: for each module that calls scaled_dot_product_attention, what it gets
    """

    of_torch: Mapping[nn.MultiheadAttention, dict[str, Any]]
    calling: Mapping[nn.Module, sdpa.MixedSdpa]


def carry_out(model: nn.Module, plan: Plan) -> None:
    """Mix the modules of a plan.

    Raises:
        ValueError: one of them cannot be mixed so. Nothing was changed yet.
    """
    # All are built before the first change, because one of them may be refused.
    replaced = {}
    with same_random_numbers(model.parameters()):
        for module, keywords in plan.of_torch.items():
            replaced[module] = multihead.mixed_of(module, keywords)
    _put(model, replaced)
    _mix_calling(model, plan.calling)


def asked_for(head_mixing: str | None, variant: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a variant that the arguments of `mix` and `load` ask for.

    Raise ValueError for a keyword that neither takes.
    """
    check_keywords(variant, others=("example", "causal"))
    asked = dict(variant)
    if head_mixing is not None:
        asked["head_mixing"] = head_mixing
    return asked


def _put(model: nn.Module, new: Mapping[Any, nn.Module]) -> None:
    """Put new modules in the place of old ones, wherever they are in the model.

    Raises:
        ValueError: something keeps an old one. Nothing was changed yet.
    """
    refuse_kept(model, new)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in new:
            model.set_submodule(name, new[module])


def _mix_calling(model: nn.Module, hosted: Mapping[nn.Module, sdpa.MixedSdpa]) -> None:
    """Mix modules that call scaled_dot_product_attention.

    Args:
        model: the model that has the modules
        hosted: what each of them gets
    """
    likes = {host: _like(model, host) for host in hosted}  # before they get parameters of ours
    place_parts((host, attention, likes[host]) for host, attention in hosted.items())
    for host, attention in hosted.items():
        mixed_class.give_mixed_class(host, attention)


def _like(model: nn.Module, module: nn.Module) -> Tensor:
    """Return a tensor with the device and the type of floats that parts in a module should have.

    It is the module's first parameter, or that of the nearest module around it: some modules
    compute the attention alone, and have no parameters.
    """
    path = name_of(model, module).split(".") if module is not model else []
    for length in range(len(path), -1, -1):
        around = model.get_submodule(".".join(path[:length]))
        for parameter in around.parameters():
            if parameter.dtype in FLOATS:
                return parameter
    return torch.empty(())


def unmix(model: nn.Module) -> nn.Module:
    """Remove the mixing of `model`, in place, and return it with the same outputs.

    Modules that call scaled_dot_product_attention get their class back, and every `MixedAttention`
    becomes an `nn.MultiheadAttention`.

    Args:
        model: what `mix` returned, or a model with `MixedAttention` inside

    Raises:
        ValueError: no mixing, one without which the outputs would change, or a pruned
            `MixedAttention`. The model is as before.
    """
    check_module(model)
    calling = [module for module in model.modules() if sdpa.is_mixed(module)]
    ours = [module for module in model.modules() if isinstance(module, MixedAttention)]
    if not calling and not ours and any(of_transformers(module) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__}: is a model of transformers, must be unmixed by "
            "mixhead_plugin.hf.unmix"
        )
    if not calling and not ours:
        raise ValueError(f"{type(model).__name__}: has no mixing, must be mixed")
    if model in ours:
        raise ValueError(
            f"{type(model).__name__}: must be inside of a model, where an nn.MultiheadAttention "
            "can take its place"
        )
    for attention in ours:
        if multihead.is_pruned(attention):
            raise ValueError(f"{name_of(model, attention)}: is pruned, and must stay as it is")
        refuse_loss(model, attention, multihead.lost_without(attention))
        changed = multihead.problem_of_mixed(attention)
        if changed:
            raise ValueError(
                f"{name_of(model, attention)}: {changed}; must be as nn.MultiheadAttention knows it"
            )
    refuse_tied(model, ours)
    for module in calling:
        refuse_loss(model, module, vars(module)[sdpa.ATTRIBUTE].lost_without(module))
        if not mixed_class.has_own_class(module):
            raise ValueError(
                f"{name_of(model, module)}: another tool has changed its class; must be unmixed "
                "after that is undone"
            )
    with same_random_numbers(model.parameters()):
        plain = {attention: multihead.plain_of(attention) for attention in ours}
    _put(model, plain)
    for module in calling:
        mixed_class.give_plain_class(module)
    return model
