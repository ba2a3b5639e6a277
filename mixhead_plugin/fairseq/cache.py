"""Keys and values of earlier decoding steps, one copy for all hypotheses of a sentence."""

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor


class CachedAttention(MultiheadAttention):
    """The part of an attention that caches keys and values; TorchScript compiles it too.

    The cache is fairseq's, a dict of tensors: `prev_key` [B, H, Nk, D], `prev_value`
    [B, H', Nk, Dv], and `prev_key_padding_mask` [B, Nk].

    In beam search fairseq hands over each sentence `beams` times, once for each hypothesis. All
    hypotheses of a sentence see the same source, so the cache of encoder-decoder attention keeps
    one row a sentence:

        given     a a a b b b      two sentences, a beam of three
        cached    a     b

    How many hypotheses share a row has to be kept with the rows, because `beam_size` may change
    between two searches. fairseq's cache takes only tensors, and only ones that it can sort by
    sentence. So `prev_beams` is an empty tensor [B, beams, 0], whose second dimension is the
    number; there is none while each hypothesis has its own row.
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
        """Return keys, values and padding mask, those of earlier steps included.

        Args:
            query: [Nq, B, embed_dim]; in self-attention keys and values are made of it
            key: [Nk, B, kdim]; None if all keys are in the cache
            value: [Nk, B, vdim]; None if all values are in the cache
            key_padding_mask: [B, Nk], non-zero hides a key; None for no padding
            incremental_state: the cache of step-by-step decoding; None for a full pass
            static_kv: whether all steps use the keys and values of the first step

        Returns:
            keys [B, H, Nk, D], values [B, H', Nk, Dv], and the padding mask [B, Nk] or None
        """
        k: Tensor | None = None
        v: Tensor | None = None
        saved: dict[str, Tensor | None] = {}
        if incremental_state is not None:
            saved = self._get_input_buffer(incremental_state)
        if self.self_attention:
            key = query
            value = query

        all_are_cached = static_kv and "prev_key" in saved
        if not all_are_cached:
            assert key is not None and value is not None, (
                "keys and values are neither given nor cached"
            )
            if incremental_state is not None and self._inputs_repeat(
                query, key, value, key_padding_mask
            ):
                # One row of each sentence is enough.
                key = key[:, :: self.beam_size]
                value = value[:, :: self.beam_size]
                if key_padding_mask is not None:
                    key_padding_mask = key_padding_mask[:: self.beam_size]
                saved["prev_beams"] = key.new_empty(key.size(1), self.beam_size, 0)
            k = self._split_heads(self.keys(key), self.num_heads)
            v = self._split_heads(self.values(value), self.num_mixed_heads)

        if incremental_state is not None:
            k = self._append_to_cache(saved, "prev_key", k)
            v = self._append_to_cache(saved, "prev_value", v)
            key_padding_mask = self._append_padding(saved, key_padding_mask, v, static_kv)
            self._set_input_buffer(incremental_state, saved)
        assert k is not None and v is not None
        return k, v, key_padding_mask

    def _append_to_cache(
        self, saved: dict[str, Tensor | None], name: str, new: Tensor | None
    ) -> Tensor:
        """Return keys or values behind those of earlier steps, and save them all.

        Args:
            saved: the cache of this attention, changed in place
            name: "prev_key" or "prev_value"
            new: the keys or values of this step, [B, H, N, D]; None if all are in the cache already
        """
        if name in saved:
            prev = saved[name]
            assert prev is not None
            new = prev if new is None else torch.cat([prev, new], dim=2)
        assert new is not None
        saved[name] = new
        return new

    def _append_padding(
        self,
        saved: dict[str, Tensor | None],
        key_padding_mask: Tensor | None,
        v: Tensor,
        static_kv: bool,
    ) -> Tensor | None:
        """Return the padding mask [B, Nk] of the keys of all steps, and save it.

        Args:
            saved: the cache of this attention, changed in place
            key_padding_mask: the padding of the keys of this step, or of all keys; None for no
                padding
            v: the values of all steps, [B, H', Nk, Dv], for the numbers of rows and keys
            static_kv: whether the keys of the first step are those of all steps
        """
        prev = saved.get("prev_key_padding_mask")
        mask = self._append_prev_key_padding_mask(
            key_padding_mask, prev, v.size(0), v.size(2), static_kv
        )
        saved["prev_key_padding_mask"] = mask
        return mask

    def _inputs_repeat(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None
    ) -> bool:
        """Return whether the inputs hold every sentence `beam_size` times in a row.

        This compares tensors, because `beam_size` may be left from an earlier search: a model that
        decoded with a beam of 5 is later called with single sentences. Only the first step of a
        search comes here; the later ones find their keys in the cache.

        Args:
            query: the input of the queries, [Nq, B * beams, C]
            key: the input of the keys, [Nk, B * beams, kdim]
            value: the input of the values, [Nk, B * beams, vdim]
            key_padding_mask: [B * beams, Nk], non-zero hides a key; None for no padding
        """
        beams = self.beam_size
        if not self.encoder_decoder_attention or beams == 1:
            return False
        if query.size(1) != key.size(1):  # there already is one row of keys a sentence
            return False
        if key_padding_mask is not None and not self._repeats(key_padding_mask, beams):
            return False
        return self._repeats(key.transpose(0, 1), beams) and self._repeats(
            value.transpose(0, 1), beams
        )

    def _repeats(self, rows: Tensor, beams: int) -> bool:
        """Return whether rows [B * beams, ...] come in groups of `beams` equal ones."""
        return torch.equal(rows, rows[::beams].repeat_interleave(beams, 0))

    @torch.jit.export
    def reorder_incremental_state(
        self, incremental_state: dict[str, dict[str, Tensor | None]] | None, new_order: Tensor
    ) -> dict[str, dict[str, Tensor | None]] | None:
        """Let hypothesis i continue hypothesis `new_order[i]`, [number of hypotheses].

        Where hypotheses of a sentence share a row, beam search changes nothing: it exchanges them
        within their sentences. When a sentence has ended, its row goes.

            new_order    0 0 2 | 4 3 3     two sentences, a beam of three
            sentences    0 0 0 | 1 1 1     so the rows are 0 and 1, as before

        A program may also give an order in which rows of different sentences change places. Then
        these rows were no beams, but equal sentences of one batch. From now on each has a copy of
        its row (fairseq's encoder-decoder attention would ignore a permutation):

            new_order    0 3 2 | 4 1 3
            sentences    0 1 0 | 1 0 1     so there are six rows, copies of 0 1 0 1 0 1
        """
        if incremental_state is None:
            return incremental_state
        saved = self._get_input_buffer(incremental_state)
        rows = new_order
        prev_beams = saved.get("prev_beams")
        if prev_beams is not None:
            beams = prev_beams.size(1)
            rows = new_order // beams  # the sentence of each hypothesis
            if self._repeats(rows, beams):
                rows = rows[::beams]  # of each sentence
                as_before = torch.arange(prev_beams.size(0), device=rows.device)
                if torch.equal(rows, as_before):
                    return incremental_state
            else:
                saved["prev_beams"] = None

        for name in list(saved.keys()):
            entry = saved[name]
            if entry is not None:
                saved[name] = entry.index_select(0, rows)
        return self._set_input_buffer(incremental_state, saved)

    def _fold_beams(self, x: Tensor, beams: int) -> Tensor:
        """Return [B, beams * Nq, ...] from [B * beams, Nq, ...].

        To the attention, the hypotheses of a sentence are further queries to the same keys.
        """
        return x.unflatten(0, [-1, beams]).flatten(1, 2)

    def _fold_heads(self, x: Tensor, beams: int) -> Tensor:
        """Return [B, H, beams * Nq, ...] from [B * beams, H, Nq, ...]."""
        return self._fold_beams(x.transpose(1, 2), beams).transpose(1, 2)

    def _unfold_beams(self, x: Tensor, beams: int) -> Tensor:
        """Return [B * beams, Nq, ...] from [B, beams * Nq, ...]."""
        return x.unflatten(1, [beams, -1]).flatten(0, 1)

    def _split_heads(self, x: Tensor, heads: int) -> Tensor:
        """Return [B, heads, N, D] from [N, B, heads * D]."""
        return x.view(x.size(0), x.size(1), heads, x.size(2) // heads).permute(1, 2, 0, 3)
