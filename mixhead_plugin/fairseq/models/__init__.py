"""fairseq's models with the plugin's attention; importing this package registers them."""

from mixhead_plugin.fairseq.models.architectures import ARCHITECTURES  # noqa: F401
