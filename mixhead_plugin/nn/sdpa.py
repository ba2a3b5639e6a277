"""Mix the heads of one module that calls F.scaled_dot_product_attention.

    class CausalSelfAttention(nn.Module):         after `mix`, this one instance is of a subclass
        def forward(self, x):                     whose forward
            q, k, v = ...                           listens to the calls of torch,
            y = F.scaled_dot_product_attention(     runs the forward on the left,
                q, k, v, is_causal=True)            computes this one call with mixed heads,
            ...                                     and raises if there was none

        def step(self, x, cache):                 so does each other method that calls the function,
            ...                                     as one that a model calls to generate

`mixed_class.py` makes the subclass. The parts become children of the module, so their parameters
have the names of the other doors. A mixing reads the query that the function gets, so behind norms
and rotary positions.
"""

import dataclasses
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from mixhead_plugin.nn.example import (
    CallSizes,
    called_twice,
    check_query,
    first_argument,
    is_sdpa,
)
from mixhead_plugin.ops.masks import hide_lowest
from mixhead_plugin.parts import PARTS, HostedAttention, Variant, record

ATTRIBUTE = "mixhead"  # the attribute of a mixed module that holds its `MixedSdpa`
# What calls the forward pass of every `torch.autograd.Function`, whichever its signature is.
_APPLY = torch.autograd.Function.apply.__code__


class MixedSdpa(HostedAttention):
    """What a mixed module has beside its parts.

    Args:
        name: the name of the module in the model, for messages
        variant: what is asked for
        call_sizes: the sizes of the module's calls
    """

    def __init__(self, name: str, variant: Variant, call_sizes: CallSizes):
        variant = dataclasses.replace(variant, head_dim=call_sizes.head_dim)
        embed_dim = call_sizes.embed_dim
        if embed_dim is None:  # then nothing reads the input, so its size has no effect
            embed_dim = call_sizes.heads * call_sizes.head_dim
        sizes = variant.sizes(call_sizes.heads, embed_dim)
        # The values may have another size than the queries, also 0. The variant does not tell it,
        # because a saved entry has it among the sizes of the calls.
        heads_per_mixed = sizes.num_heads // sizes.mixed_heads
        super().__init__(variant, sizes._replace(value_dim=call_sizes.value_dim * heads_per_mixed))
        self.name = name
        self.call_sizes = call_sizes
        self.reads_input = reads_input(variant)

    def entry(self) -> dict[str, Any]:
        """Return what the metadata of a state dict tell of the module."""
        return record.describe(self.variant, calls=record.CALLS_SDPA, **self.call_sizes._asdict())


def reads_input(variant: Variant) -> str:
    """Return the first field whose part reads the input of the queries; empty if none does."""
    for name, row in variant.part_kinds().items():
        if row.reads == "input":
            return name
    return ""


