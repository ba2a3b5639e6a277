"""Exact attention with mixed heads in linear memory, by blocks of queries; see blockwise.md.

A block holds all heads, because mixing needs them together. It holds all keys that its queries may
see, because normalizing needs the whole row. The backward pass computes the weights again, and
dropout's zeros from the same seed.
"""

from mixhead_plugin.ops.blockwise.operator import blockwise_attention

__all__ = ["blockwise_attention"]
