"""Warn of the attentions of a model that `mix` leaves as they are."""

from collections.abc import Mapping

from torch import nn

from mixhead_plugin.errors import warn_caller
from mixhead_plugin.nn.calling_methods import calling_methods
from mixhead_plugin.nn.mixed_class import plain_class
from mixhead_plugin.nn.refusals import name_of
from mixhead_plugin.parts import Assembly


def warn_of_others(
    model: nn.Module, hosted: Mapping[nn.Module, object], others: Mapping[nn.Module, str]
) -> None:
    """Warn of attentions that the example has shown to be there, and that stay as they are.

    Args:
        model: was mixed
        hosted: the modules that call scaled_dot_product_attention and were mixed
        others: modules that call another function, with its name
    """
    classes = {plain_class(host) for host in hosted}
    missed = [
        name_of(model, module)
        for module in model.modules()
        if plain_class(module) in classes and module not in hosted
    ]
    if missed:
        warn_caller(
            f"{type(model).__name__}: was mixed without {', '.join(missed)}; the example did not "
            "call them",
        )
    by_function: dict[str, list[str]] = {}
    for module, function in others.items():
        if not isinstance(module, (nn.MultiheadAttention, Assembly)):
            by_function.setdefault(function, []).append(name_of(model, module))
    for function, names in by_function.items():
        warn_caller(
            f"{type(model).__name__}: was mixed without {', '.join(names)}, which call {function}",
        )


def warn_of_callers(model: nn.Module) -> None:
    """Warn of modules that call scaled_dot_product_attention, as far as their code shows it."""
    names = []
    for name, module in model.named_modules():
        if not isinstance(module, Assembly) and calling_methods(type(module)):
            names.append(name or type(module).__name__)
    if names:
        warn_caller(
            f"{type(model).__name__}: was mixed without {', '.join(names)}, which call "
            "F.scaled_dot_product_attention; an example must be given to mix them",
        )
