"""The class that marks a model as one of the plugin.

It stands apart from `models/`, because repairs ask for it before the models are imported.
"""

from collections.abc import Callable
from typing import Any, ClassVar

# Sets the missing values of its argument, a Namespace or DictConfig, to those of an architecture.
Preset = Callable[[Any], None]


class PluginModel:
    """A base of all models of the plugin."""

    # The preset of each architecture, by its name with the family. All subclasses share one dict.
    presets: ClassVar[dict[str, Preset]] = {}
