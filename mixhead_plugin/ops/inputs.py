"""One record carries the inputs of an attention call to every implementation."""

from typing import Dict, NamedTuple, Optional

from torch import Tensor


class AttentionInputs(NamedTuple):
    """The arguments of one call of `ops.attention`, and the seed of its dropout; TorchScript compiles it too.

    The tensors come first, and the relative scores are two of them: operators of torch take no nested arguments.
    """

    query: Tensor  # [B, H, Nq, D]
    key: Tensor  # [B, H, Nk, D]
    value: Tensor  # [B, H', Nk, Dv]
    mixing: Optional[Tensor]  # [H, H'] or [B, Nq, H, H']
    attn_mask: Optional[Tensor]  # broadcastable to [B, H, Nq, Nk]
    key_padding_mask: Optional[Tensor]  # [B, Nk]
    relative_query: Optional[Tensor]  # [B, H, Nq, R]
    relative_key: Optional[Tensor]  # [H, Nk, R] or [H, Nq + Nk - 1, R]
    gain: Optional[Tensor]  # [H, Nq + Nk - 1]
    sink: Optional[Tensor]  # [H]
    score_mixing: Optional[Tensor]  # [H, H] or [B, Nq, H, H]
    mixing_query: Optional[Tensor]  # Q [B, Nq, H, R], if M_t is Q_t mixing_weight + mixing [H, H']
    mixing_weight: Optional[Tensor]  # [R, H']
    seed: Optional[Tensor]  # None until an implementation draws one
    normalizer: str
    causal: bool
    dropout_p: float
    scale: float

    def given(self) -> Dict[str, Tensor]:
        """Return by name the tensors that are not None, without masks and seed."""
        tensors = {name: getattr(self, name) for name in self._fields[: self._fields.index("seed")]}
        return {name: t for name, t in tensors.items() if t is not None and not name.endswith("_mask")}