class MixedCall(TorchFunctionMode):
    """One call of a mixed module, in which it replaces the call of scaled_dot_product_attention.

    Args:
        module: what is called
        x: its first argument, if that is a tensor
        is_forward: whether its forward runs, and not another method
    """

    def __init__(self, module: nn.Module, x: Tensor | None, is_forward: bool):
        super().__init__()
        self.module = module
        self.is_forward = is_forward
        self.attention: MixedSdpa = module.__dict__[ATTRIBUTE]
        self.x = x
        self.attended = 0
        # Whether a mixed module that this one has called computes its attention now.
        self.inner_attends = False
        self.has_gradients = torch.is_grad_enabled()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_sdpa(func) and not self.inner_attends:
            return self.attend(*args, **kwargs)

        if (
            isinstance(func, FunctionType)
            and func.__module__ == "torch._tensor"
            and torch.compiler.is_compiling()
        ):
            # Some methods of tensors are Python functions, such as `Tensor.split`. The compiler
            # cannot follow these functions, but knows the methods by their names.
            return getattr(args[0], func.__name__)(*args[1:], **kwargs)
        return func(*args, **kwargs)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Take the arguments of F.scaled_dot_product_attention, and return the mixed outputs.

        Args:
            query: [B, H, Nq, D]
            key: [B, H, Nk, D], or with fewer heads, by `enable_gqa` or one for all
            value: [B, H, Nk, Dv], likewise
            attn_mask: broadcastable to [B, H, Nq, Nk]; bool, True is visible, or floats to add.
                Where the normalizer is not softmax, the least number of their type hides a key, as
                -inf does; a larger one, as -1e9, does not
            dropout_p: probability of dropping a mixed weight
            is_causal: query t sees the keys up to t, also where there are more keys than queries
            scale: factor on query . key; None for D ** -0.5
            enable_gqa: whether neighbouring heads of queries share a head of keys and of values

        Returns:
            [B, H, Nq, Dv]; where heads mix in groups, neighbours are parts of one mixed head
        """
        self._refuse_second_call()
        self._refuse_hidden_call()
        self._refuse_to_learn_nothing()
        self._check(query, key, value, attn_mask, is_causal, enable_gqa)
        # One of them may have a single sentence for all, as learned queries have.
        batch = query.size(0) if key.size(0) == 1 else key.size(0)
        query = query.expand(batch, -1, -1, -1)
        key = key.expand(batch, -1, -1, -1)
        value = value.expand(batch, -1, -1, -1)
        x = self.x
        if self.attention.reads_input and x is not None:
            x = x.expand(batch, -1, -1)

        mask, causal = _masks(attn_mask, is_causal, query, key)
        if self.attention.variant.normalizer != "softmax":
            mask = hide_lowest(mask)

        # Without mixing, the attention is computed by the function itself, which is no call of the
        # modules around. `try`, because older compilers do not know context managers of ours.
        around = _calls_around()
        for call in around:
            call.inner_attends = True
        try:
            out, _ = self.attention.attend_in(
                self.module,
                query,
                key,
                value,
                projected=query,
                x=x,
                attn_mask=mask,
                causal=causal,
                dropout_p=dropout_p,
                scale=self.attention.sizes.head_dim**-0.5 if scale is None else scale,
            )  # [B, Nq, H', ...]
        finally:
            for call in around:
                call.inner_attends = False

        several = self.attention.heads_per_mixed
        if several > 1:  # the module wants the outputs of as many heads as it has
            out = out.unflatten(3, (several, -1)).flatten(2, 3)  # [B, Nq, H, Dv]
        # In memory as torch has them, in the order of the queries, because some modules put the
        # heads side by side by `view`, which needs it.
        if query.stride(1) < query.stride(2):  # as projections give them, [B, Nq, H, D] in memory
            return out.contiguous().transpose(1, 2)
        return out.transpose(1, 2).contiguous()

    def _refuse_second_call(self) -> None:
        name = self.attention.name
        self.attended += 1
        if self.attended == 1:
            return
        if self.is_forward:
            raise RuntimeError(called_twice(name))
        raise RuntimeError(
            f"{name}: called scaled_dot_product_attention twice in one call of a method; must call "
            "it once, or the module, as self(x), each time"
        )

    def _refuse_hidden_call(self) -> None:
        """Refuse a call of another module, and one that is computed again when nobody listens.

        The frames from the call up to `run` tell it:

            run                                 listens until the forward returns
              forward of the module             and the functions that it calls: fine
                nn.Module._call_impl            a module inside, which was not mixed: the example
                                                has not reached it
                torch/utils/checkpoint.py       the backward pass calls again, when `run` has ended
                Function.apply                  likewise, where there are gradients
                  F.scaled_dot_product_attention
        """
        if torch.compiler.is_compiling():
            return  # a compiled graph has the mixing, whoever computes it again
        name = self.attention.name
        frame = sys._getframe()
        while frame is not None and frame.f_code is not run.__code__:
            if frame.f_code is nn.Module._call_impl.__code__:
                inner = type(frame.f_locals["self"]).__name__
                raise RuntimeError(
                    f"{name}: {inner} inside of it calls scaled_dot_product_attention, and was not "
                    "mixed; must be reached by the example"
                )
            is_checkpoint = frame.f_code.co_filename == torch.utils.checkpoint.__file__
            is_function = self.has_gradients and frame.f_code is _APPLY
            if is_checkpoint or is_function:
                raise RuntimeError(
                    f"{name}: calls scaled_dot_product_attention inside a checkpoint or an "
                    "autograd.Function of its own, whose backward pass would not mix; must be "
                    "checkpointed whole"
                )
            frame = frame.f_back  # type: ignore[assignment]

    def _refuse_to_learn_nothing(self) -> None:
        """Refuse to train a mixing if the module computes its attention without gradients.

        Whoever generates or evaluates needs none. Then the whole model is called without them, or
        is in eval mode, or another method than forward is called.
        """
        trains = self.has_gradients and self.is_forward and self.module.training
        if not trains or torch.is_grad_enabled():
            return
        for option in PARTS:
            part = getattr(self.module, option)
            if part is not None and any(weight.requires_grad for weight in part.parameters()):
                raise RuntimeError(
                    f"{self.attention.name}: calls scaled_dot_product_attention without gradients, "
                    f"as under no_grad, so its {option} cannot learn; must call it with them, or "
                    f"{option} must be frozen, by requires_grad_(False)"
                )

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        enable_gqa: bool,
    ) -> None:
        """Refuse inputs that the parts were not built for, and what torch refuses."""
        name = self.attention.name
        call_sizes = self.attention.call_sizes
        reader = self.attention.reads_input
        check_query(name, query)
        sizes = {"heads": query.size(1), "head_dim": query.size(3), "value_dim": value.size(3)}
        for what, size in sizes.items():
            wanted = getattr(call_sizes, what)
            if size != wanted:
                raise ValueError(
                    f"{name}: its {what} is {size}, must be {wanted}, as when it was mixed"
                )
        for what, tensor in (("key", key), ("value", value)):
            heads = tensor.size(1)
            if heads in (1, call_sizes.heads) or (enable_gqa and call_sizes.heads % heads == 0):
                continue
            raise ValueError(
                f"{name}: its {what} has {heads} heads, must have {call_sizes.heads}, or a divisor "
                "of it with enable_gqa"
            )
        if attn_mask is not None and is_causal:
            raise RuntimeError(f"{name}: attn_mask must not be given with is_causal")
        if not reader:
            return
        shape = None if self.x is None else list(self.x.shape)
        shape_of_queries = [query.size(0), query.size(2), self.attention.sizes.embed_dim]
        if shape != shape_of_queries:
            raise ValueError(
                f"{name}: the first tensor that it gets is {shape}, must be {shape_of_queries}, "
                f"which {reader} reads"
            )


def _masks(
    attn_mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor
) -> tuple[Tensor | None, bool]:
    """Return what to add to the scores, and whether attention is causal.

    It is causal as `ops.attention` has it: the last query sees all keys. With `is_causal` of torch,
    the first query sees one.
    """
    if isinstance(attn_mask, CausalBias):
        if attn_mask.variant == CausalVariant.LOWER_RIGHT:
            return None, True
        attn_mask = None
        is_causal = True

    if is_causal:
        n_queries = query.size(2)
        n_keys = key.size(2)
        if n_queries == n_keys:
            return None, True
        attn_mask = torch.ones(n_queries, n_keys, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        nothing = torch.zeros_like(attn_mask, dtype=query.dtype)
        return nothing.masked_fill(~attn_mask, -torch.inf), False
    return attn_mask, False


def _calls_around() -> list[MixedCall]:
    """Return the calls of mixed modules that have called the one whose attention is computed."""
    return [mode for mode in _get_current_function_mode_stack() if isinstance(mode, MixedCall)]


def run(
    method: Callable[..., Any],
    first: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    must_attend: bool = True,
) -> Any:
    """Run the forward of a module, or another method, with mixed heads.

    Args:
        method: a function of the module's class, such as its forward
        first: the name of its first parameter behind `self`
        module: a mixed module
        args, kwargs: of the call
        must_attend: whether it loses the mixing if it does not call the function
    """
    if ATTRIBUTE not in module.__dict__:  # a new instance that the model has made by type(module)
        return method(module, *args, **kwargs)
    call = MixedCall(module, first_argument(first, args, kwargs), is_forward=must_attend)
    with call:
        output = method(module, *args, **kwargs)
    if must_attend and call.attended == 0:
        mode = "training" if module.training else "evaluation"
        raise RuntimeError(
            f"{call.attention.name}: lost the mixing, it did not call "
            f"scaled_dot_product_attention in this call ({mode} mode); must call it each time"
        )
    return output


def is_mixed(module: nn.Module) -> bool:
    """Return whether a module is mixed by `nn`, so that its calls are to be run by `run`.

    `hf.mix` notes something else under the same name.
    """
    return isinstance(vars(module).get(ATTRIBUTE), MixedSdpa)
