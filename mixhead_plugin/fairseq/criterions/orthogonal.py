"""fairseq's criteria with penalties on the heads, `--orthogonal-weight` and `--rank-weight`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from fairseq import criterions as upstream
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from omegaconf import OmegaConf
from torch import Tensor, nn

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.criterions.penalties import PENALTIES, RegularizedPass
from mixhead_plugin.fairseq.options import model_class
from mixhead_plugin.parts import PARTS

# Each becomes `orthogonal_<name>`.
CRITERIA = (
    "cross_entropy",
    "label_smoothed_cross_entropy",
    "adaptive_loss",
    "masked_lm",
    "sentence_prediction",
)


def _flag(name: str) -> Any:
    """Return the field of the flag for a penalty."""
    penalty = PENALTIES[name]
    text = f"weight of the {penalty.formula} ({penalty.source}), summed over the attentions"
    text += f"; only in training; 0 is off (default: {penalty.weight})"
    return field(default=penalty.weight, metadata={"help": text})


@dataclass
class PenaltyOptions(FairseqDataclass):
    """The flags that every orthogonal_* criterion has beside fairseq's own."""

    # <name>_weight for each of PENALTIES
    orthogonal_weight: float = _flag("orthogonal")
    rank_weight: float = _flag("rank")


class RegularizedCriterion(upstream.FairseqCriterion):
    """A mixin before a criterion of fairseq, whose loss is a sum over the batch; adds penalties.

    Penalties are computed in float32, and only in training. fairseq's criterion alone gives the
    validation loss, and the `loss` and perplexity in all logs.
    """

    penalty_weights: Mapping[str, float] = MappingProxyType({})  # without penalties of weight 0

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> "RegularizedCriterion":
        weights = {}
        for name in PENALTIES:
            weight = getattr(cfg, f"{name}_weight")
            if not 0 <= weight <= torch.finfo(torch.float32).max:
                raise OptionError(
                    f"--{name}-weight {weight}: must be a finite number, 0 (off) or more"
                )
            if weight > 0:
                weights[name] = weight
        # The config of a training has the model's flags beside the criterion's. A program may
        # build a criterion from its own flags alone.
        if OmegaConf.is_config(cfg) and cfg._get_parent() is not None:
            _check_model(cfg._get_parent().get("model"), weights)
        criterion = super().build_criterion(cfg, task)
        criterion.penalty_weights = weights
        return criterion

    def forward(
        self, model: nn.Module, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, Any, dict]:
        """Return what fairseq's criterion returns: the loss, the sample size and what is logged.

        In training, and with `reduce`, the loss includes the penalties.

        Args:
            model: any model
            sample: a batch of fairseq
            reduce: as in fairseq; without it the loss is no scalar
        """
        if not (self.training and reduce and self.penalty_weights):
            return super().forward(model, sample, reduce)
        regularized = RegularizedPass(
            model, self.penalty_weights, self._query_masks(sample["net_input"])
        )
        for name, number in regularized.attentions.items():
            if number == 0:
                _refuse(name, self.penalty_weights[name])
        with regularized:
            loss, sample_size, logging_output = super().forward(model, sample, reduce)
        for name, value in regularized.values.items():
            logging_output[f"{name}_loss"] = value * sample_size
        return regularized.add_to(loss, sample_size), sample_size, logging_output

    def _query_masks(self, net_input: dict[str, Any]) -> dict[str, Tensor]:
        """Return for "encoder" and "decoder" the queries that are not padding, bool [B, Nq]."""
        source = net_input["src_tokens"]
        target = net_input.get("prev_output_tokens", source)  # a language model decodes its source
        pad = self.task.source_dictionary.pad()
        return {
            "encoder": source.ne(pad),
            # `padding_idx` is that of the target's dictionary
            "decoder": target.ne(pad if target is source else self.padding_idx),
        }

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the metrics of fairseq's criterion and the mean of each penalty, unweighted."""
        super().reduce_metrics(logging_outputs)
        sample_size = sum(log.get("sample_size", 0) for log in logging_outputs)
        for name in PENALTIES:
            if any(f"{name}_loss" in log for log in logging_outputs):
                total = sum(log.get(f"{name}_loss", 0) for log in logging_outputs)
                metrics.log_scalar(f"{name}_loss", total / sample_size, sample_size, round=6)


def _check_model(model: Any, weights: Mapping[str, float]) -> None:
    """Refuse flags of a model that give a penalty nothing to act on.

    `forward` refuses it, too. But there fairseq leaves a file crash.pt behind.

    Args:
        model: the part `model` of a config
        weights: of the penalties, without those of weight 0
    """
    registered: Any = model_class(model)
    if registered is None:  # a model that neither fairseq nor the plugin knows
        return
    # Only the plugin's models know their complete flags; fairseq's own have nothing to act on.
    complete_flags = getattr(registered, "complete_flags", None)
    flags = None if complete_flags is None else complete_flags(model)
    for name, weight in weights.items():
        if flags is None:
            acts = False
        elif PENALTIES[name].on_mixing:
            acts = any(table[getattr(flags, part)].orthogonal for part, table in PARTS.items())
        else:
            acts = registered.most_heads(flags) > 1
        if not acts:
            _refuse(name, weight)


def _refuse(name: str, weight: float) -> NoReturn:
    """Refuse the weight of a penalty that has nothing to act on."""
    penalty = PENALTIES[name]
    if penalty.on_mixing:
        trained = [kind for kind, entry in PARTS["head_mixing"].items() if entry.orthogonal]
        kinds = " or ".join(trained)
        remedy = f"use an architecture mixhead_*, --head-mixing {kinds}, or --feature-mixing"
    else:
        remedy = "use an architecture of this plugin with two heads or more"
    default = f" (the default is {weight})" if weight == penalty.weight else ""
    raise OptionError(
        f"--{name}-weight {weight}: nothing to act on in this model; {remedy}, or 0{default}"
    )


def _register(name: str) -> None:
    """Register `orthogonal_<name>`: fairseq's criterion and its flags, with the penalties."""
    flags = (PenaltyOptions, upstream.CRITERION_DATACLASS_REGISTRY[name])
    options = make_dataclass(f"{name}_options", (), bases=flags)
    parts = (RegularizedCriterion, upstream.CRITERION_REGISTRY[name])
    criterion = type(f"orthogonal_{name}", parts, {})
    upstream.register_criterion(f"orthogonal_{name}", dataclass=options)(criterion)


for _name in CRITERIA:
    _register(_name)
