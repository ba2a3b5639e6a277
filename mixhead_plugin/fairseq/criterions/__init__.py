"""fairseq's criteria with penalties on the heads; importing this registers them."""

from mixhead_plugin.fairseq.criterions import regularized  # noqa: F401
