"""Send the metadata of a state dict to all workers, with its tensors.

With several workers, fairseq loads a checkpoint once and sends it to all of them. On the way a
state dict becomes a plain dict, and loses what torch keeps beside its tensors. So a model cannot
know with which attention flags a checkpoint was trained, and takes weights of another attention.
"""

from collections import OrderedDict
from typing import Any

from fairseq.distributed import utils
from torch import Tensor

from mixhead_plugin.fairseq.replace import replaces


# fairseq sends tensors apart from what holds them. Both functions call themselves for each dict in
# a dict, so they also call the functions here.
@replaces(utils, "_split_tensors_from_obj")
def _split(original, obj: Any, tensors: list[Tensor]) -> Any:
    return _with_attributes(obj, original(obj, tensors))


@replaces(utils, "_put_tensors_in_obj")
def _put(original, obj: Any, tensors: list[Tensor]) -> Any:
    return _with_attributes(obj, original(obj, tensors))


def _with_attributes(obj: Any, result: Any) -> Any:
    """Return `result` as an OrderedDict with the attributes of `obj`, if `obj` is one."""
    if not isinstance(obj, OrderedDict):
        return result
    whole = OrderedDict(result)
    vars(whole).update(vars(obj))  # torch keeps the metadata of a state dict in `_metadata`
    return whole
