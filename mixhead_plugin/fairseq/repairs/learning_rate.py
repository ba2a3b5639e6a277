"""Multiply the steps of the parameters that --mixing-lr-scale marks.

fairseq has one learning rate for all parameters.
"""

from fairseq.trainer import Trainer

from mixhead_plugin.fairseq.learning_rate import scale_steps
from mixhead_plugin.fairseq.repairs.replace import replaces


@replaces(Trainer, "_build_optimizer")
def _build_optimizer(original, trainer: Trainer) -> None:
    original(trainer)
    scale_steps(trainer.optimizer.optimizer)
