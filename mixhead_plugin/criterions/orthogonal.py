"""fairseq's criteria with penalties on the heads, `--orthogonal-weight` and `--rank-weight`."""

from dataclasses import make_dataclass

from fairseq.criterions import CRITERION_DATACLASS_REGISTRY, CRITERION_REGISTRY, register_criterion

from mixhead_plugin.criterions.regularized import PenaltyOptions, RegularizedCriterion

# Each becomes `orthogonal_<name>`.
CRITERIA = "cross_entropy", "label_smoothed_cross_entropy", "adaptive_loss", "masked_lm", "sentence_prediction"

for _name in CRITERIA:
    _options = make_dataclass(f"{_name}_options", (), bases=(PenaltyOptions, CRITERION_DATACLASS_REGISTRY[_name]))
    _criterion = type(f"orthogonal_{_name}", (RegularizedCriterion, CRITERION_REGISTRY[_name]), {})
    register_criterion(f"orthogonal_{_name}", dataclass=_options)(_criterion)
