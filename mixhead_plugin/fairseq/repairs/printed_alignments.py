"""Tell a model of the plugin that its attention weights will be shown as an alignment.

fairseq takes the attention weights of any model for probabilities: --print-alignment prints them,
and the hub returns them. It does not ask the model.
"""

from typing import Any

from fairseq.sequence_generator import SequenceGeneratorWithAlignment

from mixhead_plugin.fairseq.repairs.replace import replaces


@replaces(SequenceGeneratorWithAlignment, "__init__")
def _init(original, generator: Any, models: list[Any], *args: Any, **kwargs: Any) -> None:
    for model in models:
        getattr(model, "warn_of_alignment", lambda shown: None)(
            kwargs.get("print_alignment", "hard")
        )
    original(generator, models, *args, **kwargs)
