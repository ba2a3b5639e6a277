"""The module `MixedAttention`, which takes the place of `nn.MultiheadAttention`."""

import contextlib
import dataclasses
import inspect
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from mixhead_plugin.errors import wrong_argument
from mixhead_plugin.nn.attention_checks import (
    ShapeError,
    check_dims,
    check_keys_and_values,
    check_masks,
    check_nested,
    check_query,
)
from mixhead_plugin.ops.masks import as_added_mask, hide_lowest
from mixhead_plugin.parts import Assembly, Variant, check_keywords, record
from mixhead_plugin.parts.variant import whole_number


class _NotTorchs:
    """Stand where torch's module has its packed weight; no operation takes it."""

    requires_grad = False

    @classmethod
    def __torch_function__(cls, function: Any, *arguments: Any) -> Any:
        raise TypeError("MixedAttention has no in_proj_weight; it has q_proj, k_proj and v_proj")


class MixedAttention(Assembly):
    """Replace `nn.MultiheadAttention`, with the same call and masks.

    It loads a state dict of torch's or of fairseq's attention.

    These differ: a row that sees no key gives 0, not NaN; `is_causal` needs no `attn_mask` beside
    it; the weights are those before dropout.

    Args:
        embed_dim: the size of queries and outputs
        num_heads: H, the number of source heads
        dropout: the probability of dropping a weight while the module trains
        bias: whether the projections have one
        add_bias_kv: must be False
        add_zero_attn: must be False
        kdim: the size of the inputs of keys; None for embed_dim
        vdim: the size of the inputs of values; None for embed_dim
        batch_first: whether inputs and outputs are [B, N, C], not [N, B, C]
        device: the device of the parameters, as in `nn.Linear`
        dtype: the type of the parameters, as in `nn.Linear`
        causal: whether every call is causal, as by `is_causal`; the relative position 't5' depends
            on it
        keywords: the fields of `Variant`, such as head_mixing, head_dim and impl. A trained mixing
            starts as the identity, or as `mixing_start` says. relative_position and relative_gain
            are for self-attention.

    Raises:
        ValueError: an argument that cannot work, in one line that begins with its name
    """

    # torch's TransformerEncoderLayer would compute the attention itself if these were there.
    # TransformerEncoder asks torch.overrides whether the weight is a plain tensor, and pads nothing
    # away if it is not.
    in_proj_weight = _NotTorchs()
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        causal: bool = False,
        **keywords: Any,
    ):
        super().__init__()
        is_number = isinstance(dropout, Real)  # also of NumPy
        if not is_number or not 0 <= dropout <= 1:
            raise ValueError(wrong_argument("dropout", dropout, "a probability, from 0 to 1"))
        if add_bias_kv:
            raise ValueError(f"add_bias_kv {add_bias_kv}: must be False")
        if add_zero_attn:
            raise ValueError(f"add_zero_attn {add_zero_attn}: must be False")
        own = inspect.signature(MixedAttention).parameters
        check_keywords(keywords, others=[name for name in own if name != "keywords"])
        variant = Variant.of(keywords)
        sizes = variant.sizes(num_heads, embed_dim, causal=causal)

        # The arguments may be numbers of NumPy. Those of `sizes` are Python's, as the metadata of a
        # state dict need them: `torch.load` refuses others.
        embed_dim = sizes.embed_dim
        num_heads = sizes.num_heads
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_mixed_heads = sizes.mixed_heads
        self.head_dim = sizes.head_dim
        self.value_head_dim = variant.value_size(sizes.head_dim)  # of a source head
        self.value_dim = sizes.value_dim  # of a mixed head
        self.dropout = dropout
        self.batch_first = batch_first
        self.kdim = embed_dim if kdim is None else whole_number("kdim", kdim, least=1)
        self.vdim = embed_dim if vdim is None else whole_number("vdim", vdim, least=1)
        self.causal = sizes.causal
        self.impl = variant.impl

        inner_dim = num_heads * sizes.head_dim
        mixed_dim = sizes.mixed_heads * sizes.value_dim
        # Parts draw on the CPU, and are moved. So where a device is given, the default one does not
        # matter, which may be meta.
        default = contextlib.nullcontext() if device is None else torch.device("cpu")
        with default:
            self.q_proj = nn.Linear(embed_dim, inner_dim, bias)
            self.k_proj = nn.Linear(self.kdim, inner_dim, bias)
            self.v_proj = nn.Linear(self.vdim, mixed_dim, bias)
            self.out_proj = nn.Linear(mixed_dim, embed_dim, bias)
            self.reset_parameters()
            self.add_parts(variant, sizes)
        self.to(device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw the projections anew, as `nn.MultiheadAttention` does.

        Each part has such a method, too.

        A loop over all modules reaches the projections themselves afterwards, which `nn.Linear`
        draws in its own way.
        """
        # torch draws the projections of equal inputs as one matrix [3 * embed_dim, embed_dim].
        gain = 2**-0.5 if self.kdim == self.vdim == self.embed_dim else 1.0
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(projection.weight, gain)
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def entry(self) -> dict[str, Any]:
        """Return what the metadata of a state dict tell of this module."""
        variant = dataclasses.replace(self.variant, head_dim=self.head_dim)
        return record.describe(variant, heads=self.num_heads, causal=self.causal)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        record.write(destination, prefix, self.entry())

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, local_metadata: Any, *settings: Any
    ) -> None:
        """Split the packed projections of `nn.MultiheadAttention`.

        A part that the state lacks wholly starts anew, except by `strict=False`. The state of
        another variant is refused.
        """
        for kind in ("weight", "bias"):
            packed = state_dict.pop(f"{prefix}in_proj_{kind}", None)
            if packed is not None:
                for name, tensor in zip("qkv", packed.chunk(3)):
                    # A copy: by `assign=True` the parameters would be views of one storage, which
                    # safetensors refuses.
                    state_dict[f"{prefix}{name}_proj.{kind}"] = tensor.clone()
        # torch calls it so where queries, keys and values have their own sizes.
        for name in "qkv":
            weight = state_dict.pop(f"{prefix}{name}_proj_weight", None)
            if weight is not None:
                state_dict[f"{prefix}{name}_proj.weight"] = weight

        is_whole = all(
            f"{prefix}{name}_proj.weight" in state_dict for name in ("q", "k", "v", "out")
        )
        record.compare(self, self.entry(), prefix, local_metadata, errors=settings[-1])
        if is_whole:
            record.add_missing_parts(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *settings)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cache: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, with the calling convention of `nn.MultiheadAttention`.

        A nested query, which torch's TransformerEncoder makes of a padded batch in eval, must be
        key and value, too. It takes `is_causal`, but no mask, weights or cache.

        A number in a mask of floats that is far below all scores hides a key for softmax alone.
        Other normalizers need -inf, or the least number of the type; -1e9 is a score for them.

        Args:
            query: [Nq, B, embed_dim]; with `batch_first` [B, Nq, embed_dim]; [Nq, embed_dim]
                without a batch
            key: [Nk, B, kdim], likewise; None for the keys of `cache` alone
            value: [Nk, B, vdim], likewise; None for the values of `cache` alone
            key_padding_mask: [B, Nk] or [Nk]; bool, True hides a key, or floats to add to the
                scores
            need_weights: also return the mixed weights. True, torch's default, computes and holds
                all of them, whatever `impl` is; pass False to train
            attn_mask: [Nq, Nk] or [B * H, Nq, Nk]; bool, True hides a key, or floats to add to the
                scores
            average_attn_weights: return the mean of the weights over the heads
            is_causal: query t sees the keys up to t + (Nk - Nq); an `attn_mask` beside it must be
                the causal one
            cache: "key" [B, H, N, D] and "value" [B, H', N, Dv] of earlier calls, an empty dict at
                first. The call appends its own. The masks are for all of them. Beam search chooses
                rows by `index_select(0, order)`.

        Returns:
            output, shaped as `query`, and weights: None, [B, Nq, Nk], or [B, H', Nq, Nk] if not
                averaged
        """
        if query.is_nested:
            must_be_none = {
                "key_padding_mask": key_padding_mask,
                "attn_mask": attn_mask,
                "cache": cache,
            }
            check_nested(query, key, value, need_weights, self.batch_first, must_be_none)
            return self._of_nested(query, is_causal), None

        check_dims(query, key_padding_mask, attn_mask)
        check_query(query, self.embed_dim)
        if key is not None and value is not None:
            check_keys_and_values(query, key, value, self.kdim, self.vdim, self.batch_first)
        unbatched = query.dim() == 2
        x = self._to_batch_first(query)  # [B, Nq, embed_dim]
        key = None if key is None else self._to_batch_first(key)
        value = None if value is None else self._to_batch_first(value)
        if unbatched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]  # [1, Nk]

        q = self._by_head("q_proj", self.queries(x), self.num_heads, self.head_dim)  # [B, H, Nq, D]
        n_keys = cache["key"].size(2) if cache else 0
        if key is not None:
            n_keys = n_keys + key.size(1)
        check_masks(q, n_keys, key_padding_mask, attn_mask)
        k, v = self._keys_and_values(key, value, cache)
        if cache is not None:
            # Autocast may have been on for earlier calls and be off now, or the other way round.
            # The cache keeps what it has, and this call computes in the type of its queries.
            k = k.to(q.dtype)
            v = v.to(q.dtype)

        added, hidden = self._masks(attn_mask, key_padding_mask, q.dtype)
        called = self.inputs_of(
            q,
            k,
            v,
            projected=q,
            x=x,
            attn_mask=added,
            key_padding_mask=hidden,
            # torch's is_causal describes the mask beside it.
            causal=self.causal or (is_causal and attn_mask is None),
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.head_dim**-0.5,
        )
        out, weights = self.attend(called, self.impl, need_weights)
        out = self.mix_and_gate_outputs(out.transpose(1, 2), x)  # [B, Nq, H', Dv]
        out = self.out_proj(out.flatten(2))  # [B, Nq, embed_dim]

        if weights is not None:
            if average_attn_weights:
                weights = weights.mean(1)
            weights = weights.to(out.dtype)
        if unbatched:
            if weights is not None:
                weights = weights[0]
            return out[0], weights
        if not self.batch_first:
            out = out.transpose(0, 1)
        return out, weights

    def _masks(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return what is added to the scores, and a bool mask [B, Nk] where True hides a key.

        Args:
            attn_mask: as in `forward`
            key_padding_mask: [B, Nk]; bool, or floats to add
            dtype: the type of the scores
        """
        if self.normalizer != "softmax":
            attn_mask = hide_lowest(attn_mask)
            key_padding_mask = hide_lowest(key_padding_mask)
        added = as_added_mask(attn_mask, self.num_heads, dtype)
        if key_padding_mask is None or not key_padding_mask.is_floating_point():
            return added, key_padding_mask
        of_keys = key_padding_mask[:, None, None]  # [B, 1, 1, Nk]
        if added is not None:
            of_keys = added + of_keys
        return of_keys, None

    def _by_head(self, projection: str, features: Tensor, heads: int, size: int) -> Tensor:
        """Return what a projection gives, [B, N, heads * size], by head: [B, heads, N, size].

        Refuse another number of features. They would be as many heads of another size.
        """
        width = features.size(-1)
        if width != heads * size:
            raise ShapeError(
                f"{projection}: gives {width} features, must give {heads * size}, as when it was "
                "built; heads that are split between processes cannot be mixed"
            )
        return features.unflatten(2, (heads, size)).transpose(1, 2)

    def _to_batch_first(self, x: Tensor) -> Tensor:
        """Return an input of `forward` as [B, N, C]."""
        if x.dim() == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _of_nested(self, query: Tensor, is_causal: bool) -> Tensor:
        """Attend within each row of a nested tensor."""
        lengths = torch.tensor([row.size(0) for row in query.unbind()], device=query.device)
        padded = torch.nested.to_padded_tensor(query, 0.0)  # [B, N, embed_dim]
        hidden = torch.arange(padded.size(1), device=query.device) >= lengths[:, None]  # [B, N]
        out, _ = self(
            padded,
            padded,
            padded,
            key_padding_mask=hidden,
            need_weights=False,
            is_causal=is_causal,
        )
        rows = [row[:length] for row, length in zip(out, lengths.tolist())]
        return torch.nested.as_nested_tensor(rows, layout=query.layout)

    def _keys_and_values(
        self, key: Tensor | None, value: Tensor | None, cache: dict[str, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Return keys [B, H, Nk, D] and values [B, H', Nk, Dv].

        Those of the cache come first, and it keeps all.
        """
        if key is None and value is None and cache:
            return cache["key"], cache["value"]
        if key is None or value is None:
            raise ValueError("key, value: must both be given, or both be in the cache and None")

        k = self._by_head("k_proj", self.keys(key), self.num_heads, self.head_dim)
        v = self._by_head("v_proj", self.values(value), self.num_mixed_heads, self.value_dim)
        if cache:
            k = torch.cat([cache["key"], k], dim=2)
            v = torch.cat([cache["value"], v], dim=2)
        if cache is not None:
            cache["key"] = k
            cache["value"] = v
        return k, v
