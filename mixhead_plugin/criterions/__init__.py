"""Criteria with penalties on the heads; importing this package registers them with fairseq."""

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
