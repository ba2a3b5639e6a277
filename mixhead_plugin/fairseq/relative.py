"""Refuse relative positions and gains where an attention cannot have them."""

from typing import Any

from mixhead_plugin.parts import PartError


def refuse_relative_position(asked: Any, ending: str) -> None:
    """Refuse any --relative-position but none.

    Args:
        asked: a `Variant` or the flags of a model; both have this field
        ending: how the message goes on after 'must be none', such as ', the scores are absolute'

    Raises:
        PartError: in the words of Python; `checks.part_errors_as_option_errors` names the flag
    """
    if asked.relative_position != "none":
        value = asked.relative_position
        raise PartError.of("relative_position", value, f"must be none{ending}")


def refuse_relative(asked: Any, ending: str) -> None:
    """Refuse any --relative-position but none, and any --relative-gain but 0.

    Args:
        asked: a `Variant` or the flags of a model; both have these fields
        ending: how the message goes on after 'must be none' or 'must be 0'

    Raises:
        PartError: as `refuse_relative_position`
    """
    refuse_relative_position(asked, ending)
    if asked.relative_gain != 0:
        raise PartError.of("relative_gain", asked.relative_gain, f"must be 0{ending}")
