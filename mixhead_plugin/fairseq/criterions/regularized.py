"""fairseq's criteria with penalties on the heads, `--orthogonal-weight` and `--rank-weight`."""

from collections.abc import Mapping
from dataclasses import field, make_dataclass
from types import MappingProxyType
from typing import Any

import torch
from fairseq import criterions as upstream
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor, nn

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.fairseq.criterions.penalties import (
    PENALTIES,
    Penalty,
    RegularizedPass,
    count_attentions,
)
from mixhead_plugin.fairseq.padding import not_padding
from mixhead_plugin.parts import PARTS

# Each becomes `orthogonal_<name>`.
CRITERIA = (
    "cross_entropy",
    "label_smoothed_cross_entropy",
    "adaptive_loss",
    "masked_lm",
    "sentence_prediction",
)


def _penalty_flag(penalty: Penalty) -> Any:
    """Return the dataclass field of a penalty's weight."""
    text = f"weight of the {penalty.formula} ({penalty.source}), summed over the attentions"
    text += f"; only in training; 0 is off (default: {penalty.weight})"
    return field(default=penalty.weight, metadata={"help": text})


def _flags_of_penalties() -> Any:
    """Return a dataclass with one flag for each of PENALTIES, such as --orthogonal-weight.

    It is made, not written, so that `PENALTIES` stays the only table of them.
    """
    flags = []
    for name, penalty in PENALTIES.items():
        flags.append((f"{name}_weight", float, _penalty_flag(penalty)))
    return make_dataclass("PenaltyOptions", flags, bases=(FairseqDataclass,))


# The flags that every orthogonal_* criterion has beside fairseq's own.
PenaltyOptions: Any = _flags_of_penalties()


class RegularizedCriterion(upstream.FairseqCriterion):
    """A mixin before a criterion of fairseq: adds penalties to its loss.

    The loss of fairseq's criterion is a sum over the sentences or tokens of a batch. Penalties are
    computed in float32, and only in training. fairseq's criterion alone gives the validation loss,
    and the `loss` and perplexity in all logs: a logged loss has no penalty in it.

    fairseq's task calls `build_criterion`, which gives `__init__` the flags of fairseq's criterion
    alone. Therefore the weights are set from outside afterwards.
    """

    penalty_weights: Mapping[str, float] = MappingProxyType({})  # without penalties of weight 0

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> "RegularizedCriterion":
        weights = {}
        for name in PENALTIES:
            weight = getattr(cfg, f"{name}_weight")
            if not 0 <= weight <= torch.finfo(torch.float32).max:  # true of NaN, too
                raise OptionError(
                    f"--{name}-weight {weight}: must be a finite number, 0 (off) or more"
                )
            if weight > 0:
                weights[name] = weight
        criterion = super().build_criterion(cfg, task)
        criterion.penalty_weights = weights
        return criterion

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that gives a penalty nothing to act on.

        fairseq's trainer calls it before a training, see `fairseq/hooks.py`. `forward` calls it,
        too, for a program without a trainer; in a training it would be late, because fairseq saves
        a file crash.pt when a batch fails.
        """
        for name, number in count_attentions(model, self.penalty_weights).items():
            if number == 0:
                weight = self.penalty_weights[name]
                raise OptionError(f"--{name}-weight {weight}: {_without_effect(name, weight)}")

    def forward(
        self, model: nn.Module, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, Any, dict]:
        """Return what fairseq's criterion returns: the loss, the sample size and what is logged.

        In training, and with `reduce`, the loss includes the penalties.

        Args:
            model: any model
            sample: a batch of fairseq
            reduce: whether fairseq's criterion sums the losses of all tokens; without it the loss
                is no scalar
        """
        if not (self.training and reduce and self.penalty_weights):
            return super().forward(model, sample, reduce)
        self.check_model(model)
        regularized = RegularizedPass(
            model, self.penalty_weights, not_padding(self.task, sample["net_input"])
        )
        with regularized:
            loss, sample_size, logging_output = super().forward(model, sample, reduce)
        for name, value in regularized.values.items():
            # fairseq sums what batches and workers log, so a mean is logged times its size.
            logging_output[f"{name}_loss"] = value * sample_size
        return regularized.add_to(loss, sample_size), sample_size, logging_output

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the metrics of fairseq's criterion and the mean of each penalty, unweighted."""
        super().reduce_metrics(logging_outputs)
        sample_size = sum(log.get("sample_size", 0) for log in logging_outputs)
        for name in PENALTIES:
            if any(f"{name}_loss" in log for log in logging_outputs):
                total = sum(log.get(f"{name}_loss", 0) for log in logging_outputs)
                metrics.log_scalar(f"{name}_loss", total / sample_size, sample_size, round=6)


def _without_effect(name: str, weight: float) -> str:
    """Return that a penalty has nothing to act on, and what helps."""
    penalty = PENALTIES[name]
    if penalty.on_mixing:
        flags = []
        for option, table in PARTS.items():
            values = [value for value, row in table.items() if row.orthogonal]
            if values:
                flags.append(f"{option_name(option)} {' or '.join(values)}")
        remedy = f"an architecture of this plugin with {', or '.join(flags)}"
    else:
        remedy = "an architecture of this plugin with two heads or more"
    default = f" (the default is {weight})" if weight == penalty.weight else ""
    return f"nothing to act on in this model; use {remedy}, or 0{default}"


def _register(name: str) -> None:
    """Register `orthogonal_<name>`: fairseq's criterion and its flags, with the penalties.

    For cross_entropy this is

        @register_criterion("orthogonal_cross_entropy", dataclass=cross_entropy_options)
        class orthogonal_cross_entropy(RegularizedCriterion, CrossEntropyCriterion): ...
    """
    option_bases = (PenaltyOptions, upstream.CRITERION_DATACLASS_REGISTRY[name])
    options = make_dataclass(f"{name}_options", (), bases=option_bases)
    bases = (RegularizedCriterion, upstream.CRITERION_REGISTRY[name])
    criterion = type(f"orthogonal_{name}", bases, {})
    upstream.register_criterion(f"orthogonal_{name}", dataclass=options)(criterion)


# orthogonal_cross_entropy, orthogonal_label_smoothed_cross_entropy, orthogonal_adaptive_loss,
# orthogonal_masked_lm and orthogonal_sentence_prediction
for _name in CRITERIA:
    _register(_name)
