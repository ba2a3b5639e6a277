"""Auxiliary losses of the attentions, as a part of the loss that a criterion computes.

Each attention computes its penalty in its own forward pass and attaches it to its output. The
backward pass of the output then differentiates the penalty, too; the criterion only adds its value.

    attention:   out, penalty  ->  _AddAuxiliaryLoss  ->  out          the same numbers
    backward:    d_out         ->  d_out, and d_penalty = d_loss * sample_size * factor

The criterion cannot differentiate the sum of all penalties, as one would expect: activation
checkpointing runs a layer without gradients, and runs it again in the backward pass. Only then has
its penalty a graph. Mixture-of-experts models do the same (Megatron-LM's MoEAuxLossAutoScaler,
DeepSeek's AddAuxiliaryLoss).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.sites import side_of_attention
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.low_rank import LowRank
from mixhead_plugin.ops.penalties import orthogonal_penalty, rank_penalty
from mixhead_plugin.ops.precision import upcast, without_autocast
from mixhead_plugin.ops.reference import source_weights
from mixhead_plugin.parts.hooks import Hook


class Penalty(NamedTuple):
    """One flag --<name>-weight; logged as `<name>_loss`."""

    # Takes an attention, the inputs of its call, and which queries are not padding, bool [B, Nq].
    # Returns a scalar, in float32 or better.
    compute: Callable[[MixheadAttention, AttentionInputs, Tensor], Tensor]
    # True: on M and the matrices of feature mixing, see `PartKind.orthogonal`. False: on the
    # attention weights P.
    on_mixing: bool
    weight: float  # the default
    formula: str
    source: str

    def acts_on(self, attention: MixheadAttention) -> bool:
        """Return whether an attention has this penalty."""
        if self.on_mixing:
            return any(row.orthogonal for row in attention.variant.part_kinds().values())
        return attention.num_heads > 1


def _mixing_penalty(
    attention: MixheadAttention, inputs: AttentionInputs, not_padding: Tensor
) -> Tensor:
    """Return the sum of the penalties on M and on the matrices that mix features."""
    matrices: list[Tensor | LowRank] = []
    if attention.variant.part_kinds()["head_mixing"].orthogonal:
        # A low-rank mixing gives the factors of M, the others M itself.
        mixing = inputs.mixing if inputs.mixing is not None else inputs.factors()
        assert mixing is not None
        matrices.append(mixing)
    if attention.feature_mixing is not None:
        matrices += attention.feature_mixing.matrices()
    return torch.stack([orthogonal_penalty(matrix, not_padding) for matrix in matrices]).sum()


def _rank_penalty(
    attention: MixheadAttention, inputs: AttentionInputs, not_padding: Tensor
) -> Tensor:
    return rank_penalty(source_weights(inputs), not_padding)


PENALTIES = {
    "orthogonal": Penalty(
        _mixing_penalty,
        on_mixing=True,
        weight=0.0001,
        formula="squared Frobenius norm of M^T M - I",
        source="mixhead eq. 16",
    ),
    "rank": Penalty(
        _rank_penalty,
        on_mixing=False,
        weight=0.0,
        formula=(
            "squared Frobenius norms of P_i P_j^T and of P_i^T P_j, means over pairs of heads and "
            "sentences"
        ),
        source="mixhead eq. 20",
    ),
}


def count_attentions(model: nn.Module, names: Iterable[str]) -> dict[str, int]:
    """Return for each penalty how many attentions of a model have it.

    Args:
        model: any model
        names: keys of PENALTIES
    """
    attentions = [module for module in model.modules() if isinstance(module, MixheadAttention)]
    numbers = {}
    for name in names:
        numbers[name] = len([each for each in attentions if PENALTIES[name].acts_on(each)])
    return numbers


class RegularizedPass:
    """A context in which attentions compute penalties; `add_to` then adds them to the loss.

    Only attentions of the plugin have penalties, and not those that LayerDrop leaves out. What
    happens in one pass, and what is known from then on:

        __enter__           with_gradients; each attention gets a hook
        forward             values; without_graph, the attentions in checkpointed layers
        __exit__            no hooks
        add_to              sample_size
        backward begins     d_loss; the attentions of `without_graph` get a hook again
        backward            their layers are computed again, which removes it

    Args:
        model: any model
        factors: the weight of each penalty in the loss, by its name in PENALTIES
        not_padding: the queries that are not padding, by "encoder" and "decoder", bool [B, Nq]

    Attributes:
        values: the sum of each penalty over the attentions of this pass, detached and unweighted,
            by its name in PENALTIES
    """

    def __init__(
        self, model: nn.Module, factors: Mapping[str, float], not_padding: dict[str, Tensor]
    ):
        self.factors = factors
        # The queries of attention to an encoder are those of the decoder.
        self.query_masks: dict[MixheadAttention, Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, MixheadAttention):
                self.query_masks[module] = not_padding[side_of_attention(name)]
        # A tensor from the start, also where LayerDrop leaves out every attention: fairseq sums
        # tensors and numbers over the workers in two buffers, and each must be as long in all
        # workers.
        mask = next(iter(not_padding.values()))  # of any side: all are on one device
        zero = mask.new_zeros((), dtype=torch.float32)
        self.values: dict[str, Tensor] = dict.fromkeys(factors, zero)

        self.hooks: dict[MixheadAttention, RemovableHandle] = {}
        self.with_gradients = False
        self.without_graph: set[MixheadAttention] = set()
        self.sample_size: int | Tensor = 0
        # The derivative of the loss that is differentiated in the end, such as the scale of fp16.
        self.d_loss: Tensor | None = None

    def __enter__(self) -> "RegularizedPass":
        self.with_gradients = torch.is_grad_enabled()
        for attention in self.query_masks:
            self._hook(attention, self._in_first_computation)
        return self

    def __exit__(self, *exception: Any) -> None:
        for attention in self.query_masks:
            self._unhook(attention)

    def _hook(self, attention: MixheadAttention, hook: Hook) -> None:
        self._unhook(attention)
        self.hooks[attention] = attention.register_attention_hook(hook)

    def _unhook(self, attention: MixheadAttention) -> None:
        handle = self.hooks.pop(attention, None)
        if handle is not None:
            handle.remove()

    def _in_first_computation(
        self, attention: MixheadAttention, inputs: AttentionInputs, out: Tensor
    ) -> Tensor:
        """Return `out` [B, H', Nq, Dv] with the penalties attached, and add up their values."""
        if self.with_gradients and not torch.is_grad_enabled():  # in a checkpointed layer
            self.without_graph.add(attention)
        penalties = self._penalties(attention, inputs)
        for name, penalty in penalties.items():
            self.values[name] = self.values[name] + penalty.detach()
        return self._attach(penalties, out)

    def _in_recomputation(
        self, attention: MixheadAttention, inputs: AttentionInputs, out: Tensor
    ) -> Tensor:
        """Return `out` of an attention that is computed again, with the penalties attached.

        The backward pass computes checkpointed layers again. Their values were added before.
        """
        self._unhook(attention)
        if not torch.is_grad_enabled():  # an earlier backward pass failed before it came here
            return out
        return self._attach(self._penalties(attention, inputs), out)

    def _penalties(self, attention: MixheadAttention, inputs: AttentionInputs) -> dict[str, Tensor]:
        """Return the penalties of one call, scalars in float32 or better."""
        not_padding = self.query_masks[attention]
        penalties = {}
        with without_autocast(not_padding.device):
            for name in self.factors:
                if PENALTIES[name].acts_on(attention):
                    penalties[name] = PENALTIES[name].compute(attention, inputs, not_padding)
        return penalties

    def _attach(self, penalties: dict[str, Tensor], out: Tensor) -> Tensor:
        for name, penalty in penalties.items():
            out = _AddAuxiliaryLoss.apply(out, penalty, self, self.factors[name])
        return out

    def add_to(self, loss: Tensor, sample_size: int | Tensor) -> Tensor:
        """Return the loss with the weighted penalties, in float32 or better.

        fairseq divides the gradients of all batches and workers of one update by the sum of their
        sample sizes. So the penalties end as their weighted mean.

        Args:
            loss: a sum over the batch, scalar
            sample_size: the sample size of the batch, by which the penalties are multiplied
        """
        self.sample_size = sample_size
        # Detached: this sum changes the number alone. The gradients come from _AddAuxiliaryLoss.
        penalties = sum(factor * self.values[name] for name, factor in self.factors.items())
        loss = upcast(loss) + sample_size * penalties
        if loss.requires_grad:
            # The backward pass calls it first, before it comes to any attention.
            loss.register_hook(self._begin_backward_pass)
        return loss

    def _begin_backward_pass(self, d_loss: Tensor) -> None:
        self.d_loss = d_loss.sum()  # a scalar; the loss of fairseq's adaptive_loss is [1]
        for attention in self.without_graph:
            self._hook(attention, self._in_recomputation)


class _AddAuxiliaryLoss(torch.autograd.Function):
    """The identity on `out`; its derivative treats the penalty as a part of the loss.

    It keeps the whole pass, whose `sample_size` and `d_loss` become known only after `forward`.
    """

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, penalty: Tensor, regularized: RegularizedPass, factor: float
    ) -> Tensor:
        ctx.regularized = regularized
        ctx.factor = factor
        ctx.dtype = penalty.dtype
        return out.view_as(out)  # a new tensor: autograd has no function for an unchanged input

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        d_loss = ctx.regularized.d_loss
        if d_loss is None:
            raise RuntimeError(
                "the outputs of a regularized pass are differentiated without its loss"
            )
        d_penalty = d_loss * ctx.regularized.sample_size * ctx.factor
        return d_out, d_penalty.to(ctx.dtype), None, None
