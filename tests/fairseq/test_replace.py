"""Test that programs can call a replaced function of fairseq as they call fairseq's own."""

import importlib
import inspect
import pkgutil

import pytest
from fairseq_cli import train

from mixhead_plugin.fairseq import hooks
from mixhead_plugin.fairseq.repairs import REPAIRS, signals
from mixhead_plugin.fairseq.replace import replacements

# By name, a replacement, and the class or module and the name of what it replaces.
REPLACEMENTS = {
    # marked when a training begins
    "signals._validate_and_save": (signals._validate_and_save, train, "validate_and_save")
}
for module in [hooks, *(repair.module for repair in REPAIRS.values())]:
    for function in replacements(module):
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        REPLACEMENTS[name] = (function, *function.replaces)


def test_every_function_in_a_folder_of_a_repair_is_installed():
    for repair in REPAIRS.values():
        package = repair.module
        for info in pkgutil.iter_modules(getattr(package, "__path__", [])):
            inside = importlib.import_module(f"{package.__name__}.{info.name}")
            assert set(replacements(inside)) <= set(replacements(package)), inside.__name__


@pytest.mark.parametrize("function, owner, name", REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_a_replacement_takes_the_arguments_of_fairseq_by_place_and_by_name(function, owner, name):
    attribute = inspect.getattr_static(owner, name)
    of_fairseq = inspect.signature(getattr(attribute, "__func__", attribute))
    arguments = []
    for each in of_fairseq.parameters.values():
        if each.kind is each.POSITIONAL_OR_KEYWORD:
            arguments.append(each.name)

    receiver = []  # `self` or `cls`, which Python passes by its place
    if inspect.isclass(owner) and not isinstance(attribute, staticmethod):
        receiver = [arguments.pop(0)]
    ours = inspect.signature(function)
    ours.bind("original", *receiver, *arguments)
    ours.bind("original", *receiver, **{each: each for each in arguments})
