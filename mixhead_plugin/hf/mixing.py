"""Mix the heads of a model, and take the mixing away again."""

import copy
import dataclasses
import warnings
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from mixhead_plugin.hf import saving
from mixhead_plugin.hf.checks import check_row
from mixhead_plugin.hf.layouts import (
    LAYOUTS,
    MIXHEAD,
    USUAL,
    Site,
    calls_the_interface,
    left_out,
    sites_of,
)
from mixhead_plugin.hf.mixed import FEATURES, SPLIT, MixedHeads, note_wishes, remove_hook
from mixhead_plugin.parts import OPTIONS, Variant, check_any_given, place_parts

# of the entry of a config that has the heads that `prune` removed, by layer
PRUNED = "mixhead_pruned"
# of the entry that names the classes of the attentions that are mixed
ATTENTIONS = "mixhead_attentions"
# Files without that entry are older: these classes, and those with a row, were mixed then.
OLDER_ATTENTIONS = {
    f"{name}Attention"
    for name in (
        "BertSelf BertCross RobertaSelf RobertaCross XLMRobertaSelf XLMRobertaCross ElectraSelf "
        "ElectraCross DistilBertSelf GPT2 Llama Mistral Qwen2 Qwen3 Gemma ViT Phi Marian Bart "
        "MBart Whisper OPT T5 MT5"
    ).split()
}
# What a model of transformers has already.
OF_THE_MODEL = ("head_dim", "value_head_dim", "relative_position", "relative_gain")
# The fields of a variant that its config does not keep: `impl` belongs to the machine.
NOT_SAVED = ("impl", "head_dim", "value_head_dim", "relative_gain")
# The attribute of a mixed module that names the attention of transformers that it had before.
FORMER = "mixhead_former_attention"
# These entries of config.json make `from_pretrained` refuse a mixed model, and its message shows
# the value. The second one does where `from_pretrained` is told to use another attention.
REFUSED = dict.fromkeys(
    ("attn_implementation", "experts_implementation"),
    "mixed heads, load this model by mixhead_plugin.hf.load",
)


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
    refuse_quantised(model, "mixed")
    _refuse_compiled(sites, model)
    if getattr(model, "_tp_size", None) is not None:
        raise ValueError(f"{type(model).__name__}: is split by tp_plan; {SPLIT}")
    check_any_given(asked)
    problems = unfit(model, sites, chosen)
    fitting = [site for site in sites if site.kind not in problems]
    attach(model, chosen, {site.kind for site in fitting})

    for kind, names in left_out(model, fitting).items():
        if kind in LAYOUTS and LAYOUTS[kind] is None:
            continue  # the user wants it so
        unknown = "it does not go through the AttentionInterface, or its projections are not known"
        problem = problems.get(kind, unknown).removeprefix(f"{kind}: ")
        warnings.warn(
            f"{type(model).__name__}: was mixed without {len(names)} {kind}, as {names[0]}; "
            f"{problem}",
            stacklevel=2,
        )
    return model


def unfit(model: nn.Module, sites: Sequence[Site], variant: Variant) -> dict[str, str]:
    """Return why attentions cannot compute a variant, by their class.

    Raise ValueError if none can be, one has a row of the user, or one has the same config as those
    that can: a config chooses the attention function and the masks for all that share it.
    """
    problems: dict[str, str] = {}
    for site in sites:
        try:
            site.check_sizes(model)
            check_row(site, model, variant)
        except ValueError as error:
            if site.layout is not USUAL:
                raise
            problems.setdefault(site.kind, str(error))

    fitting = [site for site in sites if site.kind not in problems]
    if not fitting:
        raise ValueError(next(iter(problems.values())))
    shared = {id(getattr(site.module, "config", None)) for site in fitting}
    for module in model.modules():
        kind = type(module).__name__
        other = calls_the_interface(module) and kind not in {site.kind for site in fitting}
        if other and id(getattr(module, "config", None)) in shared:
            problem = problems.get(kind, f"{kind}: its projections are not known")
            raise ValueError(
                f"{problem}; it must be mixed with {fitting[0].kind}, which has the same config"
            )
    return problems


