"""The methods that attentions and gated attention units share.

TorchScript compiles them; its rules stand in ops/torchscript.md.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from fairseq.modules import FairseqDropout
from torch import Tensor, nn

from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.reference import (
    append_sink,
    apply_gain,
    masked_scores,
    mix_weights,
    weighted_values,
)


class SharedMethods(nn.Module):
    """A mixin before an attention or a unit, which has to set these attributes:

    normalize          NORMALIZERS[normalizer].weights, the function itself
    dropout_module     drops attention weights
    value_init_scale   the flag
    v_proj, out_proj   linear maps, which may be quantised
    """

    # TorchScript: annotations would become its types.
    if TYPE_CHECKING:
        normalize: Callable[[Tensor], Tensor]
        dropout_module: FairseqDropout
        value_init_scale: float
        v_proj: nn.Linear
        out_proj: nn.Linear

    def attend_by_definition(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """Return the outputs [B, H', Nq, Dv] and the mixed weights [B, H', Nq, Nk].

        TorchScript cannot follow `ops.attention`, which looks up a normalizer and an implementation
        by name. So this is `ops.reference.reference_with_weights` again, step by step. It cannot
        switch autocast off either, so under autocast a scripted module has products in half
        precision.
        """
        scores = append_sink(masked_scores(inputs), inputs.sink)
        weights = self.normalize(scores)[..., : inputs.key.size(2)]  # without that of the sink
        weights = mix_weights(apply_gain(weights, inputs.gain), inputs)
        return weighted_values(weights, inputs), weights

    def dropout_p(self) -> float:
        """Return the probability of dropping a weight in this call."""
        if self.training or self.dropout_module.apply_during_inference:
            return float(self.dropout_module.p)
        return 0.0

    def scale_values(self) -> None:
        """Multiply the initial W_V and W_O by `value_init_scale` (l2 essay).

        Call it again after another initialisation, such as BERT's.
        """
        with torch.no_grad():
            self.v_proj.weight.mul_(self.value_init_scale)
            self.out_proj.weight.mul_(self.value_init_scale)
