"""The loss of BERT's pre-training."""

import math
from dataclasses import dataclass
from typing import Any, Dict, List, Tuple

import torch.nn.functional as F
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor, nn

from mixhead_plugin.criterions.regularized import PenaltyOptions, RegularizedCriterion
from mixhead_plugin.models.bert import NEXT_SENTENCE


@dataclass
class BertPretrainingCriterionConfig(FairseqDataclass):
    pass


@register_criterion("bert_pretraining", dataclass=BertPretrainingCriterionConfig)
class BertPretrainingCriterion(FairseqCriterion):
    """Cross-entropy of the masked words, plus that of whether B follows A.

    Both are means over the masked words: each counts what its pair is wrong about, too. Pairs with as many masked words
    weigh the same, as in BERT's own code; and since one number divides both, the gradient does not depend on how a
    batch is shared among workers or --update-freq.
    """

    def forward(self, model: nn.Module, sample: Dict[str, Any], reduce: bool = True) -> Tuple[Tensor, Tensor, Dict]:
        """The summed loss of a batch of `SentencePairs`, the number of masked words, and what is logged.

        `reduce` is for criteria that can tell the words apart; this one always sums, as fairseq's masked_lm.
        """
        target = sample["target"]  # [B, N]
        masked = target.ne(self.padding_idx)  # [B, N]
        words, extra = model(**sample["net_input"], masked_tokens=masked, beside=NEXT_SENTENCE)
        relations = extra["beside"]  # [B, 2]
        word_loss = F.cross_entropy(words.float(), target[masked], reduction="sum")
        relation_losses = F.cross_entropy(relations.float(), sample["next_sentence"], reduction="none")  # [B]
        weights = masked.sum(1)  # [B]
        sample_size = weights.sum()
        loss = word_loss + (relation_losses * weights).sum()
        return (
            loss,
            sample_size,
            {
                "loss": loss.detach(),
                "mlm_loss": word_loss.detach(),
                "nsp_loss": relation_losses.detach().sum(),
                "nsp_correct": relations.argmax(1).eq(sample["next_sentence"]).sum(),
                "ntokens": sample["ntokens"],
                "nsentences": sample["nsentences"],
                "sample_size": sample_size,
            },
        )

    @classmethod
    def reduce_metrics(cls, logging_outputs: List[Dict[str, Any]]) -> None:
        """The loss and that of the words in bits for each masked word, perplexity of the latter; `nsp_loss` in bits and
        `nsp_accuracy` in percent for each pair."""

        def total(name: str) -> Any:
            return sum(log.get(name, 0) for log in logging_outputs)

        words, pairs = total("sample_size"), total("nsentences")
        metrics.log_scalar("loss", total("loss") / words / math.log(2), words, round=3)
        metrics.log_scalar("mlm_loss", total("mlm_loss") / words / math.log(2), words, round=3)
        metrics.log_scalar("nsp_loss", total("nsp_loss") / pairs / math.log(2), pairs, round=3)
        metrics.log_scalar("nsp_accuracy", 100 * total("nsp_correct") / pairs, pairs, round=1)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["mlm_loss"].avg))

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


@dataclass
class OrthogonalBertPretrainingConfig(PenaltyOptions, BertPretrainingCriterionConfig):
    pass


@register_criterion("orthogonal_bert_pretraining", dataclass=OrthogonalBertPretrainingConfig)
class OrthogonalBertPretraining(RegularizedCriterion, BertPretrainingCriterion):
    pass
