"""The hooks that `mix` puts on a model of `transformers` and on its attentions.

model(output_attentions=True)           notes what it is asked for
  model.layers[0].self_attn(x)          begins and ends a `Call`
    q_proj(x), k_proj(x), v_proj(x)     mix their features, and keep what mixings read
    ALL_ATTENTION_FUNCTIONS[...]        is `attend.mixed_attention`, which finds the `Call`
    o_proj(outputs)                     is left alone
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mixhead_plugin.hf.calls import THREADS, Call
from mixhead_plugin.hf.layouts import MIXHEAD, FoundAttention, slices
from mixhead_plugin.hf.refusals import SPLIT
from mixhead_plugin.parts import HostedAttention, Variant, record

# what a FeatureMixing calls the features of each projection
FEATURES = {"queries": "query", "keys": "key", "values": "value"}


def install_model_hooks(model: nn.Module) -> None:
    """Let the attentions in a model know whether a call of the model wants weights.

    GPT-2 does not tell them.
    """
    model.register_forward_pre_hook(_note_wish, with_kwargs=True)
    # Also after an exception: else the next call in this thread would give weights, too.
    model.register_forward_hook(_forget_wish, always_call=True)


def remove_model_hooks(model: nn.Module) -> None:
    _remove_hook(model, _note_wish)
    _remove_hook(model, _forget_wish)


def _note_wish(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    THREADS.own.note_wish(model, for_weights=bool(kwargs.get("output_attentions")))


def _forget_wish(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    THREADS.own.forget_wish(model)


class MixedHeads(HostedAttention):
    """What `mix` adds to one attention beside its parts: hooks and numbers.

    The hook of a projection has to be the last one, because mixings read what other hooks have made
    of the queries. `mix` puts it there. Each call looks whether it is still there and last, since
    hooks and adapters may have come.

    Args:
        attention: the attention that is mixed; its module is the host of the parts
        model: the model that has it
        variant: what is asked for
    """

    def __init__(self, attention: FoundAttention, model: nn.Module, variant: Variant):
        # T5 has none before it goes through the AttentionInterface.
        if not hasattr(attention.module, "config"):
            raise ValueError(
                f"{attention.class_name}: has no config to choose its attention by; a later "
                "transformers may serve it"
            )
        variant = dataclasses.replace(variant, head_dim=attention.head_dim)
        plain = attention.sizes(model)
        super().__init__(
            variant, variant.sizes(attention.heads, plain.embed_dim, key_heads=plain.key_heads)
        )

        self.host = attention.module
        self.config: Any = None  # the model's
        # The heads that pruning left, as numbered at first.
        self.kept = {
            "source": list(range(self.sizes.num_heads)),
            "mixed": list(range(self.sizes.mixed_heads)),
        }
        self.original_mixed_heads = self.sizes.mixed_heads
        # Zeros in place of the values of heads that were cut off; `HostedAttention` drops them.
        self.missing_values = 0
        self.names = {role: attention.paths[role].rpartition(".")[2] for role in FEATURES}
        self.hooks: list[RemovableHandle] = []

    def install_hooks(self) -> None:
        """Follow the calls of the attention, which has got its parts and the config of the model.

        It gets a config of its own, so that it calls `mixed_attention`, whatever `transformers`
        chooses for the model. `mixed_heads_of` finds the hooks.
        """
        vars(self.host)[MIXHEAD] = self
        self.config = self.host.config
        self.host.config = copy.copy(self.config)
        self.host.config._attn_implementation_internal = MIXHEAD
        self.hooks = [
            self.host.register_forward_pre_hook(self._begin),
            self.host.register_forward_hook(self._end, always_call=True),
            # The public one puts a mark on its hook, which a method cannot have.
            self.host._register_state_dict_hook(self._write_metadata),
            self.host.register_load_state_dict_pre_hook(self._check_metadata),
        ]
        self._put_hooks_last()

    def remove_hooks(self) -> None:
        """Undo `install_hooks`; the parts stay."""
        self.host.config = self.config
        for hook in self.hooks:
            hook.remove()
        for projection in self.projections().values():
            _remove_hook(projection, self._project)
        delattr(self.host, MIXHEAD)

    def entry(self) -> dict[str, Any]:
        """Return what the metadata of a state dict tell of the attention."""
        return record.describe(self.variant, calls=record.CALLS_INTERFACE)

    def _write_metadata(
        self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any]
    ) -> None:
        local_metadata[record.METADATA_KEY] = self.entry()

    def _check_metadata(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Refuse the state dict of another variant."""
        record.compare(module, self.entry(), prefix, local_metadata, errors)

    def removed(self) -> list[int]:
        """Return the mixed heads that were cut off, as numbered at first."""
        return sorted({*range(self.original_mixed_heads)} - {*self.kept["mixed"]})

    def projections(self) -> dict[str, nn.Module]:
        """Return the modules that give queries, keys and values, which may be one."""
        by_role = {}
        for role, name in self.names.items():
            module = getattr(self.host, name, None)
            if not isinstance(module, nn.Module):
                raise RuntimeError(
                    f"{type(self.host).__name__}: lost the mixing, its {name} must be a module"
                )
            # What `torch.compile` puts around a module runs no hooks inside a larger graph.
            by_role[role] = getattr(module, "_orig_mod", module)
        return by_role

    # graphs break here, where a hook or an adapter came since the last call
    @torch.compiler.disable
    def _put_hooks_last(self) -> None:
        for projection in self.projections().values():
            _remove_hook(projection, self._project)
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
                self._put_hooks_last()
                break
        own = THREADS.own
        own.drop_interrupted()
        own.call = Call(self.host, projections, outer=own.call)

    def widths(self) -> dict[str, int]:
        """Return how many features queries, keys and values have now, as their projections do."""
        keys = self.sizes.key_heads * self.sizes.head_dim
        return {
            "queries": self.sizes.num_heads * self.sizes.head_dim,
            "keys": keys,
            "values": keys - self.missing_values,
        }

    def _project(
        self, projection: nn.Module, args: tuple[Tensor, ...], output: Tensor
    ) -> Tensor | None:
        """Mix the features of what a projection gives, and keep what mixings read."""
        call = THREADS.own.call
        if call is None or call.host is not self.host:
            return None  # someone else calls the projection
        # Not `self.projections()`: where this projection is compiled alone, dynamo cannot look at
        # it a second time, by way of the attention.
        roles = [role for role, present in call.projections.items() if present is projection]
        if not roles:
            return None  # an adapter is around it, which is the projection now
        if roles == ["queries"]:
            self._check_width(output)

        feature_mixing: Any = self.host.feature_mixing
        if feature_mixing is not None:
            features = []
            for role, where in slices(roles, self.widths()).items():
                features.append(feature_mixing(output[..., where], FEATURES[role]))
            output = torch.cat(features, -1)
        if "queries" in roles:
            if call.waits:  # nothing tells which of them attend first
                raise RuntimeError(
                    f"{type(self.host).__name__}: projects queries twice before it attends; must "
                    "project those of each attention directly before it"
                )
            call.x = args[0]
            call.projected = output
            call.waits = True
        if "values" in roles and self.missing_values:
            # some attentions want as many heads of values as of keys
            output = F.pad(output, (0, self.missing_values))
        return output

    def _check_width(self, queries: Tensor) -> None:
        """Refuse another number of features than the parts were built for."""
        width = queries.size(-1)
        wanted = self.sizes.num_heads * self.sizes.head_dim
        if width == wanted:
            return
        split = torch.distributed.is_available() and torch.distributed.is_initialized()
        why = SPLIT if split and wanted % width == 0 else "as when it was mixed"
        class_name = type(self.host).__name__
        raise ValueError(
            f"{class_name}: its queries have {width} features, must be {wanted}, {why}"
        )

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Refuse what another implementation computed. After an exception there is no output."""
        call = THREADS.own.call
        attended = False
        if call is not None and call.host is self.host:  # else it was refused before it began
            attended = call.attended
            THREADS.own.call = call.outer
        if output is None or attended:
            return
        class_name = type(module).__name__
        raise RuntimeError(
            f"{class_name}: lost the mixing, its attention must go through the AttentionInterface"
        )


def mixed_heads_of(module: nn.Module) -> MixedHeads | None:
    """Return what `mix` has added to a module; None if it has not."""
    return getattr(module, MIXHEAD, None)


def _remove_hook(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Remove a hook, however it came there: torch's quantisation copies hooks to new modules."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for number, each in list(hooks.items()):
            if each == hook:
                del hooks[number]
                # torch keeps beside each hook how it is called.
                module._forward_pre_hooks_with_kwargs.pop(number, None)
                module._forward_hooks_always_called.pop(number, None)
