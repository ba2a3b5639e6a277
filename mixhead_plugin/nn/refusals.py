"""What stands in the way of mixing, unmixing or loading a model, each in one line."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from mixhead_plugin.errors import wrong_argument
from mixhead_plugin.nn import multihead, sdpa
from mixhead_plugin.nn.attention import MixedAttention
from mixhead_plugin.nn.calling_methods import suspended_method
from mixhead_plugin.nn.example import CallSizes, Example
from mixhead_plugin.nn.holders import holders
from mixhead_plugin.nn.mixed_class import mixed_class, plain_class
from mixhead_plugin.parts import OPTIONS, PARTS, Assembly, Variant

# Keywords for an attention that projects its input itself, as `MixedAttention` does.
OF_PROJECTIONS = ["causal", *(name for name, option in OPTIONS.items() if option.of_projections)]
# Keywords that do not fit an attention to other keys than its own.
OF_SELF_ATTENTION = [
    "causal",
    *(name for name, option in OPTIONS.items() if option.of_self_attention),
]


def name_of(model: nn.Module, module: nn.Module) -> str:
    """Return the name of a module in the model; of the model itself, that of its class."""
    for name, other in model.named_modules():
        if other is module and name:
            return name
    return type(module).__name__


def nothing_found(model: nn.Module, example: Example | None) -> str:
    """Return why a model has nothing to mix, and what would help."""
    class_name = type(model).__name__
    if any(of_transformers(module) for module in model.modules()):
        return f"{class_name}: is a model of transformers, must be mixed by mixhead_plugin.hf.mix"
    if example is None:
        return (
            f"{class_name}: has no nn.MultiheadAttention inside; if it calls "
            "F.scaled_dot_product_attention, an example must be given, as example=(x,)"
        )
    return (
        f"{class_name}: the example reached no call of F.scaled_dot_product_attention, and there "
        "is no nn.MultiheadAttention inside; must have one of them"
    )


def of_transformers(module: nn.Module) -> bool:
    """Return whether a module is a whole model of transformers, which need not be installed."""
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.")
        for cls in type(module).__mro__
    )


def check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(wrong_argument("model", model, "a module of torch"))


def refuse_mixed(model: nn.Module) -> None:
    for module in model.modules():
        if sdpa.is_mixed(module):
            raise ValueError(f"{name_of(model, module)}: is mixed already; must be unmixed first")


def check_of_torch(
    model: nn.Module, of_torch: list[nn.MultiheadAttention], asked: Mapping[str, Any]
) -> None:
    """Raise ValueError if an `nn.MultiheadAttention` cannot be replaced."""
    for module in of_torch:
        if module is model:
            raise ValueError(
                f"{type(model).__name__}: must be inside of a model, where a MixedAttention can "
                "take its place"
            )
        if type(module) is not nn.MultiheadAttention:
            raise ValueError(
                f"{name_of(model, module)}: is a {type(module).__name__}, must be exactly "
                "nn.MultiheadAttention, or call F.scaled_dot_product_attention and be reached by "
                "an example"
            )
        _refuse_of_transformers(model, module)
        refuse_changed(model, module)
    refuse_tied(model, of_torch)
    if not any(isinstance(module, nn.TransformerDecoderLayer) for module in model.modules()):
        return
    for name in OF_SELF_ATTENTION:
        usual = False if name == "causal" else OPTIONS[name].default
        if asked.get(name, usual) != usual:
            raise ValueError(
                f"{name}: must not be given where there is cross-attention, only for self-attention"
            )


def refuse_changed(model: nn.Module, module: nn.MultiheadAttention) -> None:
    """Raise ValueError if a tool has changed an attention, which would be lost."""
    changed = multihead.problem_of(module)
    if changed:
        raise ValueError(
            f"{name_of(model, module)}: {changed}, which a tool has put there; must be mixed before"
        )


def refuse_tied(
    model: nn.Module, attentions: Sequence[nn.MultiheadAttention | MixedAttention]
) -> None:
    """Raise ValueError if a parameter that is copied belongs to another module, too."""
    copied: list[nn.Parameter] = []
    for attention in attentions:
        copied += multihead.copied_of(attention)
    refuse_shared(model, copied)


def refuse_shared(model: nn.Module, replaced: Iterable[nn.Parameter]) -> None:
    """Raise ValueError if one of the parameters that are replaced belongs to another module, too.

    The other module would go on with the former one.
    """
    ids = {id(parameter) for parameter in replaced}
    owners: dict[int, str] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            other = owners.setdefault(id(parameter), name)
            if other != name and id(parameter) in ids:
                raise ValueError(
                    f"{name}: is {other}, too; each attention must have its own parameters"
                )


def check_calling(
    model: nn.Module, calling: Mapping[nn.Module, CallSizes], asked: Mapping[str, Any]
) -> None:
    """Raise ValueError if a module that calls scaled_dot_product_attention cannot be mixed."""
    for name in OF_PROJECTIONS:
        if name in asked:
            raise ValueError(
                f"{name}: must be left out, a module that calls scaled_dot_product_attention has "
                "its own"
            )
    variant = Variant.of(asked)
    if "query" in variant.part_kinds()["feature_mixing"].parameters:
        raise ValueError(
            f"feature_mixing {variant.feature_mixing}: acts on projections, which a module that "
            "calls scaled_dot_product_attention does not show; must be none or output"
        )
    for module, sizes in calling.items():
        _refuse_of_transformers(model, module)
        _refuse_nested(model, module, calling)
        refuse_host(model, module)
        _refuse_unknown_input(model, module, sizes, variant)


def _refuse_of_transformers(model: nn.Module, module: nn.Module) -> None:
    for name, other in model.named_modules():
        if of_transformers(other) and module in set(other.modules()):
            raise ValueError(
                f"{name or type(model).__name__}: is a model of transformers, must be mixed by "
                "mixhead_plugin.hf.mix, which saves and loads it"
            )


def _refuse_nested(
    model: nn.Module, module: nn.Module, calling: Mapping[nn.Module, CallSizes]
) -> None:
    """Raise ValueError if a module inside computes attention, too.

    Its call would be taken for that of the module around it.
    """
    for inner in module.modules():
        attends = inner in calling or isinstance(inner, (nn.MultiheadAttention, Assembly))
        if inner is not module and attends:
            raise ValueError(
                f"{name_of(model, module)}: calls scaled_dot_product_attention, and so does "
                f"{name_of(model, inner)} inside of it; must be beside each other"
            )


def refuse_host(model: nn.Module, module: nn.Module) -> None:
    """Raise ValueError if a module cannot get the parts, or the class, of a mixed one."""
    _refuse_taken(model, module)
    _refuse_parametrized(model, module)
    _refuse_final(model, module)
    _refuse_suspended(model, module)


def _refuse_taken(model: nn.Module, module: nn.Module) -> None:
    """Raise ValueError if a name that the mixing needs is there already."""
    name = name_of(model, module)
    if "forward" in vars(module):
        raise ValueError(
            f"{name}: has a forward of its own, which a tool has put there; must be mixed before"
        )
    for taken in (sdpa.ATTRIBUTE, *PARTS):
        if hasattr(module, taken):
            raise ValueError(f"{name}.{taken}: is an attribute, must be free for the mixing")


def _refuse_parametrized(model: nn.Module, module: nn.Module) -> None:
    """Raise ValueError if a module computes tensors of its own by torch's parametrizations.

    Their class is in front of the module's. To remove them, torch goes back from the class of the
    module, and would find ours.
    """
    if parametrize.is_parametrized(module):
        name = next(iter(module.parametrizations))  # type: ignore[arg-type, call-overload]
        raise ValueError(
            f"{name_of(model, module)}: is parametrized ({name}); must be mixed before, and "
            "parametrized afterwards"
        )


def _refuse_final(model: nn.Module, module: nn.Module) -> None:
    """Raise ValueError if the class of a module forbids the subclass that mixed modules are of."""
    try:
        mixed_class(plain_class(module))
    except Exception as error:  # the class may raise whatever it wants
        raise ValueError(
            f"{name_of(model, module)}: is of a class that lets nobody make a subclass, which a "
            f"mixed module must be of ({error})"
        ) from error


def _refuse_suspended(model: nn.Module, module: nn.Module) -> None:
    """Raise ValueError if a method would compute its attention when the mixing has ended."""
    method = suspended_method(plain_class(module))
    if method:
        raise ValueError(
            f"{name_of(model, module)}: its {method} is a generator or async, and calls "
            "scaled_dot_product_attention itself; must call the module, as self(x), which mixes"
        )


def _refuse_unknown_input(
    model: nn.Module, module: nn.Module, sizes: CallSizes, variant: Variant
) -> None:
    """Raise ValueError if a part reads the input of the queries, and the example shows none."""
    reader = sdpa.reads_input(variant)
    if reader and sizes.embed_dim is None:
        raise ValueError(
            f"{reader} {getattr(variant, reader)}: reads the input of the queries; so the first "
            f"argument of {name_of(model, module)} must be it, [batch, positions, features], with "
            "another number of positions than of examples in the batch"
        )


def refuse_kept(model: nn.Module, old: Iterable[nn.Module]) -> None:
    """Raise ValueError if something goes on with a module that is replaced, and not with the new.

    So does the wrapper that `torch.compile(attention)` is, and whatever else in the model keeps the
    module or one of its methods: a list, an object, a closure, a hook.
    """
    old = set(old)
    for path, module in model.named_modules():
        if getattr(module, "_orig_mod", None) in old:
            raise ValueError(
                f"{path or 'the model'}: is compiled, and its graph would go on with the former "
                "attention; must be compiled afterwards"
            )
    for place, kept in holders(model, old):
        raise ValueError(
            f"{name_of(model, kept)}: is kept as {place}, too, which would go on without the "
            "change; must not be kept there"
        )


def refuse_loss(model: nn.Module, module: nn.Module, lost: str) -> None:
    if lost:
        raise ValueError(
            f"{name_of(model, module)}: without {lost} its outputs would change; must stay mixed"
        )
