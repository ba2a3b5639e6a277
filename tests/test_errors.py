"""Test the exceptions of the package."""

import pickle

import pytest
from torch._utils import ExceptionWrapper

import mixhead_plugin.heads
import mixhead_plugin.hf
import mixhead_plugin.nn  # noqa: F401 (each door has exceptions of its own)
from mixhead_plugin.parts import PartError, Variant
from tests import helpers  # noqa: F401 (registers the door for fairseq)


def _exceptions(kind: type = Exception) -> list[type]:
    """Return the subclasses that the package defines, at any depth."""
    found = []
    for each in kind.__subclasses__():
        if each.__module__.startswith("mixhead_plugin"):
            found.append(each)
        found += _exceptions(each)
    return list(dict.fromkeys(found))


def test_every_door_has_exceptions():
    names = {kind.__name__ for kind in _exceptions()}
    assert {"CheckpointError", "HeadsError", "OptionError", "PartError", "ShapeError"} <= names


@pytest.mark.parametrize("kind", _exceptions(), ids=lambda kind: kind.__name__)
def test_an_exception_arrives_from_another_process_as_itself(kind):
    error = kind("--head-dim 0: must be at least 1")
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is kind
    assert str(arrived) == str(error)

    # A worker of a DataLoader sends the class, and a text that the exception is built from.
    with pytest.raises(kind, match="--head-dim 0: must be at least 1"):
        ExceptionWrapper((kind, error, None)).reraise()


def test_a_part_error_arrives_with_the_value_that_it_names():
    with pytest.raises(PartError) as error:
        Variant(head_dim=0)
    arrived = pickle.loads(pickle.dumps(error.value))
    assert vars(arrived) == vars(error.value)
    assert arrived.option == "head_dim"
