"""Mixed heads in models of Hugging Face's `transformers`, from 5.3 on; docs/huggingface.md has examples."""

import copy
import functools
from os import PathLike
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from mixhead_plugin.modules.parts import PARTS, build_parts, sizes_of
from mixhead_plugin.nn import complete
from mixhead_plugin.ops import attention
from mixhead_plugin.ops.masks import by_head

NAME = "mixhead"  # of the implementation, of the options in a config, and of what `mix` notes in an attention
# By these entries of config.json `from_pretrained` refuses a mixed model: by the first where this module is not
# imported; by the second, which no implementation of experts is named, everywhere and for any attention asked for.
REFUSED = {"attn_implementation": NAME, "experts_implementation": "mixed heads, load by mixhead_plugin.hf.load"}


class Layout(NamedTuple):
    """The attributes of an attention of `transformers`."""

    queries: tuple[str, ...]  # the first one that is there projects to the queries of all heads, before any rotation
    heads: str  # of the attention or of its config
    head_dim: str


_LAYOUTS = {
    "BertSelf BertCross RobertaSelf RobertaCross XLMRobertaSelf XLMRobertaCross ElectraSelf ElectraCross": Layout(
        ("query",), "num_attention_heads", "attention_head_size"
    ),
    "GPT2": Layout(("q_attn", "c_attn"), "num_heads", "head_dim"),
    "Llama Mistral Qwen2": Layout(("q_proj",), "num_attention_heads", "head_dim"),
    "Marian Bart MBart": Layout(("q_proj",), "num_heads", "head_dim"),
    "T5 MT5": Layout(("q",), "n_heads", "key_value_proj_dim"),
}
LAYOUTS = {f"{name}Attention": layout for names, layout in _LAYOUTS.items() for name in names.split()}


def mix(
    model: PreTrainedModel, head_mixing: str = "position-wise", *, impl: str = "auto", **variant: str
) -> PreTrainedModel:
    """Mix the heads of every attention of `model`, in place, and return it; a trained mixing starts as the identity.

    Args:
        model: any model whose attentions are in LAYOUTS; it gets a config of its own, with the variant
        head_mixing, variant: keywords of `nn.VARIANT`; another normalizer than softmax changes the outputs at once
        impl: the implementation of `ops.attention`

    Raises:
        ValueError: an unknown value, a model without such attentions, or a model that is mixed already
    """
    variant = complete({**variant, "head_mixing": head_mixing}, impl)
    if variant["relative_position"] != "none":
        raise ValueError("relative_position: must be left out, the model has positions of its own")
    found = [module for module in model.modules() if type(module).__name__ in LAYOUTS]
    if not found:
        raise ValueError(f"{type(model).__name__}: has none of the attentions {', '.join(LAYOUTS)}")
    if any(hasattr(module, NAME) for module in found):
        raise ValueError(f"{type(model).__name__}: is mixed already")
    notes = {}  # all are made before any change, because one may be refused
    for module in found:
        layout = LAYOUTS[type(module).__name__]
        queries = next(name for name in layout.queries if hasattr(module, name))
        projection = getattr(module, queries)
        heads = getattr(module, layout.heads, None) or getattr(module.config, layout.heads)
        embed_dim = getattr(projection, "in_features", projection.weight.size(0))  # GPT-2's has a transposed weight
        sizes = sizes_of(head_mixing, heads, getattr(module, layout.head_dim), embed_dim)
        parts = build_parts(variant, variant["normalizer"], sizes)
        notes[module] = SimpleNamespace(variant=variant, impl=impl, sizes=sizes, queries=queries, parts=parts)
    for module, mixed in notes.items():
        projection = getattr(module, mixed.queries)
        for name, part in vars(mixed).pop("parts").items():
            setattr(module, name, None if part is None else part.to(projection.weight).train(module.training))
        hooks = module.register_forward_pre_hook(_listen), projection.register_forward_hook(_keep)
        mixed.hooks = (*hooks, module.register_forward_hook(_check, always_call=True))
        mixed.former = module.config._attn_implementation
        setattr(module, NAME, mixed)
    memo: dict[int, Any] = {}  # modules that share a config share its copy; `set_attn_implementation` would miss some
    for module in (module for module in model.modules() if hasattr(module, "config")):
        module.config = copy.deepcopy(module.config, memo)
        module.config._attn_implementation = NAME
        vars(module.config).update(REFUSED, **{NAME: variant})
    return model


