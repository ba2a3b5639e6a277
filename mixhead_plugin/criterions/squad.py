"""The loss of the task `squad`: cross entropy of the answer's first and last token."""

import math
from dataclasses import dataclass
from typing import Any, Dict, List, Tuple

import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor, nn

from mixhead_plugin.criterions.regularized import PenaltyOptions, RegularizedCriterion
from mixhead_plugin.data.squad_windows import IGNORED


@dataclass
class SquadCriterionConfig(FairseqDataclass):
    pass


@register_criterion("squad", dataclass=SquadCriterionConfig)
class SquadCriterion(FairseqCriterion):
    def forward(self, model: nn.Module, sample: Dict[str, Any], reduce: bool = True) -> Tuple[Tensor, Tensor, Dict]:
        """The mean of both cross entropies, summed over the windows (not `reduce`: [B]).

        The sample size is the number of windows whose answer, or its absence, is known; the others count for nothing.
        In validation the task decodes the answers of the batch, and scores them in its `reduce_metrics`.
        """
        logits = model(**sample["net_input"])[0].float()  # [B, N, 2]
        # padding is no token, or the loss would depend on the rest of the batch
        padding = sample["net_input"]["src_tokens"].eq(self.padding_idx)
        logits = logits.masked_fill(padding.unsqueeze(-1), -math.inf)
        target = sample["target"]  # [B, 2]
        losses = F.cross_entropy(logits, target, reduction="none", ignore_index=IGNORED).mean(-1)  # [B]
        sample_size = target[:, 0].ne(IGNORED).sum()  # a tensor: a number would wait for the device
        logging_output = {
            "loss": losses.detach().sum(),
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": sample_size,
        }
        if not self.training:
            self.task.decode(sample, logits.detach())
        return losses.sum() if reduce else losses, sample_size, logging_output

    @classmethod
    def reduce_metrics(cls, logging_outputs: List[Dict[str, Any]]) -> None:
        """The loss of a window in bits, as fairseq has it."""
        total = sum(log.get("loss", 0) for log in logging_outputs)
        number = sum(log.get("sample_size", 0) for log in logging_outputs)
        if number:  # a file without answers has no loss
            metrics.log_scalar("loss", total / number / math.log(2), number, round=3)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


@dataclass
class OrthogonalSquadConfig(PenaltyOptions, SquadCriterionConfig):
    pass


@register_criterion("orthogonal_squad", dataclass=OrthogonalSquadConfig)
class OrthogonalSquad(RegularizedCriterion, SquadCriterion):
    pass
