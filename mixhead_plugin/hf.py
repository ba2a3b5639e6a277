"""Mixed heads in models of Hugging Face's `transformers`, from 5.3 on; docs/huggingface.md has examples."""

import copy
import functools
from os import PathLike
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from mixhead_plugin.ops.api import attend_with_weights
from mixhead_plugin.ops.masks import by_head
from mixhead_plugin.parts import PARTS, Assembly, complete, sizes_of

NAME = "mixhead"  # of the implementation, of the options in a config, and of what `mix` notes in an attention
# These entries of config.json make `from_pretrained` refuse a mixed model. The first one does where this module is not
# imported. Only the second one does where `from_pretrained` is told to use another attention: it is no valid name.
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
    all_heads = [MixedHeads(module, variant, impl) for module in found]  # before any change: one may be refused
    for module, heads in zip(found, all_heads):
        heads.attach(module)
    memo: dict[int, Any] = {}  # modules that share a config share its copy; `set_attn_implementation` would miss some
    for module in (module for module in model.modules() if hasattr(module, "config")):
        config: Any = copy.deepcopy(module.config, memo)
        config._attn_implementation = NAME
        vars(config).update(REFUSED, **{NAME: variant})
        module.config = config
    return model


class MixedHeads(Assembly):
    """The parts that `mix` adds to one attention, and what the attention computes its queries from during a call."""

    def __init__(self, module: nn.Module, variant: dict[str, str], impl: str):
        super().__init__()
        layout = LAYOUTS[type(module).__name__]
        projection: Any = module.get_submodule(next(name for name in layout.queries if hasattr(module, name)))
        config: Any = module.config
        heads = getattr(module, layout.heads, None) or getattr(config, layout.heads)
        embed_dim = getattr(projection, "in_features", projection.weight.size(0))  # GPT-2's has a transposed weight
        self.variant, self.impl, self.former = variant, impl, config._attn_implementation
        self.sizes = sizes_of(variant, heads, getattr(module, layout.head_dim), embed_dim)
        self.add_parts(variant, self.sizes)
        self.to(projection.weight).train(module.training)
        self.projection = (projection,)  # in a tuple, because it is a child of the attention alone
        self.hooks: tuple[RemovableHandle, ...] = ()
        self.running = False
        self.kept: tuple[Tensor, Tensor] | None = None

    def attach(self, module: nn.Module) -> None:
        """Add the parts to an attention, under the names that its files have, and follow its calls."""
        vars(module)[NAME] = self  # no child: each part would have two names
        for option in PARTS:
            setattr(module, option, getattr(self, option))
        self.hooks = (
            module.register_forward_pre_hook(self._begin),
            self.projection[0].register_forward_hook(self._keep),
            module.register_forward_hook(self._end, always_call=True),
        )

    def detach(self, module: nn.Module) -> None:
        for hook in self.hooks:
            hook.remove()
        for name in (NAME, *PARTS):
            delattr(module, name)

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.running = True

    def _keep(self, projection: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if self.running:  # someone else may call the projection, too
            self.kept = args[0], output

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Refuse what another implementation computed: it took nothing. After an exception there is no output."""
        lost = self.running and output is not None
        self.take()
        if lost:
            config: Any = module.config
            raise RuntimeError(f"attn_implementation {config._attn_implementation}: lost the mixing, must be {NAME}")

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Return the input [B, Nq, C] and the output of the query projection in this call, and keep it no longer."""
        kept, self.kept, self.running = self.kept, None, False
        return kept


def load(
    folder: str | PathLike[str], cls: type[PreTrainedModel] | None = None, *, impl: str = "auto", **settings: Any
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
    base: Any = cls or getattr(transformers, saved["architectures"][0])

    @functools.wraps(base, updated=())  # transformers chooses the loss by the name of the class
    class MixedModel(base):
        def __init__(self, config: Any, *args: Any, **kwargs: Any):
            super().__init__(config, *args, **kwargs)
            mix(self, **saved[NAME], impl=impl)

        def __reduce_ex__(self, protocol: Any) -> Any:  # copies, and what pickle writes, are of the saved class
            make, _, *state = super().__reduce_ex__(protocol)
            return make, (base,), *state

    wants_info, settings = settings.pop("output_loading_info", False), dict.fromkeys(REFUSED) | settings
    model, info = MixedModel.from_pretrained(folder, output_loading_info=True, **settings)
    if missing := sorted(name for name in info["missing_keys"] if any(f".{part}." in name for part in PARTS)):
        raise ValueError(f"{folder}: has no tensor for {missing[0]}; {len(missing)} are missing")
    for sink in (buffer for name, buffer in model.named_buffers() if name.endswith(".attention_sink.weight")):
        sink.zero_()  # no file has the constant ones
    return (model, info) if wants_info else model


def unmix(model: PreTrainedModel, attn_implementation: str | None = None) -> PreTrainedModel:
    """Remove the mixing of `model`, in place, and return it as it was; raise ValueError if its outputs would change."""
    found = [module for module in model.modules() if hasattr(module, NAME)]
    if not found:
        raise ValueError(f"{type(model).__name__}: has no mixing")
    for module in found:
        for name, part in ((name, getattr(module, name)) for name in PARTS):
            start: dict[str, Tensor] = getattr(part, "identity", dict)()
            state = {} if part is None else part.state_dict()
            same = bool(start) and all(torch.equal(state[key].cpu().float(), start[key]) for key in start)
            if not (part is None or same) or getattr(module, NAME).variant["normalizer"] != "softmax":
                raise ValueError(f"{type(model).__name__}: without {name} its outputs would change")
    model.set_attn_implementation(attn_implementation or getattr(found[0], NAME).former)
    for module in found:
        getattr(module, NAME).detach(module)
    configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    for config in configs:
        config._attn_implementation = model.config._attn_implementation
        for name in (NAME, *REFUSED):
            vars(config).pop(name, None)
    return model


def view(
    model: PreTrainedModel, tokenizer: Any, text: Any, file: str | PathLike[str], target: str | None = None
) -> None:
    """Write one HTML file that shows the heads of `model`, mixed or not, on a text; see `analysis.view_hf.view`."""
    from mixhead_plugin.analysis import view_hf  # it imports this module

    view_hf.view(model, tokenizer, text, file, target)


def mixed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a module that `mix` has seen, by the contract of the `AttentionInterface`.

    Args:
        query, key, value: [B, H, Nq, D], and twice [B, G, Nk, D] where G divides H
        attention_mask: broadcastable to [B, H, Nq, Nk]; bool, True is visible; or floats that are added to the scores,
            the least number of their type hides; None hides the future where the module is causal
        position_bias: [1, H, Nq, Nk], added to the scores (T5)

    Returns:
        output [B, Nq, H', Dv] and, with `output_attentions`, the mixed weights [B, H', Nq, Nk]
    """
    mixed: MixedHeads | None = getattr(module, NAME, None)
    kept = None if mixed is None else mixed.take()
    if mixed is None or kept is None:
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
    inputs = mixed.inputs_of(
        query, key, value, projected, x, attn_mask=attention_mask, key_padding_mask=padding, causal=causal,
        dropout_p=dropout, scale=head_dim**-0.5 if scaling is None else scaling,
    )  # fmt: skip
    out, weights = attend_with_weights(inputs, mixed.impl, output_attentions)
    return mixed.gated(out.transpose(1, 2).contiguous(), x), weights  # [B, Nq, H', Dv]


def mixed_mask(**settings: Any) -> Tensor | None:
    """Return a bool mask [B, 1, Nq or 1, Nk], True is visible; None where `mixed_attention` needs none."""
    if settings["mask_function"] is bidirectional_mask_function:
        settings["q_length"] = 1  # all queries see the same keys
    elif settings["q_length"] not in (1, settings["kv_length"]):
        settings["allow_is_causal_skip"] = False  # the rest of a static cache is hidden too
    return sdpa_mask(**settings)


AttentionInterface.register(NAME, mixed_attention)
AttentionMaskInterface.register(NAME, mixed_mask)
