"""The pages of the API: each names modules, and what these offer says every argument on a line."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("api-*.md"))
DIRECTIVE = re.compile(r"(?m)^::: (\S+)$")


def modules():
    """Return the modules that the pages show."""
    return [
        importlib.import_module(name)
        for page in PAGES
        for name in DIRECTIVE.findall(page.read_text())
    ]


def offered(module):
    """Return what a module offers by name: its `__all__`, or else what it defines."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
        ]
    return {name: getattr(module, name) for name in names}


def documented():
    """Return (name, function or class) for all that the pages show, methods included."""
    found = {}
    for module in modules():
        for name, value in offered(module).items():
            if inspect.isclass(value):
                found[f"{module.__name__}.{name}"] = value
                for method, function in vars(value).items():
                    if inspect.isfunction(function) and not method.startswith("_"):
                        found[f"{module.__name__}.{name}.{method}"] = function
            elif inspect.isfunction(value):
                found[f"{module.__name__}.{name}"] = value
    return found


DOCUMENTED = documented()


def arguments(value):
    """Return the names of the arguments that a caller gives."""
    if inspect.isclass(value) and ("__init__" not in vars(value) or hasattr(value, "_fields")):
        return [*getattr(value, "_fields", ())]
    parameters = inspect.signature(value).parameters
    return [name for name in parameters if name not in ("self", "cls")]


def listed(docstring):
    """Return the names that stand at the beginning of a line in the lists of a docstring."""
    section = r"(?ms)^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)"
    lines = "".join(re.findall(section, inspect.cleandoc(docstring)))
    return re.findall(r"(?m)^    (\w+): ", lines)


def test_every_door_has_a_page():
    shown = {module.__name__ for module in modules()}
    assert shown >= {f"mixhead_plugin.{name}" for name in ("ops", "nn", "hf", "heads.attention")}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_each_argument_has_a_line(name):
    value = DOCUMENTED[name]
    assert listed(value.__doc__ or "") == arguments(value)
