"""fairseq's criteria with penalties on the heads; importing this package registers them with fairseq."""

from mixhead_plugin.criterions.orthogonal import (
    OrthogonalAdaptiveLoss,
    OrthogonalCrossEntropy,
    OrthogonalLabelSmoothedCrossEntropy,
    OrthogonalMaskedLm,
    OrthogonalSentencePrediction,
)

__all__ = [
    "OrthogonalAdaptiveLoss",
    "OrthogonalCrossEntropy",
    "OrthogonalLabelSmoothedCrossEntropy",
    "OrthogonalMaskedLm",
    "OrthogonalSentencePrediction",
]
