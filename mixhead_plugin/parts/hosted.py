"""Mix the heads of a module that is not ours, its host: the parts become children of the host.

The doors of torch and of transformers share this. What a call goes through:

    query [B, H, Nq, D]    key, value [B, G, Nk, ...], one for several heads of queries
      |                      |
    as_autocast            one dtype for all three
      |                      |
      |                    _repeat_kv          [B, H, Nk, ...]
      |                    _of_mixed_heads     values alone: [B, H', Nk, ...]
      |                      |
    inputs_of              what the parts make of a call: M, sink, relative positions
      |
    attend                 ops.attention, with hooks around it: [B, H', Nq, ...]
      |
    mix_and_gate_outputs   [B, Nq, H', ...], with mixed outputs and gates
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mixhead_plugin.ops.precision import as_autocast
from mixhead_plugin.parts.assembly import Assembly, UsesParts
from mixhead_plugin.parts.effect import first_part_with_effect
from mixhead_plugin.parts.hooks import Hooked
from mixhead_plugin.parts.kinds import AttentionSizes
from mixhead_plugin.parts.random_numbers import forked_rng
from mixhead_plugin.parts.tables import PARTS
from mixhead_plugin.parts.variant import Variant


class PartsInHost(UsesParts):
    """The parts that lie in a host now."""

    relative_gain = None  # for attentions that are ours alone

    def __init__(self, host: nn.Module, normalizer: str):
        self.normalizer = normalizer
        # In each call anew, because an adapter may have put another module in the place of a part.
        for option in PARTS:
            setattr(self, option, getattr(host, option))


class HostedAttention(Hooked):
    """What a host has beside its parts: what is asked for, sizes, and hooks.

    Args:
        variant: what is asked for
        sizes: the sizes of the attention of the host
    """

    def __init__(self, variant: Variant, sizes: AttentionSizes):
        self.variant = variant
        self.sizes = sizes
        self.init_hooks()

    def attend_in(
        self,
        host: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        projected: Tensor,
        x: Any,
        need_weights: bool = False,
        sink: Tensor | None = None,
        **call: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of a host.

        Args:
            host: the module that has the parts
            query: [B, H, Nq, D]
            key: [B, G, Nk, D], where neighbouring heads of queries share one of the G heads
            value: [B, G, Nk, Dv]
            projected: the queries that mixings read, [B, H, Nq, D]
            x: the input of the queries, [B, Nq, C]; None if no part reads it
            need_weights: also return the mixed weights
            sink: scores of a sink that the host has by itself, [H]; None for those of the variant
            call: masks, dropout and scale, as in `UsesParts.inputs_of`

        Returns:
            outputs of the mixed heads, behind gates, [B, Nq, H', Dv times the heads per mixed
                head], and weights, None or [B, H', Nq, Nk]
        """
        # Under autocast, projections give half precision, but rotations and norms after them return
        # float32. Attention needs one type, and torch's makes it in the same way.
        query = as_autocast(query)
        key = as_autocast(key)
        value = as_autocast(value)
        parts = PartsInHost(host, self.variant.normalizer)
        # Every head of queries gets keys and values of its own, because each head mixes in its way.
        key = _repeat_kv(key, query.size(1))
        value = self._of_mixed_heads(_repeat_kv(value, query.size(1)))

        # What mixings and gates read, `projected` and `x`, is not what attends: the host may have
        # rotated the queries since.
        inputs = parts.inputs_of(query, key, value, projected, x, **call)
        if sink is not None:
            inputs = inputs._replace(sink=sink)
        outputs, weights = self.attend(inputs, self.variant.impl, need_weights)
        return parts.mix_and_gate_outputs(outputs.transpose(1, 2), x), weights

    @property
    def heads_per_mixed(self) -> int:
        """How many source heads there are for each mixed head."""
        return PARTS["head_mixing"][self.variant.head_mixing].heads_per_mixed

    def _of_mixed_heads(self, value: Tensor) -> Tensor:
        """Return the values [B, H', Nk, ...] of mixed heads, from those of source heads."""
        several = self.heads_per_mixed
        if several > 1:
            # The values of neighbours stand side by side: [B, H', Nk, several * Dv].
            value = value.unflatten(1, (-1, several)).transpose(2, 3).flatten(3)
        # Where mixed heads were cut off, the host may still give as many values as keys.
        if value.size(1) > self.sizes.mixed_heads:
            value = value[:, : self.sizes.mixed_heads]
        return value

    def lost_without(self, host: nn.Module, but: str = "") -> str:
        """Return in a few words what the host would lose without its parts; empty if nothing.

        Args:
            host: the module that has the parts
            but: the option of a part that may have an effect
        """
        if self.variant.normalizer != "softmax":
            return f"normalizer {self.variant.normalizer}"
        return first_part_with_effect(
            {option: getattr(host, option) for option in PARTS if option != but}
        )


def _repeat_kv(shared: Tensor, heads: int) -> Tensor:
    """Return keys or values [B, H, Nk, ...] from those that heads share, [B, G, Nk, ...]."""
    if shared.size(1) == heads:
        return shared
    if shared.size(1) == 1:
        return shared.expand(-1, heads, -1, -1)  # needs no memory
    return shared.repeat_interleave(heads // shared.size(1), 1)


@torch.inference_mode(False)  # of tensors that were made in it, none can be trained
def place_parts(attentions: Iterable[tuple[nn.Module, HostedAttention, Tensor]]) -> None:
    """Build the parts of attentions, and make them children of their hosts.

    Args:
        attentions: for each, its host, the attention, and a tensor with the device and the type of
            floats that its parts get
    """
    # On the CPU, whatever the default device is, because parts draw there.
    with forked_rng(), torch.device("cpu"):
        for host, attention, like in attentions:
            assembly = Assembly()
            assembly.add_parts(attention.variant, attention.sizes)
            assembly.to(like).train(host.training)
            for option in PARTS:
                setattr(host, option, getattr(assembly, option))
            # A part forks the generator, and puts it back. No projection draws in between here, so
            # without this number all attentions would start with the same ones.
            torch.rand((), device="cpu")


def remove_parts(host: nn.Module) -> None:
    for option in PARTS:
        delattr(host, option)
