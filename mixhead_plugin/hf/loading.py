"""Load models that were saved mixed or pruned."""

import functools
import json
import os
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import load_state_dict
from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from mixhead_plugin.errors import wrong_argument
from mixhead_plugin.heads.cutting import chosen_to_cut
from mixhead_plugin.hf.configs import (
    ATTENTIONS,
    OLDER_ATTENTIONS,
    REFUSED,
    forget,
)
from mixhead_plugin.hf.heads import cut_and_note_in_config
from mixhead_plugin.hf.layouts import LAYOUTS, MIXHEAD
from mixhead_plugin.hf.mixing import add_mixing, attentions_of_classes, is_mixed
from mixhead_plugin.hf.refusals import SPLIT
from mixhead_plugin.hf.saving import LOADER, PRUNED, file_of
from mixhead_plugin.hf.studied_attention import attentions_of
from mixhead_plugin.parts import Variant, is_of_a_part, keep_float32, name_in_attention


def load(
    folder: str | PathLike[str],
    cls: type[PreTrainedModel] | None = None,
    *,
    impl: str = "auto",
    **settings: Any,
) -> Any:
    """Load a mixed or pruned model that `save_pretrained` wrote.

    A mixing that was saved in float32 beside a model in half precision stays in float32, so it
    comes back as it was trained. If the whole model was saved in float32, `dtype` holds for all.

    Args:
        folder: the first argument of `from_pretrained`: a folder, or a name on the hub
        cls: the class of the model; None for the one that was saved. It may have some of the
            attentions alone. That of a pruned model must have the same attentions
        impl: which code computes the attention: "auto", "reference", "blockwise" or "triton"
        settings: the other arguments of `from_pretrained`; `unmix` goes back to the
            `attn_implementation`

    Raises:
        ValueError: no folder, no config.json, or no entry in it, tensors that are missing, do not
            fit or have no place, another class, or a `tp_plan`
        OSError: as `from_pretrained`, for a name that is no folder here, nor found on the hub
    """
    saved = _saved_config(folder, settings)
    _refuse_split(settings)
    base: Any = _class_of(folder, saved, cls)
    variant = Variant.of({**saved[MIXHEAD], "impl": impl})
    classes = saved.get(ATTENTIONS, OLDER_ATTENTIONS | LAYOUTS.keys())

    @functools.wraps(base, updated=())  # transformers chooses the loss by the name of the class
    class MixedModel(base):
        def __init__(self, config: Any, *args: Any, **kwargs: Any):
            forget(config)  # a model made from it has no mixing at first
            super().__init__(config, *args, **kwargs)
            if not is_mixed(self):  # a class of one's own may mix where it is made
                add_mixing(self, variant, attentions_of_classes(self, classes))
            if PRUNED in saved:
                gone: Any = {int(layer): heads for layer, heads in saved[PRUNED].items()}
                layers = attentions_of(self)
                cut_and_note_in_config(self, layers, chosen_to_cut(layers, gone))

        @staticmethod
        def _load_pretrained_model(
            model: Any, state_dict: Any, checkpoint_files: Any, *args: Any, **kwargs: Any
        ) -> Any:
            # `_keep_in_fp32_modules_strict` of transformers is for what is float32 in every file.
            # A mixing may have been saved in half precision, too.
            keep_float32(model, _tensors_in(checkpoint_files))
            return base._load_pretrained_model(model, state_dict, checkpoint_files, *args, **kwargs)

    setattr(MixedModel, LOADER, True)
    wants_info = settings.pop("output_loading_info", False)
    settings = dict.fromkeys(REFUSED) | settings  # what would refuse this folder is overridden
    model, info = MixedModel.from_pretrained(folder, output_loading_info=True, **settings)
    _refuse_incomplete(folder, model, info)
    model.__class__ = base  # which pickle finds by its name
    return (model, info) if wants_info else model


