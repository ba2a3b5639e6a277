"""The attention function and the masks of mixed models, as `transformers` calls them."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from mixhead_plugin.hf.layouts import MIXHEAD, Site
from mixhead_plugin.ops.masks import by_head
from mixhead_plugin.parts import PARTS, Assembly, Variant
from mixhead_plugin.parts.hooks import Hooked

# the matrix of a FeatureMixing for each projection
FEATURES = {"queries": "query", "keys": "key", "values": "value"}
SPLIT = "heads that are split between processes, as by tp_plan, cannot be mixed"


class Call:
    """The state of one call of an attention: what its hooks have seen so far.

    Args:
        heads: of the attention
        projections: the modules that give its queries, keys and values in this call
    """

    def __init__(self, heads: "MixedHeads", projections: dict[str, nn.Module]):
        self.heads = heads
        self.projections = projections
        self.x: Tensor | None = None  # the input of the queries [B, Nq, C]
        # all that the projection of the queries gave [B, Nq, H * D or more]
        self.projected: Tensor | None = None
        self.attended = False


class Thread:
    """The call that runs in this thread. One is enough, because no attention contains another."""

    def __init__(self) -> None:
        self.call: Call | None = None
        self.wants_weights = False


class _Threads(threading.local):
    # torch.compile loses what is set on the local itself where a graph breaks, but not what is set
    # on an object in it.
    def __init__(self) -> None:
        self.own = Thread()


THREADS = _Threads()


def note_wishes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note whether a call of the model wants weights; GPT-2 does not tell its attentions."""
    THREADS.own.wants_weights = bool(kwargs.get("output_attentions"))


