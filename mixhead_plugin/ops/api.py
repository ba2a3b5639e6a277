"""The public function `attention`: check the arguments, choose an implementation, call it."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mixhead_plugin.ops import fused
from mixhead_plugin.ops.blockwise import blockwise_attention
from mixhead_plugin.ops.blockwise.plan import block_size
from mixhead_plugin.ops.inputs import DIMENSIONS, AttentionInputs
from mixhead_plugin.ops.low_rank import LowRank
from mixhead_plugin.ops.normalizers import NORMALIZERS, sink_problem
from mixhead_plugin.ops.operators import no_derivative
from mixhead_plugin.ops.reference import reference_attention, reference_with_weights
from mixhead_plugin.ops.relative import RelativeScores
from mixhead_plugin.ops.transforms import exporting, transformations, unserved
from mixhead_plugin.ops.triton import support, triton_attention


class Implementation(NamedTuple):
    """One value of the flag ``--attention-impl``."""

    run: Callable[[AttentionInputs], Tensor]
    summary: str


IMPLEMENTATIONS = {
    "reference": Implementation(
        reference_attention, "the formula as it stands; all weights in memory"
    ),
    "blockwise": Implementation(
        blockwise_attention, "exact, by blocks of queries; memory linear in the length"
    ),
    "triton": Implementation(triton_attention, "fused GPU kernels; they ran on NVIDIA H200s"),
}

# What every implementation computes with.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOATS_IN_WORDS = "float16, bfloat16, float32 or float64"
# These have one dtype.
AS_THE_QUERY = ("query", "key", "value", "relative_query", "relative_key")
# Up to as many keys, blocks are not faster, however many queries there are.
SHORT_ROWS = 16


def implementation_problem(impl: str) -> str:
    """Return why `impl` cannot be used on this machine, in a few words; empty if it can.

    Args:
        impl: "auto" or a key of `IMPLEMENTATIONS`
    """
    if impl != "auto" and impl not in IMPLEMENTATIONS:
        return "unknown"
    return support.machine_problem() if impl == "triton" else ""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    normalizer: str = "softmax",
    mixing: Tensor | LowRank | None = None,
    causal: bool = False,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    relative: RelativeScores | None = None,
    gain: Tensor | None = None,
    sink: Tensor | None = None,
    score_mixing: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    impl: str = "auto",
    need_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute multi-head attention with a normalizer and mixed heads (mixhead eqs 8-12).

    Mixing one matrix for all queries is the post-softmax projection of talking-heads attention
    (Shazeer et al. 2020).

    Args:
        query: [B, H, Nq, D]; float16, bfloat16, float32 or float64, as `key` and `value`; dense
        key: [B, H, Nk, D]
        value: [B, H', Nk, Dv]; H' differs from H only with a rectangular `mixing`
        normalizer: a key of `NORMALIZERS`
        mixing: M, any of these dtypes, [H, H'] or [B, Nq, H, H']; M[..., j, i]: weight of source
            head j in mixed head i. Or `LowRank(left, right, diagonal)`, any of these dtypes,
            [B, Nq, H, rank] twice and [B, Nq, H], for M = I + left right^T + diag(diagonal); then
            H' = H. M is built only for the kernels.
        causal: query t sees the keys up to t + (Nk - Nq)
        attn_mask: any of these dtypes, additive, broadcastable to [B, H, Nq, Nk]; -inf hides a key
        key_padding_mask: bool [B, Nk], True hides a key
        relative: `RelativeScores(query, key)`, [B, H, Nq, R] and [H, Nk or Nq + Nk - 1, R] in the
            dtype of `query`; adds query[b, h, t] . key[h, k - t + Nq - 1] to the score of query t
            and key k
        gain: any of these dtypes, [H, Nq + Nk - 1]; weights times gain[:, k - t + Nq - 1], before
            mixing (l2 essay, 'Preliminary Solution')
        sink: any of these dtypes, [H]; scores of one more key for each row, whose value is 0
            (Miller 2023, softmax1; gpt-oss); for normalizers that take one
        score_mixing: L, any of these dtypes, [H, H] or [B, Nq, H, H]; scale * query . key of head i
            becomes the sum over j of L[..., j, i] times that of head j, before relative scores and
            masks are added (talking heads)
        dropout_p: probability of dropping a (mixed) weight; the caller passes 0 outside of training
        scale: factor on query . key; None for D ** -0.5
        impl: "auto" or a key of `IMPLEMENTATIONS`. "auto" chooses what is usually the fastest;
            any other choice runs or raises.
        need_weights: also return the mixed weights [B, H', Nq, Nk]. Then `impl` is ignored, because
            "reference" alone holds them.

    Returns:
        [B, H', Nq, Dv] in the dtype of `value`. A row that sees no key is 0. With `need_weights` a
        pair of it and the weights [B, H', Nq, Nk] before dropout, in float32 or better.

    Raises:
        ValueError: an unknown name, or tensors whose shapes do not fit together
        TypeError: what is no tensor, a mask of the wrong dtype, dtypes that differ, other floats
            such as float8, nested and sparse tensors
        RuntimeError: `impl` cannot run here, with the reason
        NotImplementedError: `impl` lacks a derivative that is asked for
    """
    _check_are_tensors({"query": query, "key": key, "value": value})
    options = {
        "attn_mask": attn_mask,
        "key_padding_mask": key_padding_mask,
        "gain": gain,
        "sink": sink,
        "score_mixing": score_mixing,
    }
    _check_are_tensors({name: option for name, option in options.items() if option is not None})
    # These two are taken apart into several fields, so they are checked before there is a record.
    _check_relative(relative)
    _check_mixing(mixing)
    inputs = AttentionInputs(
        query=query,
        key=key,
        value=value,
        attn_mask=attn_mask,
        key_padding_mask=key_padding_mask,
        relative_query=None if relative is None else relative.query,
        relative_key=None if relative is None else relative.key,
        gain=gain,
        sink=sink,
        score_mixing=score_mixing,
        normalizer=normalizer,
        causal=causal,
        dropout_p=dropout_p,
        scale=_usual_scale(query) if scale is None else scale,
    ).with_mixing(mixing)
    out, weights = attend_with_weights(inputs, impl, need_weights)
    if weights is None:
        return out
    return out, weights


