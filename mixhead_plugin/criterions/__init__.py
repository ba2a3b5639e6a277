"""fairseq's criteria with penalties on the heads; importing this registers them."""

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
