"""Mix the heads of a model, and take the mixing away again."""

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from mixhead_plugin.errors import warn_caller
from mixhead_plugin.hf.attention_hooks import (
    FEATURES,
    MixedHeads,
    install_model_hooks,
    mixed_heads_of,
    remove_model_hooks,
)
from mixhead_plugin.hf.configs import FORMER, forget, give_configs
from mixhead_plugin.hf.finding import calls_the_interface, find_attentions, left_out
from mixhead_plugin.hf.layouts import LAYOUTS, USUAL, FoundAttention, slices
from mixhead_plugin.hf.refusals import (
    check_model,
    check_module,
    refuse_adapters,
    refuse_compiled,
    refuse_computed,
    refuse_offloaded,
    refuse_own_forward,
    refuse_own_functions,
    refuse_quantised,
    refuse_shared_weights,
    refuse_split,
)
from mixhead_plugin.hf.row_checks import check_row
from mixhead_plugin.hf.saving import PRUNED
from mixhead_plugin.parts import (
    OPTIONS,
    Variant,
    check_any_given,
    place_parts,
    remove_parts,
    warn_of_half_precision,
)
from mixhead_plugin.parts.wrappers import refuse_wrapped


def mix(
    model: PreTrainedModel, head_mixing: str | None = None, *, impl: str = "auto", **variant: Any
) -> PreTrainedModel:
    """Mix the heads of every attention of `model`, in place, and return it.

    A trained mixing starts as the identity.

    Mix the outermost model: an outer one could not save what is inside. A warning names the
    attentions, as of another tower, that cannot be mixed and stay as they are. Another warning
    names parts that training would not move, because the model is in half precision.

    Before anything changes, each attention is called once alone, with random features in place of
    what its projections give. That shows whether its projections are what their names say.

    Args:
        model: any model whose attentions go through the AttentionInterface; it gets a config of its
            own, with the variant
        head_mixing: where M comes from, a key of PARTS["head_mixing"]: "position-wise" (Mixhead B),
            "position-independent" (Mixhead A), "low-rank", "differential", "random", "average", or
            "none" for plain heads; None for another field alone
        impl: which code computes the attention: "auto", "reference", "blockwise" or "triton"
        variant: other fields of `Variant`, such as normalizer="l2". Another normalizer than
            softmax, and another mixing_start than identity, change the outputs.

    Raises:
        ValueError: the model stays as it is, because

            - a value is unknown, or nothing is asked for
            - a keyword is for what the model has already, such as head_dim
            - it has no such attentions, or none of them can be mixed
            - attentions that cannot be mixed share a config with those that can
            - its attention or mask function is not one of transformers
            - it is mixed or pruned already
            - it has adapters: mix it before they are added
            - it is offloaded or quantised: mix it before
            - it is split between processes
            - a projection is compiled alone: mix it before
    """
    check_module(model)
    asked = variant if head_mixing is None else {**variant, "head_mixing": head_mixing}
    check_any_given(asked)
    chosen = Variant.of({**asked, "impl": impl})
    attentions = find_attentions(model)
    for name, option in OPTIONS.items():
        if option.of_projections and getattr(chosen, name) != option.default:
            raise ValueError(f"{name}: must be left out, the model has its own")
    if is_mixed(model):
        if hasattr(model.config, PRUNED):
            raise ValueError(f"{type(model).__name__}: is pruned, so it cannot be mixed again")
        raise ValueError(f"{type(model).__name__}: is mixed already; must be unmixed first")
    refuse_adapters(model, "mixed before they are added")
    refuse_offloaded(model, "mixed")
    refuse_quantised(model, attentions, "mixed")
    refuse_compiled(model, attentions)
    refuse_split(model)
    refuse_wrapped(model)
    refuse_own_forward(attentions)
    problems = unfit(model, attentions, chosen)
    fitting = [attention for attention in attentions if attention.class_name not in problems]
    add_mixing(model, chosen, fitting)
    _warn_of_others(model, fitting, problems)
    warn_of_half_precision(model)
    return model


def _warn_of_others(
    model: nn.Module, fitting: Sequence[FoundAttention], problems: dict[str, str]
) -> None:
    """Name the attentions that stay as they are, and say why."""
    for class_name, names in left_out(model, fitting).items():
        if class_name in LAYOUTS and LAYOUTS[class_name] is None:
            continue  # the user wants it so
        unknown = "it does not go through the AttentionInterface, or its projections are not known"
        problem = problems.get(class_name, unknown).removeprefix(f"{class_name}: ")
        warn_caller(
            f"{type(model).__name__}: was mixed without {len(names)} {class_name}, as {names[0]}; "
            f"{problem}"
        )


def unfit(
    model: nn.Module, attentions: Sequence[FoundAttention], variant: Variant
) -> dict[str, str]:
    """Return why attentions cannot compute a variant, by their class.

    Args:
        model: the model that has the attentions
        attentions: those that may be mixed
        variant: what is asked for

    Raises:
        ValueError: none can, one has a row of the user, or one has the same config as those that
            can
    """
    problems: dict[str, str] = {}
    for attention in attentions:
        try:
            attention.check_sizes(model)
            check_row(attention, model, variant)
            refuse_own_functions(attention)
        except ValueError as error:
            if attention.layout is not USUAL:
                raise  # whoever writes a row wants this class to be mixed
            problems.setdefault(attention.class_name, str(error))

    fitting = [attention for attention in attentions if attention.class_name not in problems]
    if not fitting:
        raise ValueError(next(iter(problems.values())))
    _refuse_shared_configs(model, fitting, problems)
    return problems


