"""Gates and views of an attention that calls `ops.attention` with hooks, wherever its parts lie."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from mixhead_plugin.heads.attention import Heads
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.reference import source_weights
from mixhead_plugin.parts.hooks import Hooked


class HookedAttention:
    """The part of `heads.Attention` that such adapters share; they add `heads` and `cut`.

    Args:
        name: the name of the attention in its model
        hooked: what makes its calls of `ops.attention`
    """

    def __init__(self, name: str, hooked: Hooked):
        self.name = name
        self.hooked = hooked

    def gate(self, stage: str, change: Callable[[Tensor], Tensor]) -> RemovableHandle:
        # A factor on row j of M is a factor on the weights P_j of source head j.
        def of_sources(hooked: Any, inputs: AttentionInputs) -> AttentionInputs:
            matrix = inputs.matrix()
            assert matrix is not None  # only where heads mix, there are source heads
            mixing = change(matrix)
            if mixing.dim() == 4:
                # Gates that are the same for all queries give [B, 1, H, H'], which no kernel takes.
                mixing = mixing.expand(-1, inputs.query.size(2), -1, -1)  # [B, Nq, H, H']
            return inputs.with_mixing(mixing)

        def of_outputs(hooked: Any, inputs: AttentionInputs, outputs: Tensor) -> Tensor:
            return change(outputs.transpose(1, 2)).transpose(1, 2)  # [B, H', Nq, Dv]

        if stage == "source":
            return self.hooked.register_attention_pre_hook(of_sources)
        return self.hooked.register_attention_hook(of_outputs)

    def view(self, see: Callable[[Heads], None]) -> RemovableHandle:
        def look(hooked: Any, inputs: AttentionInputs, outputs: Tensor) -> None:
            see(Heads(inputs.matrix(), partial(source_weights, inputs)))

        return self.hooked.register_attention_hook(look)
