"""Keys and values of earlier decoding steps, one copy for all hypotheses of a sentence."""

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor


class CachedAttention(MultiheadAttention):
    """The part of an attention that caches keys and values; TorchScript compiles it too.

    The cache is fairseq's (`prev_key`, `prev_value`, `prev_key_padding_mask`). In encoder-decoder
    attention the hypotheses of a sentence share a row of it; the shape of `prev_beams` [B, beams,
    0] then says how many.
    """

    def _keys_and_values(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None,
        static_kv: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys and values [B, H, Nk, D], those of earlier steps included, and their padding
        mask [B, Nk].
        """
        k: Tensor | None = None
        v: Tensor | None = None
        saved: dict[str, Tensor | None] = {}
        if incremental_state is not None:
            saved = self._get_input_buffer(incremental_state)

        if self.self_attention:
            key = query
            value = query
        if not (static_kv and "prev_key" in saved):
            assert key is not None and value is not None, (
                "keys and values are neither given nor cached"
            )
            if incremental_state is not None and self._comes_in_beams(
                query, key, value, key_padding_mask
            ):
                key = key[:, :: self.beam_size]
                value = value[:, :: self.beam_size]
                if key_padding_mask is not None:
                    key_padding_mask = key_padding_mask[:: self.beam_size]
                saved["prev_beams"] = key.new_empty(key.size(1), self.beam_size, 0)
            k = self._split_heads(self.keys(key), self.num_heads)
            v = self._split_heads(self.values(value), self.num_mixed_heads)

        if incremental_state is not None:
            k = self._after_cached(saved, "prev_key", k)
            v = self._after_cached(saved, "prev_value", v)
            key_padding_mask = self._padding_after_cached(saved, key_padding_mask, v, static_kv)
            self._set_input_buffer(incremental_state, saved)
        assert k is not None and v is not None
        return k, v, key_padding_mask

    def _after_cached(
        self, saved: dict[str, Tensor | None], name: str, new: Tensor | None
    ) -> Tensor:
        """Return rows [B, H, N, D] behind those that `saved` has under this name, and save the
        result there.
        """
        if name in saved:
            prev = saved[name]
            assert prev is not None
            new = prev if new is None else torch.cat([prev, new], dim=2)
        assert new is not None
        saved[name] = new
        return new

    def _padding_after_cached(
        self,
        saved: dict[str, Tensor | None],
        key_padding_mask: Tensor | None,
        v: Tensor,
        static_kv: bool,
    ) -> Tensor | None:
        """Return the padding mask [B, Nk] of all values `v` [B, H, Nk, D], and save it."""
        prev = saved.get("prev_key_padding_mask")
        mask = self._append_prev_key_padding_mask(
            key_padding_mask, prev, v.size(0), v.size(2), static_kv
        )
        saved["prev_key_padding_mask"] = mask
        return mask

    def _comes_in_beams(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None
    ) -> bool:
        """Return whether [N, B * beams, ...] holds every sentence `beam_size` times in a row.

        This compares tensors, because a module keeps the beam size of an earlier search.
        """
        beams = self.beam_size
        if not self.encoder_decoder_attention or beams == 1 or query.size(1) != key.size(1):
            return False
        if key_padding_mask is not None and not self._in_beams(key_padding_mask, beams):
            return False
        return self._in_beams(key.transpose(0, 1), beams) and self._in_beams(
            value.transpose(0, 1), beams
        )

    @torch.jit.export
    def reorder_incremental_state(
        self, incremental_state: dict[str, dict[str, Tensor | None]] | None, new_order: Tensor
    ) -> dict[str, dict[str, Tensor | None]] | None:
        """Let row i of the cache continue row `new_order[i]`, [B], as beam search chooses.

        A cache with one row per sentence does not change while hypotheses stay with their
        sentences, as in beam search. It follows every other order too, where fairseq's
        encoder-decoder attention ignores a permutation.
        """
        if incremental_state is None:
            return incremental_state
        saved = self._get_input_buffer(incremental_state)
        order = new_order
        prev_beams = saved.get("prev_beams")
        if prev_beams is not None:
            beams = prev_beams.size(1)
            order = new_order // beams  # the sentence of each hypothesis
            if self._in_beams(order, beams):
                order = order[::beams]
                if torch.equal(order, torch.arange(prev_beams.size(0), device=order.device)):
                    return incremental_state
            else:  # these rows were equal sentences, not beams: from now on each has its own
                saved["prev_beams"] = None
        for name in list(saved.keys()):
            rows = saved[name]
            if rows is not None:
                saved[name] = rows.index_select(0, order)
        return self._set_input_buffer(incremental_state, saved)

    def _in_beams(self, rows: Tensor, beams: int) -> bool:
        """Return whether rows [B * beams, ...] come in groups of `beams` equal ones."""
        return torch.equal(rows, rows[::beams].repeat_interleave(beams, 0))

    def _fold_beams(self, x: Tensor, beams: int) -> Tensor:
        """Return [B, beams * Nq, ...] from [B * beams, Nq, ...]: to the attention, hypotheses are
        further queries.
        """
        return x.unflatten(0, [-1, beams]).flatten(1, 2)

    def _unfold_beams(self, x: Tensor, beams: int) -> Tensor:
        """Return [B * beams, Nq, ...] from [B, beams * Nq, ...]."""
        return x.unflatten(1, [beams, -1]).flatten(0, 1)

    def _split_heads(self, x: Tensor, heads: int) -> Tensor:
        """Return [B, heads, N, D] from [N, B, heads * D]."""
        return x.view(x.size(0), x.size(1), heads, x.size(2) // heads).permute(1, 2, 0, 3)