class MixedHeads(Hooked):
    """What `mix` adds to one attention: hooks, numbers and parts.

    The parts become children of the attention.

    The hook of a projection has to be the last one, because mixings read what other hooks have made
    of the queries. `mix` places it. Each call looks whether it is still there and last, since hooks
    and adapters may have come.
    """

    # What an Assembly computes from its parts, which lie in the attention.
    inputs_of: Any = Assembly.inputs_of
    gated: Any = Assembly.gated
    relative_gain = None

    def __init__(self, site: Site, model: nn.Module, variant: Variant):
        if not hasattr(site.module, "config"):  # T5 before it went through the AttentionInterface
            kind = type(site.module).__name__
            raise ValueError(
                f"{kind}: has no config to choose its attention by; a later transformers may serve "
                "it"
            )
        projection: Any = model.get_submodule(site.paths["queries"])
        # GPT-2's has a transposed weight
        embed_dim = getattr(projection, "in_features", projection.weight.size(0))
        self.attention = site.module
        self.variant = dataclasses.replace(variant, head_dim=site.head_dim)
        self.config = site.module.config  # the model's
        self.sizes = self.variant.sizes(
            site.heads, embed_dim, key_heads=site.heads // site.heads_per_key(model)
        )
        self.assembly = Assembly()
        self.assembly.add_parts(self.variant, self.sizes)
        self.assembly.to(projection.weight).train(site.module.training)
        self.normalizer = self.variant.normalizer
        # The heads that pruning left, as numbered at first.
        self.kept = {
            "source": list(range(self.sizes.num_heads)),
            "mixed": list(range(self.sizes.mixed_heads)),
        }
        self.outputs = self.sizes.mixed_heads
        self.missing_values = 0  # zeros in place of cut values
        self.names = {kind: site.paths[kind].rpartition(".")[2] for kind in FEATURES}
        self.hooks: list[RemovableHandle] = []
        self.init_hooks()

    def __getattr__(self, name: str) -> Any:
        """Return a part: the attention has them, since an adapter may put others in their place."""
        if name in PARTS:
            return getattr(self.attention, name)
        raise AttributeError(name)

    @property
    def heads_per_key(self) -> int:
        """How many heads of queries share a head of keys."""
        return self.sizes.num_heads // self.sizes.key_heads

    def attach(self) -> None:
        """Add the parts to the attention, and follow its calls.

        The parts have the names that the attention's files have.
        """
        vars(self.attention)[MIXHEAD] = self
        for option in PARTS:
            setattr(self.attention, option, getattr(self.assembly, option))
        del self.assembly
        self.hooks = [
            self.attention.register_forward_pre_hook(self._begin),
            self.attention.register_forward_hook(self._end, always_call=True),
        ]
        self._place()

    def detach(self) -> None:
        self.attention.config = self.config
        for hook in self.hooks:
            hook.remove()
        for projection in self.projections().values():
            remove_hook(projection, self._project)
        for name in (MIXHEAD, *PARTS):
            delattr(self.attention, name)

    def projections(self) -> dict[str, nn.Module]:
        """Return the modules that give queries, keys and values, which may be one."""
        found = {}
        for kind, name in self.names.items():
            module = getattr(self.attention, name)
            # What `torch.compile` puts around a module runs no hooks inside a larger graph.
            found[kind] = getattr(module, "_orig_mod", module)
        return found

    # graphs break here, where a hook or an adapter came since the last call
    @torch.compiler.disable
    def _place(self) -> None:
        for projection in self.projections().values():
            remove_hook(projection, self._project)
            projection.register_forward_hook(self._project)

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if getattr(module, "_is_replica", False):  # it shares parts and hooks with the others
            raise ValueError(
                "a mixed model in torch's DataParallel: start a process for each GPU, as torchrun "
                "does"
            )
        projections = self.projections()
        for projection in projections.values():
            hooks = list(projection._forward_hooks.values())
            # torch.compile does not follow a comparison of methods, but of what they belong to
            if not hooks or getattr(hooks[-1], "__self__", None) is not self:
                self._place()
                break
        THREADS.own.call = Call(self, projections)

    def slices(self, kinds: list[str]) -> dict[str, slice]:
        """Return where queries, keys and values are among the outputs of a projection.

        GPT-2 has one projection for several of them.
        """
        widths = {"queries": self.sizes.num_heads, "keys": self.sizes.key_heads}
        found, start = {}, 0
        for kind in kinds:
            end = None if kind == kinds[-1] else start + widths[kind] * self.sizes.head_dim
            found[kind] = slice(start, end)
            start = end or 0
        return found

    def _project(
        self, projection: nn.Module, args: tuple[Tensor, ...], output: Tensor
    ) -> Tensor | None:
        """Mix the features of what a projection gives, and keep what mixings read."""
        call = THREADS.own.call
        if call is None or call.heads is not self:
            return None  # someone else calls the projection
        # Not `self.projections()`: where this projection is compiled alone, dynamo cannot look at
        # it a second time, by way of the attention.
        kinds = [kind for kind, present in call.projections.items() if present is projection]
        if not kinds:
            return None  # an adapter is around it, which is the projection now
        wanted = self.sizes.num_heads * self.sizes.head_dim
        if kinds == ["queries"] and output.size(-1) != wanted:
            raise ValueError(
                f"{type(self.attention).__name__}: its queries have {output.size(-1)} features, "
                f"must be {wanted}; "
                f"{SPLIT}"
            )
        if self.feature_mixing is not None:
            parts = [
                self.feature_mixing(output[..., at], FEATURES[kind])
                for kind, at in self.slices(kinds).items()
            ]
            output = torch.cat(parts, -1)
        if "queries" in kinds:
            call.x, call.projected = args[0], output
        if "values" in kinds and self.missing_values:
            # some attentions want as many heads of values as of keys
            output = F.pad(output, (0, self.missing_values))
        return output

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Refuse what another implementation computed. After an exception there is no output."""
        call, THREADS.own.call = THREADS.own.call, None
        if output is not None and not (call is not None and call.heads is self and call.attended):
            what = f"{type(module).__name__}: lost the mixing"
            raise RuntimeError(f"{what}, its attention must go through the AttentionInterface")


def remove_hook(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Remove a hook, however it came there: torch's quantisation copies hooks to new modules."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for number in [number for number, each in hooks.items() if each == hook]:
            del hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)


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
    s_aux: Tensor | None = None,
    output_attentions: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a module that `mix` has seen.

    The call is the contract of the `AttentionInterface`.

    Args:
        query, key, value: [B, H, Nq, D], and twice [B, G, Nk, D] where G divides H
        attention_mask: broadcastable to [B, H, Nq, Nk]; bool, True is visible; or floats that are
            added to the scores, the least number of their type hides; None hides the future where
            the module is causal, but nothing if `attn_implementation` is eager
        position_bias: [1, H, Nq, Nk], added to the scores (T5)
        s_aux: [H], the sinks of the model's own (GPT-OSS)

    Returns:
        output [B, Nq, H', Dv] and, with `output_attentions` or in a model whose
        `attn_implementation` is eager, the mixed weights [B, H', Nq, Nk]
    """
    name = type(module).__name__
    mixed: MixedHeads | None = getattr(module, MIXHEAD, None)
    if mixed is None:
        raise RuntimeError(
            f"{name}: has no mixing; load it by mixhead_plugin.hf.load, or add a row to hf.LAYOUTS"
        )
    call = THREADS.own.call
    if call is None or call.heads is not mixed or call.projected is None or call.x is None:
        raise RuntimeError(
            f"{name}: its projection of queries was not called, so there is nothing to mix by"
        )
    chosen = mixed.config._attn_implementation
    if chosen not in (MIXHEAD, "eager"):
        raise RuntimeError(
            f"attn_implementation {chosen}: lost the mixing, must be {MIXHEAD} or eager"
        )
    for setting in ("softcap", "cache"):
        if others.get(setting) is not None:
            raise ValueError(f"{name}: {setting} cannot be used with mixed heads")
    batch, heads, n_queries, head_dim = query.shape
    if call.projected.shape[:-1] != (batch, n_queries):
        raise RuntimeError(
            f"{name}: its queries are {tuple(call.projected.shape[:-1])} where they are projected, "
            f"but {(batch, n_queries)} where they attend, so there is nothing to mix by"
        )
    call.attended = True

    # What mixings read: before any rotation, and without the keys and values of one projection.
    x = call.x  # [B, Nq, C]
    projected = call.projected[..., : heads * head_dim]
    projected = projected.unflatten(2, (heads, head_dim)).transpose(1, 2)  # [B, H, Nq, D]

    # Floats and what has a row for each query become additive; what is the same for all queries,
    # padding [B, Nk], which the kernels take without a mask of all pairs.
    causal = False
    padding = None
    if attention_mask is None:
        if is_causal is None:  # as in sdpa; eager always has a mask where it hides something
            is_causal = chosen != "eager" and getattr(module, "is_causal", True)
        causal = n_queries > 1 and is_causal
    elif attention_mask.is_floating_point():
        least = torch.finfo(attention_mask.dtype).min
        attention_mask = attention_mask.masked_fill(attention_mask <= least, -torch.inf)
    elif attention_mask.size(1) == 1 and same_for_all_queries(attention_mask):
        padding = ~attention_mask[:, 0, 0].expand(batch, -1)
        attention_mask = None
    else:
        attention_mask = by_head(~attention_mask, heads, query.dtype)
    if position_bias is not None:
        attention_mask = position_bias if attention_mask is None else attention_mask + position_bias
    # Layers may share a bias, which has all heads; this attention may be pruned.
    if attention_mask is not None and attention_mask.size(1) not in (1, heads):
        attention_mask = attention_mask[:, mixed.kept["source"]]

    # Every head of queries gets its own keys and values, because each head mixes differently.
    groups = heads // key.size(1)
    if groups > 1:
        key = key.repeat_interleave(groups, 1)
        value = value.repeat_interleave(groups, 1)
    # With differential mixing, neighbours are the values of one mixed head.
    group = PARTS["head_mixing"][mixed.variant.head_mixing].heads_per_mixed
    if group > 1:
        value = value.unflatten(1, (-1, group)).transpose(2, 3).flatten(3)  # [B, H', Nk, Dv]
    value = value[:, : mixed.sizes.mixed_heads]

    inputs = mixed.inputs_of(
        query,
        key,
        value,
        projected,
        x,
        attn_mask=attention_mask,
        key_padding_mask=padding,
        causal=causal,
        dropout_p=dropout,
        scale=head_dim**-0.5 if scaling is None else scaling,
    )
    if s_aux is not None:
        inputs = inputs._replace(sink=s_aux)
    asked = output_attentions or THREADS.own.wants_weights or mixed.config.output_attentions
    need_weights = asked or chosen == "eager"
    out, weights = mixed.attend(inputs, mixed.variant.impl, need_weights)
    return mixed.gated(out.transpose(1, 2).contiguous(), x), weights  # [B, Nq, H', Dv]


def same_for_all_queries(mask: Tensor) -> bool:
    """Return whether a mask [B, 1, Nq, Nk] has one row for all queries; `mixed_mask` makes such."""
    return mask.size(2) == 1 or mask.stride(2) == 0


def mixed_mask(**settings: Any) -> Tensor | None:
    """Return a bool mask [B, 1, Nq, Nk], True is visible; None where `mixed_attention` needs none.

    If all queries see the same keys, it is one row that stands for all.
    """
    # of the queries, in transformers 5.3; in later ones, their number
    positions = settings.get("cache_position")
    n_queries = settings["q_length"] if positions is None else len(positions)
    if settings["mask_function"] is bidirectional_mask_function:  # all queries see the same keys
        settings |= {"q_length": 1} if positions is None else {"cache_position": positions[:1]}
        row = sdpa_mask(**settings)
        return None if row is None else row.expand(-1, -1, n_queries, -1)
    if n_queries not in (1, settings["kv_length"]):
        settings["allow_is_causal_skip"] = False  # the rest of a static cache is hidden too
    return sdpa_mask(**settings)


AttentionInterface.register(MIXHEAD, mixed_attention)
AttentionMaskInterface.register(MIXHEAD, mixed_mask)
