"""Mix the heads of a model, and take the mixing away again."""

import warnings
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from mixhead_plugin.hf.checks import check_row
from mixhead_plugin.hf.configs import FORMER, PRUNED, forget, give_configs
from mixhead_plugin.hf.layouts import (
    LAYOUTS,
    USUAL,
    Site,
    calls_the_interface,
    left_out,
    sites_of,
)
from mixhead_plugin.hf.mixed import (
    FEATURES,
    MixedHeads,
    mixed_heads_of,
    note_wishes,
    remove_hook,
)
from mixhead_plugin.hf.refusals import (
    refuse_adapters,
    refuse_compiled,
    refuse_offloaded,
    refuse_quantised,
    refuse_shared_weights,
    refuse_split,
)
from mixhead_plugin.parts import OPTIONS, Variant, check_any_given, place_parts

# What a model of transformers has already.
OF_THE_MODEL = ("head_dim", "value_head_dim", "relative_position", "relative_gain")


def mix(
    model: PreTrainedModel, head_mixing: str | None = None, *, impl: str = "auto", **variant: Any
) -> PreTrainedModel:
    """Mix the heads of every attention of `model`, in place, and return it.

    A trained mixing starts as the identity.

    Mix the outermost model: an outer one could not save what is inside. A warning names the
    attentions, as of another tower, that cannot be mixed and stay as they are.

    Args:
        model: any model whose attentions go through the AttentionInterface; it gets a config of its
            own, with the variant
        head_mixing: where M comes from, as in `Variant`; None for another field alone
        impl: the implementation of `ops.attention`
        variant: other fields of `Variant`. Another normalizer than softmax, and another
            mixing_start than identity, change the outputs.

    Raises:
        ValueError: an unknown value, nothing that is asked for, a model without such attentions, or
            one that is mixed or pruned already, has adapters, is offloaded, quantised or split, has
            projections that are compiled alone, or whose attentions cannot be mixed
    """
    asked = variant if head_mixing is None else {**variant, "head_mixing": head_mixing}
    chosen = Variant.of({**asked, "impl": impl})
    sites = sites_of(model)
    for name in OF_THE_MODEL:
        if getattr(chosen, name) != OPTIONS[name].default:
            raise ValueError(f"{name}: must be left out, the model has its own")
    if is_mixed(model):
        raise ValueError(f"{type(model).__name__}: is mixed already, or pruned")
    refuse_adapters(model, "mixed before they are added")
    refuse_offloaded(model, "mixed")
    refuse_quantised(model, sites, "mixed")
    refuse_compiled(model, sites)
    refuse_split(model)
    check_any_given(asked)
    problems = unfit(model, sites, chosen)
    fitting = [site for site in sites if site.class_name not in problems]
    attach(model, chosen, fitting)
    _warn_of_others(model, fitting, problems)
    return model


def _warn_of_others(model: nn.Module, fitting: Sequence[Site], problems: dict[str, str]) -> None:
    """Name the attentions that stay as they are, and say why."""
    for class_name, names in left_out(model, fitting).items():
        if class_name in LAYOUTS and LAYOUTS[class_name] is None:
            continue  # the user wants it so
        unknown = "it does not go through the AttentionInterface, or its projections are not known"
        problem = problems.get(class_name, unknown).removeprefix(f"{class_name}: ")
        warnings.warn(
            f"{type(model).__name__}: was mixed without {len(names)} {class_name}, as {names[0]}; "
            f"{problem}",
            stacklevel=3,
        )


def unfit(model: nn.Module, sites: Sequence[Site], variant: Variant) -> dict[str, str]:
    """Return why attentions cannot compute a variant, by their class.

    Args:
        model: has the attentions
        sites: the attentions
        variant: what is asked for

    Raises:
        ValueError: none can, one has a row of the user, or one has the same config as those that
            can
    """
    problems: dict[str, str] = {}
    for site in sites:
        try:
            site.check_sizes(model)
            check_row(site, model, variant)
        except ValueError as error:
            if site.layout is not USUAL:
                raise  # whoever writes a row wants this class to be mixed
            problems.setdefault(site.class_name, str(error))

    fitting = [site for site in sites if site.class_name not in problems]
    if not fitting:
        raise ValueError(next(iter(problems.values())))
    _refuse_shared_configs(model, fitting, problems)
    return problems


def _refuse_shared_configs(
    model: nn.Module, fitting: Sequence[Site], problems: dict[str, str]
) -> None:
    """Raise ValueError if another attention has the same config as those that can be mixed.

    A config chooses the attention function and the masks for all that share it.
    """
    classes = {site.class_name for site in fitting}
    shared = {id(getattr(site.module, "config", None)) for site in fitting}
    for module in model.modules():
        class_name = type(module).__name__
        if class_name in classes or not calls_the_interface(module):
            continue
        if id(getattr(module, "config", None)) in shared:
            problem = problems.get(class_name, f"{class_name}: its projections are not known")
            raise ValueError(
                f"{problem}; it must be mixed with {fitting[0].class_name}, which has the same "
                "config"
            )