def _check_are_tensors(arguments: Mapping[str, object]) -> None:
    for name, argument in arguments.items():
        if not isinstance(argument, Tensor):
            raise TypeError(f"{name} is {type(argument).__name__}: must be a tensor")


def _check_relative(relative: object) -> None:
    """Refuse what is no pair of tensors that gives relative scores."""
    if relative is None:
        return
    if not isinstance(relative, RelativeScores):
        raise TypeError(
            f"relative is {type(relative).__name__}: must be ops.RelativeScores(query, key)"
        )
    # Without one of them the other would be left out in silence.
    _check_are_tensors({"relative.query": relative.query, "relative.key": relative.key})


def _check_mixing(mixing: object) -> None:
    """Refuse what is neither M nor all of its factors."""
    if mixing is None or isinstance(mixing, Tensor):
        return
    if not isinstance(mixing, LowRank):
        raise TypeError(
            f"mixing is {type(mixing).__name__}: must be a tensor or ops.LowRank(left, right, "
            "diagonal)"
        )
    _check_are_tensors({f"mixing.{name}": each for name, each in mixing._asdict().items()})


def _usual_scale(query: Tensor) -> float:
    """Return D ** -0.5; 1 where D is 0."""
    if query.is_nested:
        return 1.0  # it has no shape, and `check` will refuse it
    # `numel` is a number while torch.jit.trace runs; an entry of the shape would be a tensor there.
    return max(1, query.shape[-1:].numel()) ** -0.5