def forget(config: PreTrainedConfig, attn_implementation: str | None) -> None:
    """Remove all that `attach` and `prune` have written into a config, and into those inside it."""
    if MIXHEAD in vars(config):
        config._attn_implementation_internal = attn_implementation
        if saving.auto_map_of(config):  # which is empty if it is not ours
            vars(config).pop("auto_map", None)
    for name in (MIXHEAD, ATTENTIONS, PRUNED, *REFUSED):
        vars(config).pop(name, None)
    for inner in vars(config).values():
        if isinstance(inner, PreTrainedConfig):
            forget(inner, attn_implementation)


def is_mixed(model: nn.Module) -> bool:
    return any(
        MIXHEAD in vars(module)
        for module in model.modules()
        if not isinstance(module, PreTrainedModel)
    )


def refuse_adapters(model: nn.Module, what: str) -> None:
    """Raise ValueError if PEFT has changed modules, or is around the model."""
    if hasattr(model, "peft_type") or any(
        hasattr(module, "base_layer") for module in model.modules()
    ):
        raise ValueError(f"{type(model).__name__}: has adapters; must be {what}")


def refuse_offloaded(model: nn.Module, what: str) -> None:
    """Raise ValueError if weights are elsewhere between the calls.

    A change of them would be lost.

    They are on the device meta then, as they are while `from_pretrained` makes a model, but a hook
    brings them back.
    """
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook") and any(weight.is_meta for weight in module.parameters()):
            where = name or type(module).__name__
            raise ValueError(
                f"{type(model).__name__}: {where} is offloaded; must be {what} before it is "
                "offloaded"
            )


def refuse_quantised(model: nn.Module, what: str) -> None:
    """Raise ValueError if projections keep no weights of floats.

    `mix` follows their dtype, and `fold` and `prune` change them.
    """
    for site in sites_of(model):
        for path in (*site.packed(), site.paths["output"]):
            weight: Any = getattr(model.get_submodule(path), "weight", None)
            if not isinstance(weight, Tensor) or not weight.is_floating_point():
                raise ValueError(
                    f"{type(model).__name__}: {path} is quantised; must be {what} before it is "
                    "quantised"
                )


def _refuse_compiled(sites: Sequence[Site], model: nn.Module) -> None:
    """Raise ValueError if a projection is compiled alone.

    Its graph would not see the hook of the mixing, because torch does not look for new hooks.
    """
    for site in sites:
        for path in site.packed():
            projection: Any = model.get_submodule(path)
            if hasattr(projection, "_orig_mod") or projection._compiled_call_impl is not None:
                raise ValueError(
                    f"{type(model).__name__}: {path} is compiled; must be mixed before it is "
                    "compiled"
                )


def saved_fields(variant: Variant) -> dict[str, Any]:
    """Return what config.json keeps of a variant; `Variant.of` reads it."""
    fields = dataclasses.asdict(variant)
    return {name: value for name, value in fields.items() if name not in NOT_SAVED}


def attach(model: PreTrainedModel, variant: Variant, kinds: Collection[str]) -> PreTrainedModel:
    """Make the attentions of some classes compute a variant, which may be the plain one."""
    sites = _sites_of_kinds(model, kinds)

    mixed = []  # before any change: one may be refused
    for site in sites:
        site.check_sizes(model)
        mixed.append(MixedHeads(site, model, variant))

    _give_configs(model, sites, variant)
    likes: list[Any] = [model.get_submodule(site.paths["queries"]).weight for site in sites]
    place_parts(zip([site.module for site in sites], mixed, likes))
    for site, heads in zip(sites, mixed):
        heads.config = site.module.config
        heads.attach()
        # Its own config: whatever `transformers` chooses for the model, the attention calls
        # `mixed_attention`.
        site.module.config = copy.copy(heads.config)
        site.module.config._attn_implementation_internal = MIXHEAD
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.register_forward_pre_hook(note_wishes, with_kwargs=True)
    saving.watch_adapters()
    return model


