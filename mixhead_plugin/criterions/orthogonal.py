"""fairseq's criteria with penalties on the heads, `--orthogonal-weight` and `--rank-weight`."""

from dataclasses import dataclass
from typing import Any

from fairseq.criterions import adaptive_loss, cross_entropy, label_smoothed_cross_entropy, masked_lm, register_criterion
from fairseq.criterions import sentence_prediction as sentence

from mixhead_plugin.criterions.regularized import PenaltyOptions, RegularizedCriterion
from mixhead_plugin.errors import OptionError


@dataclass
class OrthogonalCrossEntropyConfig(PenaltyOptions, cross_entropy.CrossEntropyCriterionConfig):
    pass


@register_criterion("orthogonal_cross_entropy", dataclass=OrthogonalCrossEntropyConfig)
class OrthogonalCrossEntropy(RegularizedCriterion, cross_entropy.CrossEntropyCriterion):
    pass


@dataclass
class OrthogonalLabelSmoothedCrossEntropyConfig(
    PenaltyOptions, label_smoothed_cross_entropy.LabelSmoothedCrossEntropyCriterionConfig
):
    pass


@register_criterion("orthogonal_label_smoothed_cross_entropy", dataclass=OrthogonalLabelSmoothedCrossEntropyConfig)
class OrthogonalLabelSmoothedCrossEntropy(
    RegularizedCriterion, label_smoothed_cross_entropy.LabelSmoothedCrossEntropyCriterion
):
    pass


@dataclass
class OrthogonalAdaptiveLossConfig(PenaltyOptions, adaptive_loss.AdaptiveLossConfig):
    pass


@register_criterion("orthogonal_adaptive_loss", dataclass=OrthogonalAdaptiveLossConfig)
class OrthogonalAdaptiveLoss(RegularizedCriterion, adaptive_loss.AdaptiveLoss):
    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> RegularizedCriterion:
        if cfg.ddp_backend in {"c10d", "pytorch_ddp"}:  # fairseq's own check ends in a traceback
            raise OptionError(f"--ddp-backend {cfg.ddp_backend}: an adaptive loss needs legacy_ddp")
        return super().build_criterion(cfg, task)


@dataclass
class OrthogonalMaskedLmConfig(PenaltyOptions, masked_lm.MaskedLmConfig):
    pass


@register_criterion("orthogonal_masked_lm", dataclass=OrthogonalMaskedLmConfig)
class OrthogonalMaskedLm(RegularizedCriterion, masked_lm.MaskedLmLoss):
    pass


@dataclass
class OrthogonalSentencePredictionConfig(PenaltyOptions, sentence.SentencePredictionConfig):
    pass


@register_criterion("orthogonal_sentence_prediction", dataclass=OrthogonalSentencePredictionConfig)
class OrthogonalSentencePrediction(RegularizedCriterion, sentence.SentencePredictionCriterion):
    pass