def _saved_config(folder: str | PathLike[str], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a folder, or of a name on the hub; raise ValueError without a mixing."""
    if not isinstance(folder, (str, PathLike)):
        raise ValueError(wrong_argument("folder", folder, "a folder, or a name on the hub"))
    # A name on the hub is one word, or two with a slash between them.
    name = os.fspath(folder)
    is_path = name.startswith((".", "~", os.sep)) or name.count(os.sep) > 1
    if os.path.isfile(name) or (is_path and not os.path.isdir(name)):
        raise ValueError(
            f"{folder}: is no folder; must be one that save_pretrained wrote, or a name on the hub"
        )

    saved, _ = transformers.PreTrainedConfig.get_config_dict(folder, **settings)
    if MIXHEAD not in saved:
        problem = f"its config has no entry {MIXHEAD}" if saved else f"has no {CONFIG_NAME}"
        raise ValueError(f"{folder}: {problem}; {_advice(folder, saved, settings)}")
    return saved


def _refuse_incomplete(
    folder: str | PathLike[str], model: PreTrainedModel, info: dict[str, Any]
) -> None:
    """Raise ValueError if tensors of the mixing are missing, do not fit, or have no place.

    Args:
        folder: where the model comes from
        model: the model that was loaded
        info: what `from_pretrained` says of its loading
    """
    missing = sorted(_of_parts(info["missing_keys"]))
    if missing:
        raise ValueError(f"{folder}: has no tensor for {missing[0]}; {len(missing)} are missing")

    # Here only with `ignore_mismatched_sizes=True`, under which transformers leaves them out.
    for name, saved, wanted in sorted(info["mismatched_keys"]):
        if is_of_a_part(name):
            raise ValueError(
                f"{folder}: its {name} is {[*saved]}, must be {[*wanted]}; the mixing of other "
                "heads cannot be loaded"
            )

    # A class may have some of the attentions alone, as CLIPTextModel of a CLIPModel. What is of the
    # others is left out, as by `from_pretrained`. But a tensor that no attention of the model knows
    # shows that the config does not belong to the tensors.
    known = {name_in_attention(name) for name in _of_parts(model.state_dict())}
    unknown = [
        name
        for name in sorted(_of_parts(info["unexpected_keys"]))
        if name_in_attention(name) not in known
    ]
    if unknown:
        raise ValueError(
            f"{folder}: has a tensor {unknown[0]} that nothing takes; "
            "its config is of another mixing"
        )


def _refuse_split(settings: dict[str, Any]) -> None:
    """Raise ValueError if heads would be split between processes."""
    distributed = settings.get("distributed_config")  # of newer versions of transformers
    for name in ("tp_plan", "tp_size", "device_mesh"):
        if settings.get(name) is not None or getattr(distributed, name, None) is not None:
            raise ValueError(f"{name}: must be left out; {SPLIT}")


def _class_of(folder: Any, saved: dict[str, Any], cls: Any) -> Any:
    """Return the class of the model: the one that is given, or else that was saved."""
    written = (saved.get("architectures") or [None])[0]
    if cls is None and written is None:
        raise ValueError(
            f"{folder}: its config names no class in architectures; give the class as cls"
        )
    chosen = cls or getattr(transformers, written, None)
    if chosen is None:
        raise ValueError(f"{folder}: transformers has no class {written}; give the class as cls")
    # an AutoModel makes models of other classes, without the mixing
    if not isinstance(chosen, type) or not issubclass(chosen, PreTrainedModel):
        like = written or "BertForMaskedLM"
        raise ValueError(wrong_argument("cls", chosen, f"the class of a model, as {like}"))
    return chosen


def _tensors_in(files: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors of files by name, on the device meta: without reading their numbers."""
    tensors = {}
    for file in files:
        tensors.update(load_state_dict(file, map_location="meta"))
    return tensors


def _of_parts(names: Iterable[str]) -> list[str]:
    return [name for name in names if is_of_a_part(name)]


def _advice(folder: str | PathLike[str], saved: dict[str, Any], settings: dict[str, Any]) -> str:
    """Say how to load a folder that has no entry.

    Args:
        folder: it may have the tensors of a mixing, or none
        saved: its config, empty if it has none
        settings: the arguments of `from_pretrained`
    """
    parts = _of_parts(_names_of_tensors(folder, settings))
    if parts:
        problem = "it was saved by a model around the mixed one, or its config was replaced"
        return f"but it has {parts[0]}: {problem}; mix the outermost model and save it again"
    if saved:
        return "load it by from_pretrained"
    if (Path(folder) / "adapter_config.json").exists():
        return "load its base by hf.load, and then the adapter by PeftModel.from_pretrained"
    # A Trainer writes each model into a folder of its own, such as checkpoint-500.
    inside = [config.parent.name for config in Path(folder).glob(f"*/{CONFIG_NAME}")]
    if inside:
        return f"must be what save_pretrained wrote, as {min(inside)} in it"
    return "must be what save_pretrained wrote"


def _names_of_tensors(folder: str | PathLike[str], settings: dict[str, Any]) -> list[str]:
    """Return the names of the tensors that `from_pretrained` would read, without reading them."""
    # In the order of transformers.
    for usual in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        name = usual
        if settings.get("variant") is not None:  # as fp16 in model.fp16.safetensors
            start, _, ending = usual.rpartition(".")
            name = f"{start}.{settings['variant']}.{ending}"
        file = file_of(folder, name, settings)
        if file is None:
            continue
        if usual in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
            with open(file, encoding="utf-8") as index:
                return list(json.load(index)["weight_map"])
        return list(_tensors_in([file]))
    return []