def is_mixed(model: nn.Module) -> bool:
    return any(mixed_heads_of(module) is not None for module in model.modules())


def attach(model: PreTrainedModel, variant: Variant, sites: Sequence[Site]) -> None:
    """Make some attentions of a model compute a variant, which may be the plain one."""
    mixed: list[MixedHeads] = []  # before any change: one may be refused
    for site in sites:
        site.check_sizes(model)
        mixed.append(MixedHeads(site, model, variant))

    give_configs(model, sites, variant)
    likes: list[Any] = [model.get_submodule(site.paths["queries"]).weight for site in sites]
    place_parts(zip([site.module for site in sites], mixed, likes))
    for heads in mixed:
        heads.attach()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.register_forward_pre_hook(note_wishes, with_kwargs=True)


def sites_of_classes(model: nn.Module, classes: Collection[str]) -> list[Site]:
    """Return the attentions of some classes, in the order of the model.

    Args:
        model: any model
        classes: names; the model need not have all of them

    Raises:
        ValueError: the model has none of them, or one whose projections are not known
    """
    sites = [site for site in sites_of(model) if site.class_name in classes]
    known = {site.class_name for site in sites}
    for module in model.modules():
        class_name = type(module).__name__
        if class_name in classes and class_name not in known:
            raise ValueError(
                f"{class_name}: its projections are not known; add its row to hf.LAYOUTS"
            )
    if not sites:
        raise ValueError(f"{type(model).__name__}: has none of {', '.join(sorted(classes))}")
    return sites


def _removable(model: PreTrainedModel, folded: str = "") -> list[MixedHeads]:
    """Return what the attentions are mixed by; raise ValueError if outputs would change without it.

    Args:
        model: a mixed model
        folded: a part that may have an effect
    """
    removable = []
    for site in sites_of(model):
        mixed = mixed_heads_of(site.module)
        if mixed is not None:
            removable.append(mixed)
    if not removable:
        raise ValueError(f"{type(model).__name__}: has no mixing")
    if hasattr(model.config, PRUNED):
        raise ValueError(f"{type(model).__name__}: is pruned, and must stay as it is")
    refuse_offloaded(model, "unmixed")
    for mixed in removable:
        lost = mixed.lost_without(mixed.attention, but=folded)
        if lost:
            raise ValueError(f"{type(model).__name__}: without {lost} its outputs would change")
    return removable


def unmix(model: PreTrainedModel, attn_implementation: str | None = None) -> PreTrainedModel:
    """Remove the mixing of `model`, in place, and return it as it was.

    Args:
        model: a mixed model
        attn_implementation: the attention of transformers that computes it then; None for the one
            that each tower had before

    Raises:
        ValueError: a model without mixing, whose outputs would change, or that has adapters or is
            offloaded
    """
    refuse_adapters(model, "unmixed after they are merged")
    removable = _removable(model)
    if attn_implementation is not None:
        model.set_attn_implementation(attn_implementation)
    for heads in removable:
        heads.detach()
    # From the inside out, because towers may have had different attentions, and the config of the
    # whole model holds theirs.
    for module in reversed([*model.modules()]):
        if isinstance(module, PreTrainedModel):
            remove_hook(module, note_wishes)
        if FORMER in vars(module):
            former = vars(module).pop(FORMER)
            config: Any = module.config
            forget(config, attn_implementation or former)
    return model


def fold(model: PreTrainedModel, attn_implementation: str | None = None) -> PreTrainedModel:
    """Multiply the feature mixing of `model` into its projections, in place.

    Return the model without mixing, as `unmix` does.

    Args:
        model: a model with `feature_mixing`
        attn_implementation: as in `unmix`

    Raises:
        ValueError: a model where another part has an effect, or that has adapters, is pruned,
            quantised or offloaded, or shares projections between attentions
    """
    refuse_adapters(model, "folded after they are merged")
    _removable(model, folded="feature_mixing")
    sites = sites_of(model)
    refuse_quantised(model, sites, "folded")
    refuse_shared_weights(model, sites, "folded")
    for site in sites:
        mixed = mixed_heads_of(site.module)
        feature_mixing: Any = getattr(site.module, "feature_mixing", None)
        if mixed is not None and feature_mixing is not None:
            feature_mixing.fold(_tensors_of(site, model, mixed))
    return unmix(model, attn_implementation)


def _tensors_of(site: Site, model: nn.Module, mixed: MixedHeads) -> dict[str, list[Tensor]]:
    """Return the weights and biases of an attention as views, a row for each feature, by role."""
    tensors = {"output": [_rows(model.get_submodule(site.paths["output"]))]}
    for path, roles in site.packed().items():
        projection: Any = model.get_submodule(path)
        given = [_rows(projection)]
        if projection.bias is not None:
            given.append(projection.bias)
        for role, where in mixed.slices(roles).items():
            tensors[FEATURES[role]] = [tensor[where] for tensor in given]
    return tensors


def _rows(projection: Any) -> Tensor:
    """Return the weight with a row for each output; that of GPT-2's Conv1D is transposed."""
    return projection.weight if isinstance(projection, nn.Linear) else projection.weight.t()
