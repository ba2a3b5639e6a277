"""What a saved folder imports where the Auto classes of `transformers` load it.

`save_pretrained` writes `modeling_mixhead.py` into the folder of a mixed model, a file with one
import of this module. With `trust_remote_code=True`, `AutoModelForMaskedLM.from_pretrained(folder)`
asks that file for a class of its own name, and calls its `from_pretrained`: that is `hf.load`.
"""

from typing import Any

from transformers.models.auto import modeling_auto

from mixhead_plugin.hf.loading import load
from mixhead_plugin.hf.saving import AUTO_CLASSES


class _Loader:
    """Stands for the class of a model; each class below names the Auto class that asks for it."""

    auto_class: Any

    @classmethod
    def register_for_auto_class(cls, auto_class: Any) -> None:
        """Do nothing: what is loaded is a model of transformers, which knows its Auto class."""

    @classmethod
    def _from_config(cls, config: Any, **settings: Any) -> Any:
        """Refuse to make a model with new weights: its class refuses a config of mixed heads."""
        return cls._class_of(config)(config)

    @classmethod
    def from_pretrained(cls, folder: Any, *args: Any, config: Any, **settings: Any) -> Any:
        """Load a mixed model; arguments as those that an Auto class gives."""
        return load(folder, cls._class_of(config), config=config, **settings)

    @classmethod
    def _class_of(cls, config: Any) -> Any:
        classes = cls.auto_class._model_mapping[type(config)]
        if not isinstance(classes, tuple):
            return classes
        # Several models of one type: the one that was saved.
        for each in classes:
            if each.__name__ in (config.architectures or []):
                return each
        return classes[0]


def _loader(name: str) -> type[_Loader]:
    return type(name, (_Loader,), {"auto_class": getattr(modeling_auto, name)})


__all__ = list(AUTO_CLASSES)
globals().update({name: _loader(name) for name in AUTO_CLASSES})
