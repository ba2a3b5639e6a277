"""Read --heads-per-layer, the numbers of heads of a pruned model."""

from typing import Any

from mixhead_plugin.errors import OptionError
from mixhead_plugin.heads.sites import SITES


def parse_heads_per_layer(text: Any) -> dict[str, list[tuple[int, int]]]:
    """Return the numbers of source and mixed heads of each layer, by site; refuse a malformed text.

    'encoder-self=8,6;cross=4:3' gives {"encoder-self": [(8, 8), (6, 6)], "cross": [(4, 3)]}.

    Args:
        text: the value of --heads-per-layer; None or an empty text for none. A YAML file may hold
            something else, such as a number, which is refused.
    """
    heads: dict[str, list[tuple[int, int]]] = {}
    if text is None or text == "":
        return heads
    flag = f"--heads-per-layer {text}"
    for piece in str(text).split(";"):
        if not piece.strip():
            continue  # such as what follows a last semicolon
        site, _, layers = piece.partition("=")
        site = site.strip()
        if site not in SITES:
            raise OptionError(f"{flag}: {site!r} must be one of {', '.join(SITES)}")
        if site in heads:
            raise OptionError(f"{flag}: {site} must be there once, not twice")
        heads[site] = [_heads_of_layer(layer, flag) for layer in layers.split(",")]
    if not heads:  # semicolons alone
        raise OptionError(
            f"{flag}: must name an attention, as in 'encoder-self=8,6', or be left out"
        )
    return heads


def _heads_of_layer(text: str, flag: str) -> tuple[int, int]:
    """Return the numbers of source and mixed heads of '8:6', or of '8' for equal ones."""
    source, colon, mixed = text.strip().partition(":")
    if not colon:
        mixed = source
    for number in (source, mixed):
        if not number.strip().isdecimal() or int(number) < 1:
            raise OptionError(
                f"{flag}: {text.strip()!r} must be a number of heads or source:mixed, from 1 on"
            )
    return int(source), int(mixed)
