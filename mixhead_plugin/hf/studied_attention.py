"""Let `heads` study the attentions of `transformers`, mixed or not."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from mixhead_plugin.heads.attention import Heads, HeadsError
from mixhead_plugin.heads.hooked_attention import HookedAttention
from mixhead_plugin.hf import pruning
from mixhead_plugin.hf.attention_hooks import MixedHeads, mixed_heads_of
from mixhead_plugin.hf.finding import find_attentions, is_inside
from mixhead_plugin.hf.layouts import FoundAttention
from mixhead_plugin.hf.refusals import check_module
from mixhead_plugin.hf.row_checks import check_outputs
from mixhead_plugin.parts import AttentionSizes


class StudiedAttention:
    """One attention of a model as `heads` knows it: it has the methods of `heads.Attention`.

    Args:
        attention: the attention that is studied
        model: the model that has it
    """

    def __init__(self, attention: FoundAttention, model: PreTrainedModel):
        self.attention = attention
        self.model = model
        self.name = attention.name
        self.is_checked = False

    @property
    def mixed(self) -> MixedHeads | None:
        """What `mix` or `prune` has added to the attention; None for a plain one."""
        return mixed_heads_of(self.attention.module)

    @property
    def sizes(self) -> AttentionSizes:
        return pruning.sizes_of(self.attention, self.model)

    @property
    def heads(self) -> dict[str, int]:
        return {"mixed": self.sizes.mixed_heads}

    def _check_order(self) -> None:
        """Raise ValueError if the output projection does not read one head after another.

        It must be that head 3 gives the third block of features that the projection reads, counted
        from 0. Else "leave out head 3" would silence another one.
        """
        # What is mixed was checked before it was mixed.
        if self.mixed is None and not self.is_checked:
            check_outputs(self.attention, self.model)
            self.is_checked = True

    def gate(self, stage: str, change: Callable[[Tensor], Tensor]) -> RemovableHandle:
        assert stage == "mixed"  # what gives the outputs; `heads` has no other
        self._check_order()
        number = self.sizes.mixed_heads
        features = number * self.sizes.value_dim
        around = self._checkpointed_around()

        def gated(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if any(each.training and each.gradient_checkpointing for each in around):
                raise ValueError(
                    f"{type(self.model).__name__}: gradient checkpointing may compute heads again "
                    "without their gates; "
                    "call model.eval() or model.gradient_checkpointing_disable()"
                )
            if args[0].size(-1) != features:
                raise ValueError(
                    f"{self.name}: its outputs have {args[0].size(-1)} features, must be "
                    f"{features} of {number} heads in one process"
                )
            outputs = args[0].unflatten(-1, (number, -1))  # [B, Nq, H', Dv]
            return change(outputs).flatten(-2), *args[1:]

        projection = self.model.get_submodule(self.attention.paths["output"])
        return projection.register_forward_pre_hook(gated)

    def _checkpointed_around(self) -> list[Any]:
        """Return the attention and what it is in, as far as they may be checkpointed."""
        around = []
        for name, module in self.model.named_modules():
            if is_inside(self.name, name) and hasattr(module, "gradient_checkpointing"):
                around.append(module)
        return around

    def view(self, see: Callable[[Heads], None]) -> RemovableHandle:
        mixed = self.mixed
        if mixed is None:
            return self._view_eager(see)
        return HookedAttention(self.name, mixed).view(see)

    def _view_eager(self, see: Callable[[Heads], None]) -> RemovableHandle:
        """Let `see` have the weights that the eager attention of transformers returns."""
        self._check_order()

        def returned(module: nn.Module, args: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            weights = [each for each in outputs if self._are_weights(each)]
            if len(weights) > 1:
                raise HeadsError(
                    f"{self.name}: returns several tensors that may be its weights; mix it first, "
                    "as by hf.mix(model, 'none')"
                )
            if weights:  # else another implementation than eager computed it
                see(Heads(None, lambda: weights[0]))

        return self.attention.module.register_forward_hook(returned)

    def _are_weights(self, output: Any) -> bool:
        """Return whether an output has a distribution of each head: T5 returns its bias, too."""
        if not isinstance(output, Tensor) or output.dim() != 4:
            return False
        if output.size(1) != self.attention.heads or not output.is_floating_point():
            return False
        # Rows of half precision sum to 1 but for their rounding; with sinks, to less.
        sums = output.float().sum(-1)
        return bool((output >= 0).all() and (sums < 1.01).all() and (sums > 0).any())

    def cut_problem(self, heads: Sequence[int]) -> str:
        mixed = self.mixed
        parts = {} if mixed is None else mixed.variant.part_kinds()
        return pruning.problem(self.sizes, parts, heads)

    def cut(self, heads: Mapping[str, Sequence[int]]) -> None:
        pruning.cut_heads(self.attention, self.model, heads["mixed"])


def attentions_of(model: PreTrainedModel) -> list[StudiedAttention]:
    """Return the attentions of a model in its order; raise ValueError if there are none."""
    check_module(model)
    return [StudiedAttention(attention, model) for attention in find_attentions(model)]
