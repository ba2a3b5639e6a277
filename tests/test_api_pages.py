"""The pages of the API: each names modules, and what these offer says every argument on a line."""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("api-*.md"))
# The module that a page shows, and which of its names, if not all.
SHOWN = re.compile(r"(?m)^::: (\S+)(?:\n +options:\n +members: \[(.*)\])?")


def shown():
    """Return what the pages show, by its full name; methods included."""
    found = {}
    for page in PAGES:
        for name, chosen in SHOWN.findall(page.read_text()):
            module = importlib.import_module(name)
            for member in chosen.split(", ") if chosen else public(module):
                value = getattr(module, member)
                found[f"{name}.{member}"] = value
                if inspect.isclass(value):
                    for method in public(value):
                        found[f"{name}.{member}.{method}"] = vars(value)[method]
    return {
        name: value
        for name, value in found.items()
        if inspect.isclass(value) or inspect.isfunction(value)
    }


def public(owner):
    """Return the names that a module or a class offers: its `__all__`, or what it defines."""
    if hasattr(owner, "__all__"):
        return owner.__all__
    module = owner.__name__ if inspect.ismodule(owner) else owner.__module__
    return [
        name
        for name, value in vars(owner).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module
    ]


def arguments(value):
    """Return the names that a caller gives, or those that a tuple has."""
    if hasattr(value, "_fields"):
        return list(value._fields)
    # Variant, whose fields are the table of flags, and the protocol, which nobody makes.
    if dataclasses.is_dataclass(value) or getattr(value, "_is_protocol", False):
        return []
    if inspect.isclass(value) and "__init__" not in vars(value):
        return []
    return [name for name in inspect.signature(value).parameters if name != "self"]


def listed(docstring):
    """Return the names that begin a line in the list of a docstring."""
    section = re.search(r"(?ms)^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", docstring)
    return re.findall(r"(?m)^    (\w+): ", section[1]) if section else []


OFFERED = shown()


def test_every_door_has_a_page():
    names = {name for page in PAGES for name, _ in SHOWN.findall(page.read_text())}
    doors = ["ops", "nn", "hf", "heads.attention"]
    assert {f"mixhead_plugin.{door}" for door in doors} <= names


@pytest.mark.parametrize("name", OFFERED)
def test_each_argument_has_a_line(name):
    value = OFFERED[name]
    assert listed(inspect.getdoc(value) or "") == arguments(value)