def _refuse_shared_configs(
    model: nn.Module, fitting: Sequence[FoundAttention], problems: dict[str, str]
) -> None:
    """Raise ValueError if another attention has the same config as those that can be mixed.

    A config chooses the attention function and the masks for all that share it.
    """
    classes = {attention.class_name for attention in fitting}
    shared = {id(getattr(attention.module, "config", None)) for attention in fitting}
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


def add_mixing(
    model: PreTrainedModel, variant: Variant, attentions: Sequence[FoundAttention]
) -> None:
    """Make some attentions of a model compute a variant, which may be the plain one.

    Args:
        model: the model that has the attentions
        variant: what they compute then
        attentions: those that are mixed
    """
    all_mixed: list[MixedHeads] = []  # before any change: one may be refused
    for attention in attentions:
        attention.check_sizes(model)
        all_mixed.append(MixedHeads(attention, model, variant))

    give_configs(model, attentions, variant)
    with_parts = []
    for attention, mixed in zip(attentions, all_mixed):
        queries: Any = model.get_submodule(attention.paths["queries"])
        with_parts.append((attention.module, mixed, queries.weight))
    place_parts(with_parts)

    for mixed in all_mixed:
        mixed.install_hooks()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            install_model_hooks(module)


def attentions_of_classes(model: nn.Module, classes: Collection[str]) -> list[FoundAttention]:
    """Return the attentions of some classes, in the order of the model.

    Args:
        model: any model
        classes: names; the model need not have all of them

    Raises:
        ValueError: the model has none of them, or one whose projections are not known
    """
    attentions = [each for each in find_attentions(model) if each.class_name in classes]
    known = {attention.class_name for attention in attentions}
    for module in model.modules():
        class_name = type(module).__name__
        if class_name in classes and class_name not in known:
            raise ValueError(
                f"{class_name}: its projections are not known; add its row to hf.LAYOUTS"
            )
    if not attentions:
        raise ValueError(f"{type(model).__name__}: has none of {', '.join(sorted(classes))}")
    return attentions


def _removable(model: PreTrainedModel, folded: str = "") -> list[MixedHeads]:
    """Return what the attentions are mixed by; raise ValueError if outputs would change without it.

    Args:
        model: a mixed model
        folded: a part that may have an effect
    """
    removable = []
    for attention in find_attentions(model):
        mixed = mixed_heads_of(attention.module)
        if mixed is not None:
            removable.append(mixed)
    if not removable:
        raise ValueError(f"{type(model).__name__}: has no mixing")
    # Not by the config, because the model may be a part of the one that was pruned.
    if any(mixed.removed() for mixed in removable):
        raise ValueError(f"{type(model).__name__}: is pruned, and must stay as it is")
    refuse_offloaded(model, "unmixed")
    for mixed in removable:
        lost = mixed.lost_without(mixed.host, but=folded)
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
        ValueError: a model without mixing, whose outputs would change, or that has adapters, is
            pruned or offloaded
    """
    check_model(model)
    refuse_adapters(model, "unmixed after they are merged")
    removable = _removable(model)
    if attn_implementation is not None:
        model.set_attn_implementation(attn_implementation)
    for mixed in removable:
        mixed.remove_hooks()
        remove_parts(mixed.host)
    # From the inside out, because towers may have had different attentions, and the config of the
    # whole model holds theirs.
    for module in reversed([*model.modules()]):
        if isinstance(module, PreTrainedModel):
            remove_model_hooks(module)
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
            quantised or offloaded, computes weights in each call (weight_norm), or shares
            projections between attentions
    """
    check_model(model)
    refuse_adapters(model, "folded after they are merged")
    _removable(model, folded="feature_mixing")
    attentions = find_attentions(model)
    refuse_quantised(model, attentions, "folded")
    refuse_computed(model, attentions, "folded")
    refuse_shared_weights(model, attentions, "folded")
    for attention in attentions:
        mixed = mixed_heads_of(attention.module)
        feature_mixing: Any = getattr(attention.module, "feature_mixing", None)
        if mixed is not None and feature_mixing is not None:
            feature_mixing.fold(_tensors_of(attention, model, mixed))
    return unmix(model, attn_implementation)


def _tensors_of(
    attention: FoundAttention, model: nn.Module, mixed: MixedHeads
) -> dict[str, list[Tensor]]:
    """Return the weights and biases of an attention as views, a row for each feature, by role."""
    tensors = {"output": [_rows(model.get_submodule(attention.paths["output"]))]}
    for path, roles in attention.packed().items():
        projection: Any = model.get_submodule(path)
        given = [_rows(projection)]
        if projection.bias is not None:
            given.append(projection.bias)
        for role, where in slices(roles, mixed.widths()).items():
            tensors[FEATURES[role]] = [tensor[where] for tensor in given]
    return tensors


def _rows(projection: Any) -> Tensor:
    """Return the weight with a row for each output; that of GPT-2's Conv1D is transposed."""
    return projection.weight if isinstance(projection, nn.Linear) else projection.weight.t()
