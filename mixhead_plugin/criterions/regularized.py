"""What turns a criterion of fairseq into one that also keeps the heads apart."""

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Dict, List, Mapping, Tuple

import torch
from fairseq.criterions import CRITERION_REGISTRY, FairseqCriterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from omegaconf import OmegaConf
from torch import Tensor, nn

from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.modules.penalties import PENALTIES, RegularizedPass
from mixhead_plugin.options import STOCK_MODEL, attention_heads, model_options


def _flag(name: str) -> Any:
    penalty = PENALTIES[name]
    text = (
        f"weight of the {penalty.formula} ({penalty.source}), summed over the attentions; in training alone; 0 is off"
    )
    return field(default=penalty.weight, metadata={"help": f"{text} (default: {penalty.weight})"})


@dataclass
class PenaltyOptions(FairseqDataclass):
    """The flags that every orthogonal_* criterion has beside its stock ones, `<name>_weight` for each of PENALTIES."""

    orthogonal_weight: float = _flag("orthogonal")
    rank_weight: float = _flag("rank")


class RegularizedCriterion(FairseqCriterion):
    """Mixin before a criterion of fairseq whose loss is a sum over the batch.

    The penalties act in training alone: the loss of a validation, and the `loss` and perplexity of all logs, are those
    of the criterion itself. They are computed in float32.

    Attributes:
        penalty_weights: what each penalty is multiplied with; those with weight 0 are not computed and are not in here
    """

    penalty_weights: Mapping[str, float] = MappingProxyType({})

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> "RegularizedCriterion":
        weights = {name: getattr(cfg, f"{name}_weight") for name in PENALTIES}
        for name, weight in weights.items():
            if not 0 <= weight <= torch.finfo(torch.float32).max:
                raise OptionError(f"--{name}-weight {weight}: must be a finite number, 0 (off) or more")
        weights = {name: weight for name, weight in weights.items() if weight > 0}
        whole = cfg._get_parent() if OmegaConf.is_config(cfg) else None
        if whole is not None:  # fairseq keeps the model's flags beside the criterion's
            _check_model(cls, weights, whole.get("model"))
        criterion = super().build_criterion(cfg, task)
        criterion.penalty_weights = weights
        return criterion

    def forward(self, model: nn.Module, sample: Dict[str, Any], reduce: bool = True) -> Tuple[Tensor, Any, Dict]:
        """As in fairseq; the loss has the penalties in training, unless it is wanted token by token (not `reduce`).

        Raises:
            OptionError: a penalty has nothing to act on in `model`
        """
        if not (self.training and reduce and self.penalty_weights):
            return super().forward(model, sample, reduce)
        regularized = RegularizedPass(model, self.penalty_weights, self._real_queries(sample["net_input"]))
        for name, number in regularized.attentions.items():
            if number == 0:
                _refuse(type(self), name, self.penalty_weights[name], "in this model")
        with regularized:
            loss, sample_size, logging_output = super().forward(model, sample, reduce)
        for name, value in regularized.values.items():
            logging_output[f"{name}_loss"] = value * sample_size
        return regularized.add_to(loss, sample_size), sample_size, logging_output

    def _real_queries(self, net_input: Dict[str, Any]) -> Dict[str, Tensor]:
        """For both sides of a model the queries that are not padding, bool [B, Nq]."""
        source = net_input["src_tokens"]
        target = net_input.get("prev_output_tokens", source)  # a language model decodes its source
        pad = self.task.source_dictionary.pad()
        return {"encoder": source.ne(pad), "decoder": target.ne(pad if target is source else self.padding_idx)}

    @classmethod
    def reduce_metrics(cls, logging_outputs: List[Dict[str, Any]]) -> None:
        """The metrics of fairseq's criterion, and the mean of each penalty, unweighted."""
        super().reduce_metrics(logging_outputs)
        sample_size = sum(log.get("sample_size", 0) for log in logging_outputs)
        for name in PENALTIES:
            if any(f"{name}_loss" in log for log in logging_outputs):
                total = sum(log.get(f"{name}_loss", 0) for log in logging_outputs)
                metrics.log_scalar(f"{name}_loss", total / sample_size, sample_size, round=6)


def _check_model(criterion: type, weights: Mapping[str, float], model: Any) -> None:
    """Refuse, before anything is trained, a model of which its flags say that a penalty finds nothing in it."""
    options = model_options(model)
    if options is None:  # not known by name: the first batch shows what it has
        return
    for name, weight in weights.items():
        if options is STOCK_MODEL:
            _refuse(criterion, name, weight, f"in --arch {getattr(model, 'arch', getattr(model, '_name', None))}")
        elif PENALTIES[name].on_mixing and not HEAD_MIXINGS[options.head_mixing].trained:
            _refuse(criterion, name, weight, f"with --head-mixing {options.head_mixing}")
        elif not PENALTIES[name].on_mixing and max(attention_heads(model, options).values(), default=2) < 2:
            flags = ", ".join(f"{flag} {number}" for flag, number in attention_heads(model, options).items())
            _refuse(criterion, name, weight, f"with {flags}")


def _refuse(criterion: type, name: str, weight: float, where: str) -> None:
    if PENALTIES[name].on_mixing:
        trained = " or ".join(kind for kind, entry in HEAD_MIXINGS.items() if entry.trained)
        remedy = f"use an architecture mixhead_*, --head-mixing {trained}"
    else:
        remedy = "use an architecture of this plugin with two heads or more"
    # whoever has not typed the weight knows the criterion that it comes with
    names = (f"--criterion {known}" for known, registered in CRITERION_REGISTRY.items() if registered is criterion)
    preset = f" ({weight} is the default of {next(names, 'the criterion')})" if weight == PENALTIES[name].weight else ""
    raise OptionError(f"--{name}-weight {weight}: nothing to act on {where}; {remedy}, or --{name}-weight 0{preset}")
