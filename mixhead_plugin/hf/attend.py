"""The attention function and the masks of mixed models, as `transformers` calls them."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from mixhead_plugin.hf.layouts import Site
from mixhead_plugin.ops.api import attend_with_weights
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.masks import by_head
from mixhead_plugin.parts import PARTS, Assembly, sizes_of

FEATURES = {"queries": "query", "keys": "key", "values": "value"}  # the matrix of a FeatureMixing for each projection
NAME = "mixhead"  # of the implementation, of the options in a config, and of what `mix` notes in an attention


class MixedHeads(Assembly):
    """The parts that `mix` adds to one attention, and what the attention computes its queries from during a call."""

    def __init__(self, site: Site, model: nn.Module, variant: dict[str, str], impl: str):
        super().__init__()
        projection: Any = model.get_submodule(site.path("queries"))
        embed_dim = getattr(projection, "in_features", projection.weight.size(0))  # GPT-2's has a transposed weight
        self.variant, self.impl = variant, impl
        self.config = site.module.config  # the model's
        self.former = self.config._attn_implementation
        sizes = sizes_of(variant, site.heads, site.head_dim, embed_dim)
        self.sizes = sizes._replace(key_heads=site.heads // site.group(model))
        self.add_parts(variant, self.sizes)
        self.to(projection.weight).train(site.module.training)
        # The heads that pruning left, as numbered at first; their number then; the zeros in place of cut values.
        self.kept = {"source": list(range(self.sizes.num_heads)), "mixed": list(range(self.sizes.mixed_heads))}
        self.outputs, self.missing_values = self.sizes.mixed_heads, 0
        self.names = {kind: site.path(kind).rpartition(".")[2] for kind in FEATURES}
        self.followed: dict[str, tuple[nn.Module, RemovableHandle]] = {}
        self.hooks: tuple[RemovableHandle, ...] = ()
        self.running = self.wants_weights = False
        self.taken: tuple[Tensor, Tensor] | None = None
        self.seen: list[AttentionInputs] | None = None  # a list while someone wants to see the calls

    def attach(self, module: nn.Module, models: Iterable[nn.Module]) -> None:
        """Add the parts to an attention, under the names that its files have, and follow its calls and its models'."""
        vars(module)[NAME] = self  # no child: each part would have two names
        for option in PARTS:
            setattr(module, option, getattr(self, option))
        self.hooks = (
            *(model.register_forward_pre_hook(self._ask, with_kwargs=True) for model in models),
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end, always_call=True),
        )

    def detach(self, module: nn.Module) -> None:
        module.config = self.config
        for hook in (*self.hooks, *(hook for _, hook in self.followed.values())):
            hook.remove()
        for name in (NAME, *PARTS):
            delattr(module, name)

    def _ask(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note whether a call of the model wants weights; GPT-2 does not tell its attentions."""
        self.wants_weights = bool(kwargs.get("output_attentions"))

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Take what the attention has now: an adapter may have replaced projections and parts."""
        if getattr(module, "_is_replica", False):  # its threads would share what a call keeps
            raise ValueError("a mixed model in torch's DataParallel: start a process for each GPU, as torchrun does")
        self.running = True
        for option in PARTS:
            if getattr(self, option) is not getattr(module, option):
                setattr(self, option, getattr(module, option))
        hooks: dict[str, tuple[str, Any]] = {}  # in this order
        if self.mixed_features is not None:
            hooks |= {f"mix {name}": (name, partial(self._mix, name)) for name in self.names.values()}
        hooks["keep"] = self.names["queries"], self._keep
        if self.missing_values:
            hooks["complete"] = self.names["values"], self._complete
        for purpose, (name, hook) in hooks.items():
            projection = module.get_submodule(name)
            former, handle = self.followed.get(purpose, (None, None))
            if projection is former:
                continue
            if handle is not None:
                handle.remove()
            self.followed[purpose] = projection, projection.register_forward_hook(hook)

    def slices(self, projection: str) -> dict[str, slice]:
        """Return where queries, keys and values are among the outputs of a projection, which GPT-2 has for several."""
        kinds, size = [kind for kind, name in self.names.items() if name == projection], self.sizes.head_dim
        starts = [self.sizes.num_heads * size * i for i in range(len(kinds))]
        return {kind: slice(start, end) for kind, start, end in zip(kinds, starts, [*starts[1:], None])}

    def _mix(self, name: str, projection: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        part, slices = self.feature_mixing, self.slices(name)
        mixed = [part(output[..., where], FEATURES[kind]) for kind, where in slices.items()]
        return torch.cat(mixed, -1)

    def _keep(self, projection: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if self.running:  # someone else may call the projection, too
            self.taken = args[0], output

    def _complete(self, projection: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        return F.pad(output, (0, self.missing_values))  # some attentions want as many heads of values as of keys

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Refuse what another implementation computed: it took nothing. After an exception there is no output."""
        lost = self.running and output is not None
        self.take()
        if lost:
            what = f"{type(module).__name__}: lost the mixing"
            raise RuntimeError(f"{what}, its attention must go through the AttentionInterface")

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Return the input [B, Nq, C] and the output of the query projection in this call, and keep it no longer."""
        taken, self.taken, self.running = self.taken, None, False
        return taken


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
        output [B, Nq, H', Dv] and, with `output_attentions` or in a model whose `attn_implementation` is eager, the
        mixed weights [B, H', Nq, Nk]
    """
    mixed: MixedHeads | None = getattr(module, NAME, None)
    taken = None if mixed is None else mixed.take()
    if mixed is None or taken is None:
        problem = "has no mixing, load it by mixhead_plugin.hf.load" if mixed is None else "mix after other changes"
        raise RuntimeError(f"{type(module).__name__}: {problem}")
    if (chosen := mixed.config._attn_implementation) not in (NAME, "eager"):
        raise RuntimeError(f"attn_implementation {chosen}: lost the mixing, must be {NAME} or eager")
    if used := [name for name in ("softcap", "s_aux", "cache") if others.get(name) is not None]:  # not served
        raise ValueError(f"{type(module).__name__}: {used[0]} cannot be used with mixed heads")
    (batch, heads, n_queries, head_dim), causal, padding = query.shape, False, None
    x, projected = taken  # [B, Nq, C] and [B, Nq, H * D or more], before any rotation
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
        if position_bias.size(1) != len(mixed.kept["source"]):  # T5's layers share those of all heads
            position_bias = position_bias[:, mixed.kept["source"]]
        attention_mask = position_bias if attention_mask is None else attention_mask + position_bias
    if (groups := heads // key.size(1)) > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if (group := mixed.parts()["head_mixing"].group) > 1:  # neighbours are the values of one mixed head
        value = value.unflatten(1, (-1, group)).transpose(2, 3).flatten(3)  # [B, H', Nk, Dv]
    value = value[:, : mixed.sizes.mixed_heads]
    inputs = mixed.inputs_of(
        query, key, value, projected, x, attn_mask=attention_mask, key_padding_mask=padding, causal=causal,
        dropout_p=dropout, scale=head_dim**-0.5 if scaling is None else scaling,
    )  # fmt: skip
    if mixed.seen is not None:
        mixed.seen.append(inputs)
    need_weights = output_attentions or mixed.wants_weights or mixed.config.output_attentions or chosen == "eager"
    out, weights = attend_with_weights(inputs, mixed.impl, need_weights)
    return mixed.gated(out.transpose(1, 2).contiguous(), x), weights  # [B, Nq, H', Dv]


def mixed_mask(**settings: Any) -> Tensor | None:
    """Return a bool mask [B, 1, Nq or 1, Nk], True is visible; None where `mixed_attention` needs none."""
    positions = settings.get("cache_position")  # of the queries, in transformers 5.3; in later ones, their number
    n_queries = settings["q_length"] if positions is None else len(positions)
    if settings["mask_function"] is bidirectional_mask_function:  # all queries see the same keys
        settings |= {"q_length": 1} if positions is None else {"cache_position": positions[:1]}
    elif n_queries not in (1, settings["kv_length"]):
        settings["allow_is_causal_skip"] = False  # the rest of a static cache is hidden too
    return sdpa_mask(**settings)


AttentionInterface.register(NAME, mixed_attention)
AttentionMaskInterface.register(NAME, mixed_mask)
