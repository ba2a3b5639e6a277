"""Penalties on the heads of a whole model, as part of the loss that a criterion computes.

Every attention computes its penalty within its own forward pass, and its gradient sets out from there too: only there
are the matrices of the batch at hand, with activation checkpointing and sharded parameters as well, and only there does
the gradient meet the others of its layer.
"""

import weakref
from typing import Any, Callable, Dict, NamedTuple, Optional, Set, Union

import torch
from torch import Tensor, nn

from mixhead_plugin.modules.attention import Heads, MixheadAttention
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.ops.penalties import orthogonal_penalty, rank_penalty
from mixhead_plugin.ops.reference import upcast


class Penalty(NamedTuple):
    """One entry of the flags `--<name>-weight`; logged as `<name>_loss`."""

    of: Callable[[Heads, Tensor], Tensor]  # heads, real queries [B, Nq] -> scalar, in float32 or better
    on_mixing: bool  # whether it is a penalty on a trained M, else on the attention matrices
    weight: float  # the default
    formula: str
    source: str

    def acts_on(self, attention: MixheadAttention) -> bool:
        if self.on_mixing:
            return HEAD_MIXINGS[attention.head_mixing_kind].trained
        return attention.num_heads > 1


PENALTIES = {
    "orthogonal": Penalty(
        lambda heads, real: orthogonal_penalty(heads.mixing, real),
        True,
        0.0001,
        "squared Frobenius norm of M^T M - I",
        "mixhead eq. 16",
    ),
    "rank": Penalty(
        lambda heads, real: rank_penalty(heads.weights(), real),
        False,
        0.0,
        "squared Frobenius norms of P_i P_j^T and of P_i^T P_j, means over pairs of heads and sentences",
        "mixhead eq. 20",
    ),
}


class RegularizedPass:
    """Context in which the attentions of `model` add up their penalties; afterwards `add_to` puts them on the loss.

    An attention that LayerDrop leaves out is left out of the sums. Where fairseq's activation checkpointing computes a
    layer again in the backward pass, its attentions still take part then; such a pass is to be differentiated before
    the next one begins.

    Args:
        model: any model; attentions that are not the plugin's have no penalties
        weights: what each penalty, a key of PENALTIES, is multiplied with
        real: for "encoder" and "decoder" the queries that are not padding, bool [B, Nq]

    Attributes:
        attentions: for each penalty the number of attentions of the model that it can act on
        values: for each penalty its sum over the attentions of this pass, a detached scalar, unweighted

    Raises:
        RuntimeError: on entering, an earlier pass with checkpointed activations still waits for its backward pass
    """

    def __init__(self, model: nn.Module, weights: Dict[str, float], real: Dict[str, Tensor]):
        self.weights = weights
        self.sites: Dict[MixheadAttention, Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, MixheadAttention):
                self.sites[module] = real["decoder" if "decoder" in name.split(".") else "encoder"]
        self.attentions = {name: sum(map(PENALTIES[name].acts_on, self.sites)) for name in weights}
        device = next(iter(self.sites.values())).device if self.sites else None
        self.values = {name: torch.zeros((), device=device) for name in weights}

        self.open = False  # whether the forward pass is on
        self.differentiable = False
        self.recomputed: Set[MixheadAttention] = set()  # attentions of which the pass that counts is still to come
        self.sample_size: Union[int, Tensor] = 0
        self.d_loss: Optional[Tensor] = None  # what the loss is multiplied with before it is differentiated
        self.graph: Callable[[], Any] = lambda: None  # something as long as there is a graph behind the loss

    def __enter__(self) -> "RegularizedPass":
        for attention in self.sites:
            if attention.hook is not None and attention.hook.is_awaited(attention):
                raise RuntimeError("a regularized pass with checkpointed activations is not yet differentiated")
        self.open = True
        self.differentiable = torch.is_grad_enabled()
        for attention in self.sites:
            attention.hook = self
        return self

    def __exit__(self, *exception: Any) -> None:
        self.open = False
        failed = exception[0] is not None
        for attention in self.sites:
            if failed or attention not in self.recomputed:
                attention.hook = None

    def is_awaited(self, attention: MixheadAttention) -> bool:
        """Whether a backward pass may still come that computes `attention` again."""
        return attention in self.recomputed and self.d_loss is None and self.graph() is not None

    def __call__(self, attention: MixheadAttention, out: Tensor, heads: Heads) -> Tensor:
        """`out` of an attention, behind which its penalties wait for the backward pass."""
        if self.open and self.differentiable and not torch.is_grad_enabled():
            self.recomputed.add(attention)
        if not self.open:
            attention.hook = None
            if not torch.is_grad_enabled():  # not the recomputation, which was given up: saves the time
                return out
        for name, weight in self.weights.items():
            if PENALTIES[name].acts_on(attention):
                with torch.autocast(out.device.type, enabled=False):
                    penalty = PENALTIES[name].of(heads, self.sites[attention])
                if self.open:
                    self.values[name] = self.values[name] + penalty.detach()
                out = _Charge.apply(out, penalty, self, weight)
        return out

    def add_to(self, loss: Tensor, sample_size: Union[int, Tensor]) -> Tensor:
        """`loss`, the sum over a batch, plus the weighted penalties times `sample_size`; in float32 or better.

        fairseq divides the gradients of all batches and workers of one update by the sum of their sample sizes: what
        remains of the penalties is their weighted mean.
        """
        self.sample_size = sample_size
        loss = upcast(loss) + sample_size * sum(weight * self.values[name] for name, weight in self.weights.items())
        if loss.requires_grad:
            graph = _Graph()
            self.graph = weakref.ref(graph)

            def begin(d_loss: Tensor, graph: _Graph = graph) -> None:
                self.d_loss = d_loss.sum()

            loss.register_hook(begin)  # called before anything behind the loss is differentiated
        return loss


class _Graph:
    """Lives in a hook of the loss, and so as long as the loss can be differentiated."""


class _Charge(torch.autograd.Function):
    """The identity, which differentiates a penalty as if it stood in the loss."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, penalty: Tensor, of_pass: RegularizedPass, weight: float) -> Tensor:
        ctx.of_pass, ctx.weight, ctx.dtype = of_pass, weight, penalty.dtype
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        d_loss = ctx.of_pass.d_loss
        if d_loss is None:
            raise RuntimeError("outputs of a regularized pass are differentiated, but not the loss that it belongs to")
        return d_out, (d_loss * ctx.of_pass.sample_size * ctx.weight).to(ctx.dtype), None, None