def _sites_of_kinds(model: nn.Module, kinds: Collection[str]) -> list[Site]:
    """Return the attentions of some classes; raise ValueError if one of the classes is lost."""
    sites = [site for site in sites_of(model) if site.kind in kinds]
    known = {site.kind for site in sites}
    for module in model.modules():
        kind = type(module).__name__
        if kind in kinds and kind not in known:
            raise ValueError(f"{kind}: its projections are not known; add its row to hf.LAYOUTS")
    if not sites:
        raise ValueError(f"{type(model).__name__}: has none of {', '.join(sorted(kinds))}")
    return sites


def _give_configs(model: nn.Module, sites: Sequence[Site], variant: Variant) -> None:
    """Give a model and its modules configs of their own, which tell of the variant."""
    kinds = {site.kind for site in sites}
    entries = {MIXHEAD: saved_fields(variant), ATTENTIONS: sorted(kinds), **REFUSED}
    # Attentions of models that know eager alone may be causal without saying so: with the masks of
    # eager they need not say it.
    of_eager = {
        id(module.config)
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and not module._supports_sdpa
    }

    # modules that share a config share its copy; `set_attn_implementation` would miss some
    memo: dict[int, Any] = {}
    for name, module in model.named_modules():
        if not hasattr(module, "config"):
            continue
        knows_eager_alone = id(module.config) in of_eager
        # read before the copy, which names the mixing already if an earlier module shares it
        former = module.config._attn_implementation
        config: Any = copy.deepcopy(module.config, memo)
        module.config = config
        if not any(name in ("", site.name) or site.name.startswith(f"{name}.") for site in sites):
            continue  # another tower, which stays as it is
        vars(module)[FORMER] = former
        # transformers gives weights (`output_attentions`) under the name "eager" alone
        wants_weights = config.output_attentions and config._attn_implementation == "eager"
        if not (wants_weights or knows_eager_alone):
            config._attn_implementation_internal = MIXHEAD
        vars(config).update(entries)


def _removable(model: PreTrainedModel, folded: str = "") -> list[MixedHeads]:
    """Return what the attentions are mixed by; raise ValueError if outputs would change without it.

    `folded` is a part that may have an effect.
    """
    found = [site.module for site in sites_of(model) if MIXHEAD in vars(site.module)]
    if not found:
        raise ValueError(f"{type(model).__name__}: has no mixing")
    if hasattr(model.config, PRUNED):
        raise ValueError(f"{type(model).__name__}: is pruned, and must stay as it is")
    refuse_offloaded(model, "unmixed")
    for module in found:
        lost = getattr(module, MIXHEAD).lost_without(module, but=folded)
        if lost:
            raise ValueError(f"{type(model).__name__}: without {lost} its outputs would change")
    return [getattr(module, MIXHEAD) for module in found]


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
    found = _removable(model)
    if attn_implementation is not None:
        model.set_attn_implementation(attn_implementation)
    for heads in found:
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
            quantised or offloaded
    """
    refuse_adapters(model, "folded after they are merged")
    _removable(model, folded="feature_mixing")
    refuse_quantised(model, "folded")
    for site in sites_of(model):
        mixed: MixedHeads | None = vars(site.module).get(MIXHEAD)
        feature_mixing: Any = getattr(site.module, "feature_mixing", None)
        if mixed is None or feature_mixing is None:
            continue
        output: Any = model.get_submodule(site.paths["output"])
        tensors = {"output": [_rows(output)]}
        for path, kinds in site.packed().items():
            projection: Any = model.get_submodule(path)
            given = (
                [_rows(projection)]
                if projection.bias is None
                else [_rows(projection), projection.bias]
            )
            for kind, where in mixed.slices(kinds).items():
                tensors[FEATURES[kind]] = [tensor[where] for tensor in given]
        feature_mixing.fold(tensors)
    return unmix(model, attn_implementation)


def _rows(projection: Any) -> Tensor:
    """Return the weight with a row for each output; that of GPT-2's Conv1D is transposed."""
    return projection.weight if isinstance(projection, nn.Linear) else projection.weight.t()
