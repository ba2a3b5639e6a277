"""What people use or write instead of the plugin: each computes one call of causal attention.

Torch's own attentions and FlexAttention cannot mix heads. What mixes is the formula in a few lines,
whole or over blocks of queries, as it stands or compiled by `torch.compile`.
"""

import functools
import os
import shutil
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.reference import mix_heads

Attend = Callable[[AttentionInputs], Tensor]


class Opponent(NamedTuple):
    """One of the others.

    Args:
        make: returns what computes the output of a call. For a compiled opponent it is another
            function with each call of `make`, for which nothing is compiled yet.
        mixes: whether it computes every normalizer and mixing; else it computes softmax alone
        compiled: whether `torch.compile` makes its code, which takes seconds at the first call
        forward_only: whether no backward pass is timed
    """

    make: Callable[[], Attend]
    mixes: bool = False
    compiled: bool = False
    forward_only: bool = False


# ---- torch's own, without mixing ---------------------------------------------------------------


def with_mask(call: AttentionInputs) -> Tensor:
    """Attend with a mask of floats, as fairseq passes it; `call.attn_mask` holds it."""
    return F.scaled_dot_product_attention(
        *call[:3], attn_mask=call.attn_mask, dropout_p=call.dropout_p, scale=call.scale
    )


def is_causal(call: AttentionInputs) -> Tensor:
    """Attend by the kernel that torch chooses."""
    return F.scaled_dot_product_attention(
        *call[:3], dropout_p=call.dropout_p, is_causal=call.causal, scale=call.scale
    )


def flash(call: AttentionInputs) -> Tensor:
    """Attend by torch's FlashAttention, or end with the reason."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return is_causal(call)


def flex() -> Attend:
    """Return FlexAttention with a mask of blocks; it has no dropout."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled_flex = torch.compile(flex_attention, dynamic=False)

    def attend(call: AttentionInputs) -> Tensor:
        # The mask is made outside of what is compiled and timed.
        mask = None
        if call.causal:
            mask = block_mask(call.query.shape[2], str(call.query.device))
        return compiled_flex(*call[:3], block_mask=mask, scale=call.scale)

    return attend


def flash_in_triton() -> Attend:
    """Return this repository's FlashAttention-2 in triton, which has no causal mask."""
    from benchmarks import flash_attention  # imports triton

    return flash_attention.attend


@functools.lru_cache(1)
def block_mask(length: int, device: str):
    """Return FlexAttention's causal mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(batch, head, query, key):
        return query >= key

    return create_block_mask(visible, None, None, length, length, device)


# ---- the formula -------------------------------------------------------------------------------


def l2(scores: Tensor) -> Tensor:
    weights = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    return weights / torch.linalg.vector_norm(weights, dim=-1, keepdim=True)


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda scores: scores.softmax(-1),
    "sigsoftmax": lambda scores: (scores + F.logsigmoid(scores)).softmax(-1),
    "l2": l2,
}


def rows_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor | None,
    first: int,
    call: AttentionInputs,
) -> Tensor:
    """Return the output of some queries [B, H, n, D], the first of which is at position `first`."""
    scores = query @ key.transpose(2, 3) * call.scale  # [B, H, n, Nk]
    if call.causal:
        every = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device)
        hidden = every.triu(first + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = mix_heads(WEIGHTS[call.normalizer](scores), mixing)
    return F.dropout(weights, call.dropout_p) @ value


def loop(call: AttentionInputs, block: int, checkpointed: bool = False) -> Tensor:
    """Attend block by block of queries; each block sees the keys up to its end.

    Args:
        call: what is asked for
        block: queries of a block
        checkpointed: compute the weights again in the backward pass, so that they need not be kept
    """
    length = call.query.shape[2]
    by_query = call.mixing is not None and call.mixing.dim() == 4
    outputs = []
    for first in range(0, length, block):
        end = min(first + block, length)
        seen = end if call.causal else length
        query = call.query[:, :, first:end]
        key = call.key[:, :, :seen]
        value = call.value[:, :, :seen]
        mixing = call.mixing[:, first:end] if by_query else call.mixing
        given = (query, key, value, mixing, first, call)
        if checkpointed:
            outputs.append(checkpoint(rows_of, *given, use_reentrant=False))
        else:
            outputs.append(rows_of(*given))
    return torch.cat(outputs, 2)


def formula(call: AttentionInputs) -> Tensor:
    """Attend with all weights in memory."""
    return loop(call, call.query.shape[2])


# ---- the table ---------------------------------------------------------------------------------


def eager(attend: Attend) -> Callable[[], Attend]:
    return lambda: attend


def by_compiler(attend: Attend) -> Callable[[], Attend]:
    def make() -> Attend:
        def run(call: AttentionInputs) -> Tensor:
            return attend(call)

        # torch keeps what it compiles by code object and, after eight kinds of inputs, compiles no
        # more. So each contender has a code object of its own.
        run.__code__ = run.__code__.replace()
        # fullgraph: a part that torch cannot compile is an error, and does not run slowly instead.
        # dynamic=False: else it would compile a second size with symbols for sizes, which run
        # slower.
        return torch.compile(run, fullgraph=True, dynamic=False)

    return make


BLOCKS = (64, 128, 256)  # queries of a block


def loops() -> dict[str, Opponent]:
    """Return the loops over blocks of queries: eager, compiled, checkpointed."""
    found = {}
    for block in BLOCKS:
        plain = functools.partial(loop, block=block)
        checkpointed = functools.partial(loop, block=block, checkpointed=True)
        found[f"loop {block}"] = Opponent(eager(plain), mixes=True)
        found[f"loop {block}, checkpointed"] = Opponent(eager(checkpointed), mixes=True)
        found[f"loop {block}, compiled"] = Opponent(by_compiler(plain), mixes=True, compiled=True)
        if block == 128:  # one of them: a compiler needs minutes for each
            both = Opponent(by_compiler(checkpointed), mixes=True, compiled=True)
            found[f"loop {block}, compiled, checkpointed"] = both
    return found


OPPONENTS = {
    "mask": Opponent(eager(with_mask)),
    "is_causal": Opponent(eager(is_causal)),
    "flash": Opponent(eager(flash)),
    "FlashAttention-2 in triton": Opponent(flash_in_triton),
    "flex": Opponent(flex, compiled=True, forward_only=True),
    "formula": Opponent(eager(formula), mixes=True),
    "formula, compiled": Opponent(by_compiler(formula), mixes=True, compiled=True),
    **loops(),
}


def problem(provider: str, device: str) -> str:
    """Return why an opponent cannot run on this machine, or an empty string."""
    if provider not in OPPONENTS or not OPPONENTS[provider].compiled:
        return ""
    # For a CPU torch.compile writes C++; for a GPU triton builds a launcher in C.
    variable = "CXX"
    names = ["c++", "g++", "clang++"]
    if device == "cuda":
        variable = "CC"
        names = ["cc", "gcc", "clang"]
    if os.environ.get(variable):
        names = [os.environ[variable]]
    if any(shutil.which(name) for name in names):
        return ""
    return f"needs a compiler: {names[0]} is not installed"
