"""Mix the heads of a model, and take the mixing away again."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mixhead_plugin.hf.attend import FEATURES, NAME, MixedHeads
from mixhead_plugin.hf.layouts import sites_of
from mixhead_plugin.parts import PARTS, complete, effective, refuse_nothing
from mixhead_plugin.parts.head_mixing import own_numbers

# These entries of config.json make `from_pretrained` refuse a mixed model. The first one does where this module is not
# imported. Only the second one does where `from_pretrained` is told to use another attention: it is no valid name.
REFUSED = {"attn_implementation": NAME, "experts_implementation": "mixed heads, load by mixhead_plugin.hf.load"}
PRUNED = "mixhead_pruned"  # of the entry of a config that has the heads that `prune` removed, by layer


def mix(
    model: PreTrainedModel, head_mixing: str | None = None, *, impl: str = "auto", **variant: str
) -> PreTrainedModel:
    """Mix the heads of every attention of `model`, in place, and return it; a trained mixing starts as the identity.

    Args:
        model: any model whose attentions are in LAYOUTS; it gets a config of its own, with the variant
        head_mixing, variant: at least one keyword of VARIANT; another normalizer than softmax, and another mixing_start
            than identity, change the outputs
        impl: the implementation of `ops.attention`

    Raises:
        ValueError: an unknown value, nothing that is asked for, a model without such attentions, or one that is mixed
            or pruned already, or has adapters
    """
    asked = variant if head_mixing is None else {**variant, "head_mixing": head_mixing}
    variant = complete(asked, impl)
    if variant["relative_position"] != "none":
        raise ValueError("relative_position: must be left out, the model has its own")
    if any(hasattr(site.module, NAME) for site in sites_of(model)):
        raise ValueError(f"{type(model).__name__}: is mixed already, or pruned")
    if any(hasattr(module, "base_layer") for module in model.modules()):
        raise ValueError(f"{type(model).__name__}: has adapters; must be mixed before they are added")
    refuse_nothing(asked)
    return attach(model, variant, impl)


def attach(model: PreTrainedModel, variant: dict[str, str], impl: str) -> PreTrainedModel:
    """Make every attention of `model` compute a variant, which may be the plain one."""
    sites = sites_of(model)
    all_heads = []  # before any change: one may be refused
    with own_numbers():
        for site in sites:
            all_heads.append(MixedHeads(site, model, variant, impl))
            # A part draws by the state of the generator: without this number all layers would start equal.
            torch.rand((), device="cpu")
    memo: dict[int, Any] = {}  # modules that share a config share its copy; `set_attn_implementation` would miss some
    for module in (module for module in model.modules() if hasattr(module, "config")):
        config: Any = copy.deepcopy(module.config, memo)
        if not (config.output_attentions and config._attn_implementation == "eager"):  # it wants no other name then
            config._attn_implementation = NAME
        vars(config).update(REFUSED, **{NAME: variant})
        module.config = config
    for site, heads in zip(sites, all_heads):
        heads.attach(site.module, [module for module in model.modules() if isinstance(module, PreTrainedModel)])
        heads.config = site.module.config
        # Its own config: whatever `transformers` chooses for the model, the attention calls `mixed_attention`.
        site.module.config = copy.copy(heads.config)
        site.module.config._attn_implementation_internal = NAME
    model.register_state_dict_post_hook(_refuse_to_lose)
    return model


def _refuse_to_lose(model: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """Raise ValueError where PEFT would save an adapter without the mixing."""
    parts = {f"{name}.": part for name, part in model.named_modules() if name.rpartition(".")[2] in PARTS}
    lost = {name.split(".")[-2] for name, part in parts.items() if part.state_dict() and "_adapters" not in vars(part)}
    if lost and getattr(model, "peft_config", None):
        needed = f"must have modules_to_save={sorted(lost)}"
        raise ValueError(f"adapter: {needed}, or it would lose the mixing; merge_and_unload() keeps it")


def _removable(model: PreTrainedModel, folded: str = "") -> list[nn.Module]:
    """Return the mixed attentions; raise ValueError if outputs would change without them, the folded part apart."""
    found = [module for module in model.modules() if hasattr(module, NAME)]
    if not found:
        raise ValueError(f"{type(model).__name__}: has no mixing")
    if hasattr(model.config, PRUNED):
        raise ValueError(f"{type(model).__name__}: is pruned, and must stay as it is")
    for module in found:
        normalizer = getattr(module, NAME).variant["normalizer"]
        left = effective({name: getattr(module, name) for name in PARTS if name != folded})
        if left or normalizer != "softmax":
            left = left or f"normalizer {normalizer}"
            raise ValueError(f"{type(model).__name__}: without {left} its outputs would change")
    return found


def unmix(model: PreTrainedModel, attn_implementation: str | None = None) -> PreTrainedModel:
    """Remove the mixing of `model`, in place, and return it as it was; raise ValueError if its outputs would change."""
    found = _removable(model)
    model.set_attn_implementation(attn_implementation or getattr(found[0], NAME).former)
    for module in found:
        getattr(module, NAME).detach(module)
    configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    for config in configs:
        config._attn_implementation = model.config._attn_implementation
        for name in (NAME, *REFUSED):
            vars(config).pop(name, None)
    return model


def fold(model: PreTrainedModel, attn_implementation: str | None = None) -> PreTrainedModel:
    """Multiply the feature mixing of `model` into its projections, in place, and return it without mixing, as `unmix`.

    Raise ValueError if another part has an effect, or if the model has adapters or is pruned.
    """
    if any(hasattr(module, "base_layer") for module in model.modules()):
        raise ValueError(f"{type(model).__name__}: has adapters; must be folded after they are merged")
    _removable(model, folded="feature_mixing")
    for site in sites_of(model):
        mixed: MixedHeads | None = vars(site.module).get(NAME)
        if mixed is None or mixed.feature_mixing is None:
            continue
        output: Any = model.get_submodule(site.path("output"))
        tensors = {"output": [_rows(output)]}
        for kind, feature in FEATURES.items():
            projection: Any = model.get_submodule(site.path(kind))
            where = mixed.slices(mixed.names[kind])[kind]
            given = [_rows(projection)] if projection.bias is None else [_rows(projection), projection.bias]
            tensors[feature] = [tensor[where] for tensor in given]
        mixed.feature_mixing.fold(tensors)
    return unmix(model, attn_implementation)


def _rows(projection: Any) -> Tensor:
    """Return the weight with a row for each output; that of GPT-2's Conv1D is transposed."""
    return projection.weight if isinstance(projection, nn.Linear) else projection.weight.t()
