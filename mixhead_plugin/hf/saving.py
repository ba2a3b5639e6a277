"""Keep the tensors of a mixing and the config that tells of it together.

`save_pretrained` writes the tensors of a whole model, but only the config of the outermost. A model
that is made from a config has the plain attentions, whatever the config says. None of them asks the
modules inside. So `guard_models` puts a check in front of each.

`from_pretrained` leaves a parameter that the folder lacks uninitialised, until the class of the
model gives it a start. No class of transformers knows our parts, so `guard_models` starts them.
"""

import functools
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, Trainer
from transformers.models.auto import modeling_auto
from transformers.utils import CONFIG_NAME, cached_file

from mixhead_plugin.hf.attention_hooks import mixed_heads_of
from mixhead_plugin.hf.finding import find_attentions
from mixhead_plugin.hf.layouts import MIXHEAD
from mixhead_plugin.parts import Variant, is_of_a_part, name_in_attention, record
from mixhead_plugin.parts.kinds import Part
from mixhead_plugin.parts.random_numbers import forked_rng

# The file in the folder of a mixed model that the Auto classes of transformers import, if the user
# trusts it; hf/auto.py has the classes.
MODELING_FILE = "modeling_mixhead.py"
MODELING_TEXT = '''"""Load the model of this folder, whose heads are mixed, by mixhead_plugin."""

from mixhead_plugin.hf.auto import *
'''
# The attribute of a class that may load a folder of mixed heads, whatever config it is given.
LOADER = "_mixhead_loader"
# The entry of a config that has the heads that `prune` removed, by layer.
PRUNED = "mixhead_pruned"
# The entry in the metadata of a state dict that names the mixed attentions of a model.
MIXED_INSIDE = "mixhead_inside"
AUTO_CLASSES = [
    name
    for name in vars(modeling_auto)
    if name.startswith("AutoModel") and hasattr(getattr(modeling_auto, name), "_model_mapping")
]


def guard_models() -> None:
    """Let models refuse to be made from the config of a mixed model, or to be saved without one.

    Mixed ones are saved with what the Auto classes load them by. Parts that a folder has no tensors
    for start as they do in a new model.
    """
    if hasattr(PreTrainedModel.save_pretrained, MIXHEAD):
        return  # patched already: this module was imported a second time, as by importlib.reload
    model: Any = PreTrainedModel

    # `AutoModel.from_config` and every class make a plain model, whatever else the config says.
    model.__init__ = _call_first(model.__init__, _refuse_new_model_from_mixed_config)

    # Of a model that is mixed inside alone, the file would have the tensors, but no entry.
    # Of one whose mixing is wrapped by PEFT, or parametrized, it would have tensors of other names.
    with_file = _with_file(model.save_pretrained)
    with_entry = _call_first(with_file, _refuse_config_without_entry)
    model.save_pretrained = _call_first(with_entry, _refuse_parts_of_other_tensors)

    # Another program saves and loads state dicts itself. An attention that is plain there asks
    # nothing, so the model around it names the mixed ones, and compares.
    model._save_to_state_dict = _call_first(model._save_to_state_dict, _write_names_of_mixed)
    model._load_from_state_dict = _call_first(
        model._load_from_state_dict, _refuse_mixed_state_for_plain_model
    )

    # A config that is given by hand hides the one in the folder, which would be refused. A state
    # dict that is given by hand does not pass `_load_from_state_dict`.
    from_pretrained = _with_given_state(model.from_pretrained.__func__)
    model.from_pretrained = classmethod(
        _call_first(from_pretrained, _refuse_plain_config_for_mixed_folder)
    )

    # A class of one's own may mix where it is made, or have a `MixedAttention`, and load a folder
    # without a mixing.
    model._initialize_missing_keys = _call_first(
        model._initialize_missing_keys, _start_what_was_not_loaded
    )

    # `Trainer.train(resume_from_checkpoint=...)` reads the tensors alone into its own model.
    trainer: Any = Trainer
    trainer._load_from_checkpoint = _call_first(
        trainer._load_from_checkpoint, _refuse_checkpoint_of_another_variant
    )


def _with_file(save: Any) -> Any:
    """Return a `save_pretrained` that also writes what the Auto classes load a mixed model by."""

    @functools.wraps(save)
    def saved(
        model: Any,
        save_directory: str | PathLike[str],
        is_main_process: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        auto_map = auto_map_of(model.config) if hasattr(model.config, MIXHEAD) else {}
        if auto_map and is_main_process:
            model.config.auto_map = auto_map
            # Before the other files, because `push_to_hub=True` uploads the folder at the end.
            folder = Path(save_directory)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / MODELING_FILE).write_text(MODELING_TEXT, encoding="utf-8")
        return save(model, save_directory, is_main_process, *args, **kwargs)

    return saved


