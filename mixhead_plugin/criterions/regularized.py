"""Turn a criterion of fairseq into one with penalties on the heads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from fairseq.criterions import CRITERION_REGISTRY, FairseqCriterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor, nn

from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.modules.penalties import PENALTIES, RegularizedPass


def _flag(name: str) -> Any:
    penalty = PENALTIES[name]
    text = (
        f"weight of the {penalty.formula} ({penalty.source}), summed over the attentions; in training alone; 0 is off"
    )
    return field(default=penalty.weight, metadata={"help": f"{text} (default: {penalty.weight})"})


@dataclass
class PenaltyOptions(FairseqDataclass):
    """The flags of every orthogonal_* criterion beside fairseq's own: `<name>_weight` for each of PENALTIES."""

    orthogonal_weight: float = _flag("orthogonal")
    rank_weight: float = _flag("rank")


class RegularizedCriterion(FairseqCriterion):
    """Mixin before a criterion of fairseq whose loss is a sum over the batch.

    Penalties are computed in float32, and in training alone. The validation loss, and the `loss` and perplexity of all
    logs, are those of fairseq's criterion.

    Attributes:
        penalty_weights: the factor of each penalty; without those of weight 0, which are not computed
    """

    penalty_weights: Mapping[str, float] = MappingProxyType({})

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> "RegularizedCriterion":
        weights = {name: getattr(cfg, f"{name}_weight") for name in PENALTIES}
        for name, weight in weights.items():
            if not 0 <= weight <= torch.finfo(torch.float32).max:
                raise OptionError(f"--{name}-weight {weight}: must be a finite number, 0 (off) or more")
        criterion = super().build_criterion(cfg, task)
        criterion.penalty_weights = {name: weight for name, weight in weights.items() if weight > 0}
        return criterion

    def forward(self, model: nn.Module, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, Any, dict]:
        """Return what fairseq's criterion returns; in training, and with `reduce`, the loss includes the penalties.

        Raises:
            OptionError: a penalty finds nothing to act on in `model`
        """
        if not (self.training and reduce and self.penalty_weights):
            return super().forward(model, sample, reduce)
        regularized = RegularizedPass(model, self.penalty_weights, self._real_queries(sample["net_input"]))
        for name, number in regularized.attentions.items():
            if number == 0:
                _refuse(type(self), name, self.penalty_weights[name])
        with regularized:
            loss, sample_size, logging_output = super().forward(model, sample, reduce)
        for name, value in regularized.values.items():
            logging_output[f"{name}_loss"] = value * sample_size
        return regularized.add_to(loss, sample_size), sample_size, logging_output

    def _real_queries(self, net_input: dict[str, Any]) -> dict[str, Tensor]:
        """Return for "encoder" and "decoder" the queries that are not padding, bool [B, Nq]."""
        source = net_input["src_tokens"]
        target = net_input.get("prev_output_tokens", source)  # a language model decodes its source
        pad = self.task.source_dictionary.pad()
        return {"encoder": source.ne(pad), "decoder": target.ne(pad if target is source else self.padding_idx)}

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the metrics of fairseq's criterion and the mean of each penalty, unweighted."""
        super().reduce_metrics(logging_outputs)
        sample_size = sum(log.get("sample_size", 0) for log in logging_outputs)
        for name in PENALTIES:
            if any(f"{name}_loss" in log for log in logging_outputs):
                total = sum(log.get(f"{name}_loss", 0) for log in logging_outputs)
                metrics.log_scalar(f"{name}_loss", total / sample_size, sample_size, round=6)


def _refuse(criterion: type, name: str, weight: float) -> None:
    """Refuse a model without anything for a penalty to act on: the first batch does, before any update."""
    if PENALTIES[name].on_mixing:
        trained = " or ".join(kind for kind, entry in HEAD_MIXINGS.items() if entry.trained)
        remedy = f"use an architecture mixhead_*, --head-mixing {trained}"
    else:
        remedy = "use an architecture of this plugin with two heads or more"
    # Users who did not type the weight know the criterion whose default it is.
    names = (f"--criterion {known}" for known, registered in CRITERION_REGISTRY.items() if registered is criterion)
    preset = f" ({weight} is the default of {next(names, 'the criterion')})" if weight == PENALTIES[name].weight else ""
    problem = f"--{name}-weight {weight}: nothing to act on in this model"
    raise OptionError(f"{problem}; {remedy}, or --{name}-weight 0{preset}")