def load(
    folder: str | PathLike[str], cls: Optional[type[PreTrainedModel]] = None, *, impl: str = "auto", **settings: Any
) -> Any:
    """Load a mixed model that `save_pretrained` wrote; raise ValueError if it has no mixing or lacks a part of it.

    Args:
        folder, settings: the arguments of `from_pretrained`; `unmix` goes to the `attn_implementation`
        cls: the class of the model; by default the one that was saved
        impl: the implementation of `ops.attention`
    """
    saved, _ = transformers.PreTrainedConfig.get_config_dict(folder, **settings)
    if NAME not in saved:
        raise ValueError(f"{folder}: its config has no entry {NAME}; load it by from_pretrained")
    cls = cls or getattr(transformers, saved["architectures"][0])

    @functools.wraps(cls, updated=())  # transformers chooses the loss by the name of the class
    class MixedModel(cls):
        def __init__(self, config: Any, *args: Any, **kwargs: Any):
            super().__init__(config, *args, **kwargs)
            mix(self, **saved[NAME], impl=impl)

    wants_info, settings = settings.pop("output_loading_info", False), dict.fromkeys(REFUSED) | settings
    model, info = MixedModel.from_pretrained(folder, output_loading_info=True, **settings)
    if missing := sorted(name for name in info["missing_keys"] if any(f".{part}." in name for part in PARTS)):
        raise ValueError(f"{folder}: has no tensor for {missing[0]}; {len(missing)} are missing")
    for sink in (buffer for name, buffer in model.named_buffers() if name.endswith(".attention_sink.weight")):
        sink.zero_()  # no file has the constant ones
    model.__class__ = cls
    return (model, info) if wants_info else model


def unmix(model: PreTrainedModel, attn_implementation: Optional[str] = None) -> PreTrainedModel:
    """Remove the mixing of `model`, in place, and return it as it was; raise ValueError if its outputs would change."""
    found = [module for module in model.modules() if hasattr(module, NAME)]
    if not found:
        raise ValueError(f"{type(model).__name__}: has no mixing")
    for module in found:
        for name, part in ((name, getattr(module, name)) for name in PARTS):
            start, state = getattr(part, "identity", dict)(), {} if part is None else part.state_dict()
            same = bool(start) and all(torch.equal(state[key].cpu().float(), start[key]) for key in start)
            if not (part is None or same) or getattr(module, NAME).variant["normalizer"] != "softmax":
                raise ValueError(f"{type(model).__name__}: without {name} its outputs would change")
    model.set_attn_implementation(attn_implementation or getattr(found[0], NAME).former)
    for module in found:
        for hook in getattr(module, NAME).hooks:
            hook.remove()
        for name in (NAME, *PARTS):
            delattr(module, name)
    for config in (module.config for module in model.modules() if hasattr(module, "config")):
        config._attn_implementation = model.config._attn_implementation
        for name in (NAME, *REFUSED):
            vars(config).pop(name, None)
    return model


def view(
    model: PreTrainedModel, tokenizer: Any, text: Any, file: str | PathLike[str], target: Optional[str] = None
) -> None:
    """Write one HTML file that shows the heads of `model`, mixed or not, on a text; see `analysis.view_hf.view`."""
    from mixhead_plugin.analysis import view_hf  # it imports this module

    view_hf.view(model, tokenizer, text, file, target)


def _listen(module: nn.Module, args: tuple[Any, ...]) -> None:
    getattr(module, getattr(module, NAME).queries).kept = None