def _with_given_state(from_pretrained: Any) -> Any:
    """Return a `from_pretrained` that refuses the state dict of a mixed model in a plain one.

    It looks at the model that was made, because a class of one's own may mix where it is made.
    """

    @functools.wraps(from_pretrained)
    def loaded(cls: Any, *args: Any, **settings: Any) -> Any:
        made = from_pretrained(cls, *args, **settings)
        state_dict = settings.get("state_dict")
        if state_dict is None:
            return made
        model = made[0] if isinstance(made, tuple) else made
        lost = _lost_in(model, state_dict)
        if lost:
            raise ValueError(
                f"{cls.__name__}: the given state_dict has mixed heads in {lost[0]}, the model "
                "has not; make a plain model, call hf.mix in the same way, and load_state_dict"
            )
        return made

    return loaded


def _lost_in(model: Any, state_dict: Mapping[str, Any]) -> list[str]:
    """Return the names of mixed attentions, or of tensors of a mixing, that a model has not."""
    if any(MIXHEAD in vars(module) for module in model.modules()):
        return []
    names = []
    # A variant may have no tensors, but a copy of the dict has no metadata.
    for path, metadata in getattr(state_dict, "_metadata", {}).items():
        names += [f"{path}.{name}".strip(".") for name in metadata.get(MIXED_INSIDE, ())]
    # A model of one's own may have parts that no `mix` made, as in a `MixedAttention`.
    known = {name_in_attention(name) for name in model.state_dict() if is_of_a_part(name)}
    for name in state_dict:
        if is_of_a_part(name) and name_in_attention(name) not in known:
            names.append(name)
    return names


def auto_map_of(config: PreTrainedConfig) -> dict[str, str]:
    """Return the entry auto_map for config.json: the Auto classes that know a model of this type.

    Empty where others have made one: the code that they name is not ours to replace.
    """
    given = getattr(config, "auto_map", None) or {}
    if any(not name.startswith(Path(MODELING_FILE).stem) for name in given.values()):
        return {}
    return {
        name: f"{Path(MODELING_FILE).stem}.{name}"
        for name in AUTO_CLASSES
        if type(config) in getattr(modeling_auto, name)._model_mapping
    }


