"""How the blocks of a call share the memory of each gradient."""

from enum import Enum

from mixhead_plugin.ops.blockwise.block import dimensions


class Sharing(Enum):
    """Which blocks have a part in the same numbers of a gradient."""

    WRITTEN = "one block writes it"
    TERM = "each block has a term, and all terms are summed at the end"
    BY_GROUP = "blocks of one group add, and the first of them writes"
    BY_ALL = "blocks of all groups add"


def sharing(name: str, number_of_dimensions: int) -> Sharing:
    """Return how blocks share the gradient of an input.

    Args:
        name: name of the input
        number_of_dimensions: of the gradient; tells a shared M [H, H'] from one by query
    """
    if name in ("key", "value"):
        return Sharing.BY_GROUP
    if name == "attn_mask":  # of any number of dimensions, so `dimensions` does not know it
        return Sharing.BY_ALL

    dims = dimensions(name, number_of_dimensions)
    if "Nk" in dims or "P" in dims:
        return Sharing.BY_ALL
    if "Nq" in dims:
        return Sharing.WRITTEN
    # Small tensors that all queries share: a sink [H], or an M [H, H'].
    return Sharing.TERM