def _keep(projection: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
    """Keep what an attention computes its queries from, and the queries; keep nothing of a call outside it."""
    if "kept" in vars(projection):
        projection.kept = (args[0], output)


def _check(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Refuse what another implementation computed: it left what was kept. After an exception there is no output."""
    if vars(getattr(module, getattr(module, NAME).queries)).pop("kept", module) is not module and output is not None:
        raise RuntimeError(f"attn_implementation {module.config._attn_implementation}: lost the mixing, must be {NAME}")


def mixed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor],
    scaling: Optional[float] = None,
    dropout: float = 0.0,
    is_causal: Optional[bool] = None,
    position_bias: Optional[Tensor] = None,
    output_attentions: bool = False,
    **others: Any,
) -> tuple[Tensor, Optional[Tensor]]:
    """Compute the attention of a module that `mix` has seen, by the contract of the `AttentionInterface`.

    Args:
        query, key, value: [B, H, Nq, D], and twice [B, G, Nk, D] where G divides H
        attention_mask: broadcastable to [B, H, Nq, Nk]; bool, True is visible; or floats that are added to the scores,
            the least number of their type hides; None hides the future where the module is causal
        position_bias: [1, H, Nq, Nk], added to the scores (T5)

    Returns:
        output [B, Nq, H', Dv] and, with `output_attentions`, the mixed weights [B, H', Nq, Nk]
    """
    mixed = getattr(module, NAME, None)
    kept = None if mixed is None else vars(getattr(module, mixed.queries)).pop("kept", None)
    if kept is None:
        problem = "has no mixing, load it by mixhead_plugin.hf.load" if mixed is None else "mix after other changes"
        raise RuntimeError(f"{type(module).__name__}: {problem}")
    if used := [name for name in ("softcap", "s_aux", "cache") if others.get(name) is not None]:  # not served
        raise ValueError(f"{type(module).__name__}: {used[0]} cannot be used with mixed heads")
    (batch, heads, n_queries, head_dim), causal, padding = query.shape, False, None
    x, projected = kept  # [B, Nq, C] and [B, Nq, H * D or more], before any rotation
    projected = projected[..., : heads * head_dim].unflatten(2, (heads, head_dim)).transpose(1, 2)
    if attention_mask is None:
        causal = n_queries > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    elif attention_mask.is_floating_point():
        attention_mask = attention_mask.masked_fill(attention_mask <= torch.finfo(attention_mask.dtype).min, -torch.inf)
    elif attention_mask.shape[1:3] == (1, 1):  # for all heads and queries
        padding, attention_mask = ~attention_mask[:, 0, 0].expand(batch, -1), None
    else:
        attention_mask = by_head(~attention_mask, heads, query.dtype)
    if position_bias is not None:
        attention_mask = position_bias if attention_mask is None else attention_mask + position_bias
    if (groups := heads // key.size(1)) > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if (group := heads // mixed.sizes.mixed_heads) > 1:  # neighbours are the values of one mixed head
        value = value.unflatten(1, (-1, group)).transpose(2, 3).flatten(3)  # [B, H', Nk, Dv]
    mixings = (m if m is None else m(projected, x) for m in (module.head_mixing, module.score_mixing))
    result = attention(
        query, key, value, normalizer=mixed.variant["normalizer"], causal=causal, attn_mask=attention_mask,
        key_padding_mask=padding, **dict(zip(("mixing", "score_mixing"), mixings)), dropout_p=dropout, scale=scaling,
        sink=None if module.attention_sink is None else module.attention_sink(), impl=mixed.impl,
        need_weights=output_attentions,
    )  # fmt: skip
    out, weights = result if output_attentions else (result, None)
    out = out.transpose(1, 2).contiguous()  # [B, Nq, H', Dv]
    return out if module.attention_gate is None else module.attention_gate(out, x), weights


def mixed_mask(**settings: Any) -> Optional[Tensor]:
    """Return a bool mask [B, 1, Nq or 1, Nk], True is visible; None where `mixed_attention` needs none."""
    if settings["mask_function"] is bidirectional_mask_function:
        settings["q_length"] = 1  # all queries see the same keys
    elif settings["q_length"] not in (1, settings["kv_length"]):
        settings["allow_is_causal_skip"] = False  # the rest of a static cache is hidden too
    return sdpa_mask(**settings)


AttentionInterface.register(NAME, mixed_attention)
AttentionMaskInterface.register(NAME, mixed_mask)