def attend_with_weights(
    inputs: AttentionInputs, impl: str, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the output of `attention` and, where needed, the mixed weights.

    Args:
        inputs: the inputs of the call
        impl: "auto" or a key of `IMPLEMENTATIONS`
        need_weights: whether to return the weights; then "reference" computes all, because no other
            implementation ever holds them

    Returns:
        output [B, H', Nq, Dv], and the weights [B, H', Nq, Nk] before dropout or None
    """
    if not need_weights:
        return attend(inputs, impl), None
    check(inputs, impl)
    return reference_with_weights(inputs)


def attend(inputs: AttentionInputs, impl: str) -> Tensor:
    """Compute `attention` for inputs in one record."""
    check(inputs, impl)
    if impl == "auto":
        impl = fastest(inputs)
        if impl == "fused":
            return fused.fused_attention(inputs)
        return IMPLEMENTATIONS[impl].run(inputs)

    # An explicit choice runs or raises.
    if impl == "triton":
        problem = triton_problem(inputs)
        if problem:
            raise RuntimeError(f"impl 'triton': {problem}; usable here: auto, reference, blockwise")
    if impl != "reference":
        lacking = unserved(inputs)
        if lacking:
            raise no_derivative(impl, lacking)
    return IMPLEMENTATIONS[impl].run(inputs)


def check(inputs: AttentionInputs, impl: str) -> None:
    """Refuse inputs that do not fit together, and names that are unknown.

    A tiny call takes much of its time here. So names are made readable only where something is
    wrong.

    Raises:
        ValueError, TypeError: as `attention`
    """
    _check_options(inputs, impl)
    operands = inputs.operands()
    _check_tensors(inputs)
    _check_dimensions(operands)
    _check_dtypes(inputs, operands)
    _check_shapes(inputs, operands)
    _check_attn_mask(inputs)
    _check_padding_mask(inputs)


def _check_options(inputs: AttentionInputs, impl: str) -> None:
    """Refuse names that are unknown, and options that do not fit together."""
    if inputs.normalizer not in NORMALIZERS:
        raise ValueError(
            f"normalizer {inputs.normalizer!r}: must be one of {', '.join(NORMALIZERS)}"
        )
    if impl != "auto" and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl {impl!r}: must be one of auto, {', '.join(IMPLEMENTATIONS)}")
    if isinstance(inputs.scale, Tensor):
        raise ValueError(f"scale {inputs.scale}: must be a float, not a tensor")
    if not 0.0 <= inputs.dropout_p <= 1.0:
        raise ValueError(f"dropout_p {inputs.dropout_p}: must be a probability")
    if inputs.sink is not None:
        problem = sink_problem(inputs.normalizer)
        if problem:
            raise ValueError(f"sink: {problem}")
    factors = (inputs.mixing_left, inputs.mixing_right, inputs.mixing_diagonal)
    if inputs.mixing is not None and any(factor is not None for factor in factors):
        raise ValueError("mixing: must be M or its factors, not both; with_mixing() sets one")


def _check_tensors(inputs: AttentionInputs) -> None:
    """Refuse what is no dense tensor on the device of the query."""
    device = inputs.query.device
    for name, tensor in inputs.tensors().items():
        if tensor.is_nested:
            wanted = "must be padded, with key_padding_mask for what is no key"
            raise TypeError(f"{_shown(name)} is a nested tensor: {wanted}")
        if tensor.layout != torch.strided:
            raise TypeError(f"{_shown(name)} is {tensor.layout}: must be dense, as by to_dense()")
        if tensor.device != device:
            raise ValueError(
                f"{_shown(name)} is on {tensor.device}: must be on {device}, as the query"
            )


def _check_dimensions(operands: dict[str, Tensor]) -> None:
    """Refuse a query, key or value that has not four dimensions."""
    for name in ("query", "key", "value"):
        shape = operands[name].shape
        if len(shape) != 4:
            raise ValueError(f"{name} {list(shape)}: must be [batch, heads, positions, head size]")


def _check_dtypes(inputs: AttentionInputs, operands: dict[str, Tensor]) -> None:
    """Refuse dtypes that no implementation computes with, and ones that differ from the query's."""
    for name, tensor in operands.items():
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{_shown(name)} is {tensor.dtype}: must be {FLOATS_IN_WORDS}")
        if name in AS_THE_QUERY and tensor.dtype != inputs.query.dtype:
            raise TypeError(
                f"{_shown(name)} is {tensor.dtype}: must be {inputs.query.dtype}, as the query"
            )


def _check_shapes(inputs: AttentionInputs, operands: dict[str, Tensor]) -> None:
    """Refuse shapes that are none of those in DIMENSIONS for the sizes of query, key and value."""
    batch, heads, n_queries, head_dim = inputs.query.shape
    n_keys = inputs.key.shape[2]
    sizes = {
        "B": batch,
        "H": heads,
        "Nq": n_queries,
        "Nk": n_keys,
        "P": max(0, n_queries + n_keys - 1),
        "D": head_dim,
        "H'": heads if inputs.mixing is None else inputs.value.shape[1],
        "Dv": inputs.value.shape[3],
    }
    if inputs.relative_query is not None:
        sizes["R"] = inputs.relative_query.shape[-1:].numel()  # 1 where there is no dimension
    if inputs.mixing_left is not None:
        sizes["rank"] = inputs.mixing_left.shape[-1:].numel()  # likewise
    for name, tensor in operands.items():
        allowed = []
        for dims in DIMENSIONS[name]:
            shape = [sizes[dim] for dim in dims]
            allowed.append(tuple(shape))
        _check_shape(name, tensor, allowed)


def _check_attn_mask(inputs: AttentionInputs) -> None:
    """Refuse an attn_mask that cannot be added to the scores [B, H, Nq, Nk]."""
    mask = inputs.attn_mask
    if mask is None:
        return
    if mask.dtype not in FLOATS:
        raise TypeError(
            f"attn_mask is {mask.dtype}: must be {FLOATS_IN_WORDS}, which is added; -inf hides a "
            "key"
        )
    full = [*inputs.query.shape[:3], inputs.key.shape[2]]
    fits = mask.dim() <= 4
    for size, wanted in zip(mask.shape[::-1], full[::-1]):  # dimensions in front may be missing
        if size not in (1, wanted):
            fits = False
    if not fits:
        raise ValueError(f"attn_mask {list(mask.shape)}: must be broadcastable to {full}")


def _check_padding_mask(inputs: AttentionInputs) -> None:
    """Refuse a key_padding_mask that is no bool [B, Nk]."""
    mask = inputs.key_padding_mask
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask is {mask.dtype}: must be bool, True hides a key")
    _check_shape("key_padding_mask", mask, [(inputs.query.shape[0], inputs.key.shape[2])])


def _shown(name: str) -> str:
    """Return the name of an input as the caller of `attention` wrote it."""
    return name.replace("relative_", "relative.").replace("mixing_", "mixing.")


def _check_shape(name: str, tensor: Tensor, allowed: Sequence[tuple[int, ...]]) -> None:
    """Refuse a tensor with another shape than one of those that are allowed."""
    for shape in allowed:
        if len(shape) == tensor.dim() and tensor.shape == shape:
            return
    expected = " or ".join(str(list(shape)) for shape in allowed)
    raise ValueError(f"{_shown(name)} {list(tensor.shape)}: must be {expected}")


def fastest(inputs: AttentionInputs) -> str:
    """Return what "auto" stands for: "fused" or a key of `IMPLEMENTATIONS`.

    The first answer that fits counts: what must be, before what is fast.

    With dropout the choice does not depend on whether gradients are on: activation checkpointing
    computes the same attention without and with them, and both passes must drop the same weights.
    Without dropout it may depend on them, see `fused.serves`.
    """
    query = inputs.query
    key = inputs.key
    if query.device.type == "meta" or exporting():
        # Counters of FLOPs and exported programs know its operations, and it asks for no sizes.
        return "reference"
    if query.shape[2] <= 1:
        # In a step of decoding there is one row a head, and nothing to save.
        return "reference"
    if transformations():
        # It is the only one that serves torch.func, and forward mode.
        return "reference"
    by_torch = fused.serves(inputs)
    masked = inputs.attn_mask is not None or inputs.key_padding_mask is not None
    if by_torch and not masked:
        return "fused"
    # Behind a mask torch cannot take its flash kernel. The one that it takes computes hidden keys,
    # too, while ours skip them.
    # Nobody has reported from one of AMD's GPUs yet, so the kernels must be asked for there.
    kernels_allowed = query.device.type != "cpu" and torch.version.hip is None
    if kernels_allowed and not support.slower_than_blocks(inputs) and not triton_problem(inputs):
        return "triton"
    if by_torch:
        return "fused"
    # With no more keys than numbers in a head, all weights take no more memory than the queries, so
    # blocks save none. They save time where all weights would not fit into the cache.
    n_keys = key.shape[2]
    if n_keys <= query.shape[3]:
        weights = query.shape[:3].numel() * n_keys
        if n_keys <= SHORT_ROWS or weights <= block_size(query.device):
            return "reference"
    return "blockwise"


def triton_problem(inputs: AttentionInputs) -> str:
    """Return why the kernels cannot serve a call, or an empty string."""
    return support.machine_problem() or support.problem(inputs) or support.fault(inputs)
