"""The public function `attention`: check the arguments, choose an implementation, call it."""

from torch import Tensor

from mixhead_plugin.ops import fused
from mixhead_plugin.ops.call_checks import (
    check_are_tensors,
    check_call,
    check_mixing,
    check_relative,
)
from mixhead_plugin.ops.choice import IMPLEMENTATIONS, fastest, triton_problem
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.low_rank import LowRank
from mixhead_plugin.ops.operators import no_derivative
from mixhead_plugin.ops.reference import reference_with_weights
from mixhead_plugin.ops.relative import RelativeScores
from mixhead_plugin.ops.transforms import unserved


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
        impl: "auto" or a key of `IMPLEMENTATIONS`. "auto" chooses what is usually the fastest. Any
            other choice runs or raises, except with `need_weights`.
        need_weights: also return the mixed weights [B, H', Nq, Nk]. Then "reference" runs, whatever
            `impl` is, because it alone holds them.

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
    check_are_tensors({"query": query, "key": key, "value": value})
    options = {
        "attn_mask": attn_mask,
        "key_padding_mask": key_padding_mask,
        "gain": gain,
        "sink": sink,
        "score_mixing": score_mixing,
    }
    check_are_tensors({name: option for name, option in options.items() if option is not None})
    # These two are taken apart into several fields, so they are checked before there is a record.
    check_relative(relative)
    check_mixing(mixing)
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


def _usual_scale(query: Tensor) -> float:
    """Return D ** -0.5; 1 where D is 0."""
    if query.is_nested:
        return 1.0  # it has no shape, and `check_call` will refuse it
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
    check_call(inputs, impl)
    return reference_with_weights(inputs)


def attend(inputs: AttentionInputs, impl: str) -> Tensor:
    """Compute `attention` for inputs in one record."""
    check_call(inputs, impl)
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
