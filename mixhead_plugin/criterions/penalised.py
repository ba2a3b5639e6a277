"""What turns a criterion of fairseq into one that also keeps the heads apart."""

from dataclasses import field, make_dataclass
from typing import Any, ClassVar, Dict, List, Tuple

from fairseq.criterions import FairseqCriterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from omegaconf import OmegaConf
from torch import Tensor, nn

from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.modules.penalties import PENALTIES, PenalisedPass
from mixhead_plugin.options import OptionError, model_options


def _help(name: str) -> str:
    penalty = PENALTIES[name]
    return (
        f"weight of the {penalty.formula} ({penalty.source}), summed over the attentions; in training alone; "
        f"0 leaves it out (default: {penalty.weight})"
    )


PenaltyOptions = make_dataclass(
    "PenaltyOptions",
    [
        (f"{name}_weight", float, field(default=penalty.weight, metadata={"help": _help(name)}))
        for name, penalty in PENALTIES.items()
    ],
    bases=(FairseqDataclass,),
    namespace={"__doc__": "The flags that every orthogonal_* criterion has beside its stock ones."},
)


class PenalisedCriterion(FairseqCriterion):
    """Mixin before a criterion of fairseq whose loss is a sum over the batch.

    The penalties act in training alone: the loss of a validation, and the `loss` and perplexity of all logs, are those
    of the criterion itself. They are computed in float32.
    """

    # What each penalty is multiplied with; the penalties with weight 0 are not computed and are not in here.
    penalty_weights: ClassVar[Dict[str, float]] = {n: p.weight for n, p in PENALTIES.items() if p.weight > 0}

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> "PenalisedCriterion":
        weights = {name: getattr(cfg, f"{name}_weight") for name in PENALTIES}
        _check_weights(weights)
        if OmegaConf.is_config(cfg) and cfg._get_parent() is not None:
            _check_model(weights, cfg._get_parent().get("model"))
        criterion = super().build_criterion(cfg, task)
        criterion.penalty_weights = {name: weight for name, weight in weights.items() if weight > 0}
        return criterion

    def forward(self, model: nn.Module, sample: Dict[str, Any], reduce: bool = True) -> Tuple[Tensor, Any, Dict]:
        """As in fairseq; the loss has the penalties in training, unless it is wanted token by token (not `reduce`).

        Raises:
            OptionError: a penalty has nothing to act on in `model`
        """
        if not (self.training and reduce and self.penalty_weights):
            return super().forward(model, sample, reduce)
        penalised = PenalisedPass(model, self.penalty_weights, self._real_queries(sample["net_input"]))
        for name, number in penalised.attentions.items():
            if number == 0:
                _refuse(name, self.penalty_weights[name], "this model")
        with penalised:
            loss, sample_size, logging_output = super().forward(model, sample, reduce)
        for name, value in penalised.values.items():
            logging_output[f"{name}_loss"] = value * sample_size
        return penalised.add_to(loss, sample_size), sample_size, logging_output

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


def _check_weights(weights: Dict[str, float]) -> None:
    for name, weight in weights.items():
        if not 0 <= weight < float("inf"):
            raise OptionError(f"--{name}-weight {weight}: must be a number of at least 0, which switches it off")


def _check_model(weights: Dict[str, float], model: Any) -> None:
    """Refuse, before anything is trained, a model of which its flags say that a penalty finds nothing in it."""
    options = model_options(model)
    for name, weight in weights.items():
        if weight > 0 and options is None:
            _refuse(name, weight, f"--arch {getattr(model, 'arch', getattr(model, '_name', None))}")
        if weight > 0 and PENALTIES[name].on_mixing and not HEAD_MIXINGS[options.head_mixing].trained:
            _refuse(name, weight, f"--head-mixing {options.head_mixing}")


def _refuse(name: str, weight: float, what: str) -> None:
    if PENALTIES[name].on_mixing:
        trained = " or ".join(kind for kind, entry in HEAD_MIXINGS.items() if entry.trained)
        need = f"has no head mixing to train; use an architecture of this plugin with --head-mixing {trained}"
    else:
        need = "has no attention of this plugin with two heads; use one of its architectures with more attention heads"
    raise OptionError(f"--{name}-weight {weight}: {what} {need}, or --{name}-weight 0")
