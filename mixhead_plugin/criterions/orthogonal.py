"""fairseq's criteria with penalties on the heads, `--orthogonal-weight` and `--rank-weight`."""

from dataclasses import dataclass

from fairseq.criterions import adaptive_loss, cross_entropy, label_smoothed_cross_entropy, masked_lm, register_criterion
from fairseq.criterions import sentence_prediction as sentence

from mixhead_plugin.criterions.regularized import PenaltyOptions, RegularizedCriterion


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
    pass


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
