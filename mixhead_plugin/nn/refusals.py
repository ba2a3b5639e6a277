"""What stands in the way of mixing, unmixing or loading a model, each in one line."""

import gc
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from mixhead_plugin.errors import wrong_argument
from mixhead_plugin.nn import multihead, sdpa
from mixhead_plugin.nn.attention import MixedAttention
from mixhead_plugin.nn.calling_methods import suspended_method
from mixhead_plugin.nn.example import CallSizes, Example
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
    for place, kept in _holders(model, old):
        raise ValueError(
            f"{name_of(model, kept)}: is kept as {place}, too, which would go on without the "
            "change; must not be kept there"
        )


def _holders(model: nn.Module, old: Collection[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the attributes of a model that hold modules of `old`, each with the module."""
    # By their ids, because what a program keeps need not have a hash.
    by_id = {id(module): module for module in old}
    own = {id(module) for module in model.modules()}
    # Each object is looked at once, because layers share a config, whose vocabulary may have many
    # thousands of entries.
    seen = _variables_of_files()
    for place, value in _attributes(model, old):
        for held in _inside(value, own, seen):
            if id(held) in by_id:
                yield place, by_id[id(held)]


def _variables_of_files() -> set[int]:
    """Return the ids of the dicts with the variables of all files, and of a notebook.

    They are no attributes of the model, though an object in it may lead to them.
    """
    files = [file for file in list(sys.modules.values()) if isinstance(file, ModuleType)]
    return {id(vars(file)) for file in files}


def _attributes(model: nn.Module, old: Collection[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes in a model that stay when the modules of `old` are replaced."""
    for path, module in model.named_modules():
        if module in old:
            continue  # what it has is replaced with it
        for name, value in vars(module).items():
            if name != "_modules":  # the new modules are put there
                yield f"{path}.{name}" if path else name, value


# What a module does not keep as its own, though it leads there: the globals of a file, the classes,
# and the local variables of a program that runs.
_NOT_KEPT = (type, ModuleType, FrameType, GeneratorType, CodeType, Tensor)


def _inside(value: Any, own: Collection[int], seen: set[int]) -> Iterator[Any]:
    """Yield what an attribute holds, however deep: in containers, objects, closures and methods.

    The garbage collector knows what any object refers to, so no kind of holder is left out.

    Args:
        value: the attribute
        own: ids of the modules of the model, whose attributes are looked at by themselves
        seen: ids of what is left out; gets those of what is yielded
    """
    waiting = [value]
    while waiting:
        held = waiting.pop()
        # Texts and numbers, and what has nothing else inside, are unknown to the collector.
        if not gc.is_tracked(held) or id(held) in seen or isinstance(held, _NOT_KEPT):
            continue
        seen.add(id(held))
        yield held

        if isinstance(held, FunctionType):  # not its globals
            waiting += [held.__closure__, held.__defaults__, held.__kwdefaults__, vars(held)]
        elif id(held) not in own:
            waiting += gc.get_referents(held)


def refuse_loss(model: nn.Module, module: nn.Module, lost: str) -> None:
    if lost:
        raise ValueError(
            f"{name_of(model, module)}: without {lost} its outputs would change; must stay mixed"
        )
