"""Exact attention with mixed heads in linear memory, by blocks of queries; see blockwise.md.

Where heads mix, a block holds all of them, because mixing needs them together. It holds all keys
that its queries may see, because normalizing needs the whole row. The backward pass takes the
weights that the forward pass kept (kept.py), or computes them again, and dropout's zeros from the
same seed.
"""

from mixhead_plugin.ops.blockwise.operator import blockwise_attention

__all__ = ["blockwise_attention"]
