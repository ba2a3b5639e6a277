"""fairseq's criteria with penalties on the heads, and those of the plugin's tasks; importing this registers them."""

from mixhead_plugin.criterions.bert_pretraining import BertPretrainingCriterion, OrthogonalBertPretraining
from mixhead_plugin.criterions.orthogonal import (
    OrthogonalAdaptiveLoss,
    OrthogonalCrossEntropy,
    OrthogonalLabelSmoothedCrossEntropy,
    OrthogonalMaskedLm,
    OrthogonalSentencePrediction,
)
from mixhead_plugin.criterions.squad import OrthogonalSquad, SquadCriterion

__all__ = [
    "BertPretrainingCriterion",
    "OrthogonalAdaptiveLoss",
    "OrthogonalBertPretraining",
    "OrthogonalCrossEntropy",
    "OrthogonalLabelSmoothedCrossEntropy",
    "OrthogonalMaskedLm",
    "OrthogonalSentencePrediction",
    "OrthogonalSquad",
    "SquadCriterion",
]
