"""Tasks that fairseq lacks; importing this package registers them with fairseq."""

from mixhead_plugin.tasks.bert_pretraining import BertPretrainingTask
from mixhead_plugin.tasks.squad import SquadTask

__all__ = ["BertPretrainingTask", "SquadTask"]
