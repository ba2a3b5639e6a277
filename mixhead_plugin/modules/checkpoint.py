"""Refuses a checkpoint that was trained with other attention flags, in words, before torch lists tensors."""

from typing import Any, Dict, Optional, Set

from torch import Tensor, nn

from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.options import OptionError, option_name


def check_checkpoint(model: nn.Module, state_dict: Dict[str, Tensor]) -> None:
    """Compare the attentions of `model` with what `state_dict` says of its own.

    A stock checkpoint says nothing and passes: mixing that it lacks starts as the identity.

    Raises:
        OptionError: one line that names the attention, and the flag that would fit
    """
    metadata = getattr(state_dict, "_metadata", {})
    modules = dict(model.named_modules())
    entries: Dict[str, Set[str]] = {}
    for key in state_dict:
        for part in (".q_proj.", ".head_mixing."):
            name, found, rest = key.partition(part)
            if found:
                entries.setdefault(name, set()).add(part.strip(".") + "." + rest)

    for name, names in entries.items():
        module = modules.get(name)
        if module is None:  # a layer that this model does not have: fairseq's business
            continue
        trained = _trained_with(names, metadata.get(name, {}))
        if not isinstance(module, MixheadAttention):
            if trained.get("head_mixing", "none") != "none":
                raise OptionError(
                    f"checkpoint of another family: its {name} has --head-mixing {trained['head_mixing']}, but this "
                    "model's --attention-scope leaves that attention as it is"
                )
            continue
        _compare(name, trained, module.signature())
        _compare_size(name, state_dict.get(f"{name}.q_proj.weight"), module)


def _trained_with(names: Set[str], recorded: Dict[str, Any]) -> Dict[str, Any]:
    """The checkpoint's side of `MixheadAttention.signature`: its record, else what the names of its tensors tell."""
    trained = {
        k: v for k, v in recorded.items() if k in ("attention_normalizer", "head_mixing", "attention_heads", "head_dim")
    }
    if "head_mixing" not in trained:
        if "head_mixing.query_weight" in names:
            trained["head_mixing"] = "position-wise"
        elif "head_mixing.weight" in names:
            trained["head_mixing"] = "position-independent"
    return trained


def _compare(name: str, trained: Dict[str, Any], wanted: Dict[str, Any]) -> None:
    for option, value in trained.items():
        if value == wanted[option] or (option == "head_mixing" and value == "none"):
            continue
        flag = option_name(option)
        if option == "attention_heads":
            flag = f"--{name.split('.')[0]}-attention-heads"
        raise OptionError(
            f"checkpoint of another family: its {name} was trained with {flag} {value}, this model has "
            f"{wanted[option]}; use {flag} {value}"
        )


def _compare_size(name: str, q_proj: Optional[Tensor], module: MixheadAttention) -> None:
    """For a checkpoint without a record, stock ones for instance."""
    inner_dim = module.num_heads * module.head_dim
    if q_proj is not None and q_proj.shape[0] != inner_dim:
        hint = ""
        if q_proj.shape[0] % module.num_heads == 0:
            hint = f"; use --head-dim {q_proj.shape[0] // module.num_heads}"
        raise OptionError(
            f"checkpoint of another family: its {name} projects to {q_proj.shape[0]} features, this model's "
            f"{module.num_heads} heads of --head-dim {module.head_dim} to {inner_dim}{hint}"
        )
