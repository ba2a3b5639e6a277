"""The losses of BERT's pre-training and of SQuAD, also with penalties on the heads."""

import math
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor, nn

from bert.model import NEXT_SENTENCE
from bert.squad_windows import IGNORED
from mixhead_plugin.fairseq.criterions.regularized import PenaltyOptions, RegularizedCriterion


class SummedCriterion(FairseqCriterion):
    """A criterion whose logging outputs are sums."""

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


@dataclass
class BertPretrainingCriterionConfig(FairseqDataclass):
    pass


@register_criterion("bert_pretraining", dataclass=BertPretrainingCriterionConfig)
class BertPretrainingCriterion(SummedCriterion):
    """Add the cross entropies of the masked words and of whether B follows A.

    Both are means over the masked words: a pair counts as often as it has masked words. So one
    number divides both, and the gradient does not depend on how workers or --update-freq share a
    batch. Pairs with equally many masked words have equal weights, as in BERT's own code.
    """

    def forward(
        self, model: nn.Module, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, Tensor, dict]:
        """Return the summed loss of a batch of `SentencePairs`, the number of masked words, and the
        logging output.

        This criterion always sums, as fairseq's masked_lm does; `reduce` has no effect.
        """
        target = sample["target"]  # [B, N]
        masked = target.ne(self.padding_idx)  # [B, N]
        words, extra = model(**sample["net_input"], masked_tokens=masked, beside=NEXT_SENTENCE)
        relations = extra["beside"]  # [B, 2]
        word_loss = F.cross_entropy(words.float(), target[masked], reduction="sum")
        relation_losses = F.cross_entropy(  # [B]
            relations.float(), sample["next_sentence"], reduction="none"
        )
        weights = masked.sum(1)  # [B]
        sample_size = weights.sum()
        loss = word_loss + (relation_losses * weights).sum()
        logging_output = {
            "loss": loss.detach(),
            "mlm_loss": word_loss.detach(),
            "nsp_loss": relation_losses.detach().sum(),
            "nsp_correct": relations.argmax(1).eq(sample["next_sentence"]).sum(),
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": sample_size,
        }
        return loss, sample_size, logging_output

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log `loss` and `mlm_loss` in bits for each masked word, `nsp_loss` in bits and
        `nsp_accuracy` in percent.
        """

        def total(name: str) -> Any:
            return sum(log.get(name, 0) for log in logging_outputs)

        words = total("sample_size")
        pairs = total("nsentences")
        metrics.log_scalar("loss", total("loss") / words / math.log(2), words, round=3)
        metrics.log_scalar("mlm_loss", total("mlm_loss") / words / math.log(2), words, round=3)
        metrics.log_scalar("nsp_loss", total("nsp_loss") / pairs / math.log(2), pairs, round=3)
        metrics.log_scalar("nsp_accuracy", 100 * total("nsp_correct") / pairs, pairs, round=1)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["mlm_loss"].avg))


@dataclass
class OrthogonalBertPretrainingConfig(PenaltyOptions, BertPretrainingCriterionConfig):
    pass


@register_criterion("orthogonal_bert_pretraining", dataclass=OrthogonalBertPretrainingConfig)
class OrthogonalBertPretraining(RegularizedCriterion, BertPretrainingCriterion):
    pass


@dataclass
class SquadCriterionConfig(FairseqDataclass):
    pass


@register_criterion("squad", dataclass=SquadCriterionConfig)
class SquadCriterion(SummedCriterion):
    """Take the mean of the cross entropies of the answer's first and last token."""

    def forward(
        self, model: nn.Module, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, Tensor, dict]:
        """Return the loss summed over the windows (not `reduce`: [B]), the sample size, and the
        logging output.

        The sample size is the number of windows whose answer, or its absence, is known; other
        windows are ignored. In validation the task decodes the answers of the batch, and scores
        them in its `reduce_metrics`.
        """
        logits = model(**sample["net_input"])[0].float()  # [B, N, 2]
        # Without this mask the loss would depend on the padding, and so on the rest of the batch.
        padding = sample["net_input"]["src_tokens"].eq(self.padding_idx)
        logits = logits.masked_fill(padding.unsqueeze(-1), -math.inf)
        target = sample["target"]  # [B, 2]
        # [B]
        losses = F.cross_entropy(logits, target, reduction="none", ignore_index=IGNORED).mean(-1)
        # stays a tensor: .item() would wait for the device
        sample_size = target[:, 0].ne(IGNORED).sum()
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
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the loss of a window in bits."""
        total = sum(log.get("loss", 0) for log in logging_outputs)
        number = sum(log.get("sample_size", 0) for log in logging_outputs)
        if number:  # a file without answers has no loss
            metrics.log_scalar("loss", total / number / math.log(2), number, round=3)


@dataclass
class OrthogonalSquadConfig(PenaltyOptions, SquadCriterionConfig):
    pass


@register_criterion("orthogonal_squad", dataclass=OrthogonalSquadConfig)
class OrthogonalSquad(RegularizedCriterion, SquadCriterion):
    pass