def _call_first(function: Any, before: Any) -> Any:
    """Return a function that calls `before` first, with the same arguments."""

    @functools.wraps(function)
    def both(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return function(*args, **kwargs)

    setattr(both, MIXHEAD, True)
    return both


def _refuse_new_model_from_mixed_config(model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    if hasattr(config, MIXHEAD):
        raise ValueError(
            f"{type(model).__name__}: its config is for mixed heads, load this model by "
            "mixhead_plugin.hf.load, or make a new one from a plain config and call hf.mix"
        )


@torch.no_grad()
def _start_what_was_not_loaded(model: Any, *args: Any, **kwargs: Any) -> None:
    """Give the tensors of parts that `from_pretrained` has not loaded what they start as."""
    with forked_rng():
        for module in model.modules():
            if not isinstance(module, Part):
                continue
            tensors = module.state_dict(keep_vars=True)
            loaded = {}
            for name, tensor in tensors.items():
                if getattr(tensor, "_is_hf_initialized", False):  # so transformers marks them
                    loaded[name] = tensor.clone()
            if len(loaded) == len(tensors):
                continue

            part: Any = module
            part.reset_parameters()
            for name, tensor in loaded.items():
                tensors[name].copy_(tensor)
            # As in `place_parts`: else parts that start at random would all have the same numbers.
            torch.rand((), device="cpu")


def _refuse_plain_config_for_mixed_folder(
    cls: Any,
    pretrained_model_name_or_path: Any,
    *args: Any,
    config: Any = None,
    **settings: Any,
) -> None:
    """Refuse another config than that of a folder with mixed heads.

    Tensors that it has no place for would be left out, and a variant without tensors, such as
    another normalizer, would leave no trace. The arguments are those of `from_pretrained`.
    """
    folder = pretrained_model_name_or_path
    if config is None or hasattr(config, MIXHEAD) or hasattr(cls, LOADER):
        return  # the config that tells of mixed heads is refused where a model is made from it
    file = file_of(folder, CONFIG_NAME, settings, local_files_only=True)
    if file is None:  # never loaded before, and `from_pretrained` need not load it now
        file = file_of(folder, CONFIG_NAME, settings)
    if file is not None and MIXHEAD in json.loads(Path(file).read_text(encoding="utf-8")):
        raise ValueError(
            f"{cls.__name__}: {folder} has mixed heads, but the given config has not; load this "
            "model by mixhead_plugin.hf.load"
        )


def file_of(folder: Any, name: str, settings: dict[str, Any], **more: Any) -> str | None:
    """Return the path of a file that `from_pretrained` would read; None if there is none.

    Args:
        folder: a folder, or a name on the hub; None for none
        name: the name of the file
        settings: the arguments of `from_pretrained`
        more: those that say something else here
    """
    own = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
    where = {key: settings[key] for key in own if key in settings}
    for problem in ("missing_entries", "gated_repo", "connection_errors"):
        where[f"_raise_exceptions_for_{problem}"] = False
    return None if folder is None else cached_file(folder, name, **{**where, **more})


def removed_heads(model: Any) -> dict[int, list[int]]:
    """Return the heads of a model that `prune` has removed, by layer, as numbered at first."""
    gone = {}
    for layer, attention in enumerate(find_attentions(model)):
        mixed = mixed_heads_of(attention.module)
        if mixed is not None and mixed.removed():
            gone[layer] = mixed.removed()
    return gone


def _refuse_config_without_entry(model: Any, *args: Any, **kwargs: Any) -> None:
    inside = [name for name, module in model.named_modules() if MIXHEAD in vars(module)]
    if inside and not hasattr(model.config, MIXHEAD):
        raise ValueError(
            f"{type(model).__name__}: is mixed inside alone ({inside[0]}), so its config has no "
            "entry to load it by; "
            "mix the outermost model"
        )
    # The heads that are gone are in the config of the model that was pruned, by its layers. A part
    # of it may have another config, or the same but other layers: with two layers in its encoder,
    # layer 3 of BART is layer 1 of the decoder.
    is_pruned = any(vars(model.get_submodule(name))[MIXHEAD].removed() for name in inside)
    gone = removed_heads(model) if is_pruned else {}
    told = getattr(model.config, PRUNED, {})
    # In a config that was read from a file, the layers are texts.
    if gone != {int(layer): heads for layer, heads in told.items()}:
        raise ValueError(
            f"{type(model).__name__}: is a part of a pruned model, and its own config does not "
            "tell which heads of its layers are gone; the outermost model must be saved"
        )


def _refuse_parts_of_other_tensors(model: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse to save a whole model in which parts have other tensors than `hf.load` looks for.

    PEFT's modules_to_save, parametrizations and torch's pruning give tensors other names.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        return  # transformers saves the adapter alone
    for name, module in model.named_modules():
        if MIXHEAD not in vars(module):
            continue
        for option, kind in vars(module)[MIXHEAD].variant.part_kinds().items():
            part = getattr(module, option)
            if part is None:
                continue
            if "_adapters" in vars(part):
                raise ValueError(
                    f"{type(model).__name__}: {name}.{option} is in modules_to_save of PEFT still, "
                    "which hf.load could not read; the adapter must be saved, or merged by a kind "
                    "that merges modules_to_save, as LoRA"
                )
            others = sorted(part.state_dict().keys() - kind.parameters.keys())
            if others:
                raise ValueError(
                    f"{type(model).__name__}: {name}.{option} has a tensor {others[0]}, as of a "
                    "parametrization or of pruning, which hf.load could not read; that must be "
                    "removed before the model is saved"
                )


def _write_names_of_mixed(
    model: Any, destination: Any, prefix: str, *args: Any, **kwargs: Any
) -> None:
    """Let the metadata of a state dict name the attentions of a model that are mixed.

    Their own entries would be read by nobody where an attention is plain.
    """
    names = [name for name, module in model.named_modules() if MIXHEAD in vars(module)]
    if names:
        record.metadata_of(destination, prefix)[MIXED_INSIDE] = names


def _refuse_mixed_state_for_plain_model(
    model: Any, state_dict: Any, prefix: str, local_metadata: Any, *args: Any, **kwargs: Any
) -> None:
    """Refuse the state dict of a mixed model in one that is plain there.

    A variant may have no tensors that would be left over. torch asks each model of `transformers`,
    also inside another module.
    """
    modules = dict(model.named_modules())
    for name in local_metadata.get(MIXED_INSIDE, ()):
        if name in modules and MIXHEAD not in vars(modules[name]):
            raise RuntimeError(
                f"{type(model).__name__}: the state dict has mixed heads in {name}, the model has "
                "not; call hf.mix in the same way before"
            )


def _refuse_checkpoint_of_another_variant(
    trainer: Any, resume_from_checkpoint: Any, *args: Any, **kwargs: Any
) -> None:
    """Refuse the checkpoint of a model that was mixed in another way than that of a Trainer.

    It has the tensors in a file of safetensors, which does not tell a variant, and the config.
    """
    file = Path(resume_from_checkpoint) / CONFIG_NAME
    if not file.exists():
        return  # as of an adapter, which tells of its base itself
    saved = json.loads(file.read_text(encoding="utf-8")).get(MIXHEAD)
    if saved is None:
        return  # of a plain model, which a mixed one can go on from
    own = getattr(getattr(trainer.model, "config", None), MIXHEAD, {})
    problem = record.difference(_entry(saved), _entry(own), what="model")
    if problem:
        raise ValueError(
            f"{resume_from_checkpoint}: {problem}; the model must be mixed in the same way"
        )


def _entry(fields: dict[str, Any]) -> dict[str, Any]:
    return record.describe(Variant.of(fields))
