"""Load models that were saved mixed or pruned."""

import functools
from os import PathLike
from typing import Any

import transformers
from transformers import PreTrainedModel

from mixhead_plugin.hf.attend import NAME
from mixhead_plugin.hf.mixing import PRUNED, REFUSED, attach
from mixhead_plugin.hf.pruning import prune
from mixhead_plugin.parts import PARTS, complete


def load(
    folder: str | PathLike[str], cls: type[PreTrainedModel] | None = None, *, impl: str = "auto", **settings: Any
) -> Any:
    """Load a mixed or pruned model that `save_pretrained` wrote; raise ValueError if it lacks a part of the mixing.

    Args:
        folder, settings: the arguments of `from_pretrained`; `unmix` goes to the `attn_implementation`
        cls: the class of the model; by default the one that was saved. Of a pruned model it needs the same attentions
        impl: the implementation of `ops.attention`
    """
    saved, _ = transformers.PreTrainedConfig.get_config_dict(folder, **settings)
    if NAME not in saved:
        raise ValueError(f"{folder}: its config has no entry {NAME}; load it by from_pretrained")
    base: Any = cls or getattr(transformers, saved["architectures"][0], object)
    if not issubclass(base, PreTrainedModel):  # an AutoModel makes models of other classes, without the mixing
        raise ValueError(f"cls {base.__name__}: must be the class of a model, as {saved['architectures'][0]}")
    variant = complete(saved[NAME], impl)

    @functools.wraps(base, updated=())  # transformers chooses the loss by the name of the class
    class MixedModel(base):
        def __init__(self, config: Any, *args: Any, **kwargs: Any):
            super().__init__(config, *args, **kwargs)
            attach(self, variant, impl)
            if PRUNED in saved:
                prune(self, {int(layer): heads for layer, heads in saved[PRUNED].items()})

    wants_info, settings = settings.pop("output_loading_info", False), dict.fromkeys(REFUSED) | settings
    model, info = MixedModel.from_pretrained(folder, output_loading_info=True, **settings)
    if missing := sorted(name for name in info["missing_keys"] if any(f".{part}." in name for part in PARTS)):
        raise ValueError(f"{folder}: has no tensor for {missing[0]}; {len(missing)} are missing")
    model.__class__ = base  # which pickle finds by its name
    return (model, info) if wants_info else model
