"""The task of BERT's pre-training: masked words and next sentences.

See Devlin et al. 2019, section 3.1.
"""

import logging
import os
from dataclasses import dataclass, field
from typing import Any

from fairseq import utils
from fairseq.data import Dictionary, data_utils
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import register_task
from omegaconf import II, MISSING
from torch import nn

from bert.bases import Task
from bert.model import NEXT_SENTENCE, BertModel
from bert.sentence_pairs import SPECIAL, Masking, SentencePairs
from mixhead_plugin.errors import OptionError, option_name

logger = logging.getLogger(__name__)


@dataclass
class BertPretrainingConfig(FairseqDataclass):
    data: str = field(
        default=MISSING,
        metadata={
            "help": "folder of fairseq-preprocess --only-source, one sentence in each line of the "
            "text and an empty line after each document; several, separated by colons, serve one "
            "epoch each"
        },
    )
    tokens_per_sample: int = field(
        default=128,
        metadata={"help": "the most tokens of a pair of segments, with [CLS] and both [SEP]"},
    )
    lines_per_document: int = field(
        default=0,
        metadata={
            "help": "lines of each document, in a text without empty lines between documents"
        },
    )
    short_prob: float = field(
        default=0.1, metadata={"help": "share of pairs that are cut to a random smaller length"}
    )
    mask_prob: float = field(
        default=0.15, metadata={"help": "share of the tokens that the model must restore"}
    )
    leave_unmasked_prob: float = field(
        default=0.1, metadata={"help": "share of those that stay as they are"}
    )
    random_token_prob: float = field(
        default=0.1, metadata={"help": "share of those that a random word replaces"}
    )
    seed: int = II("common.seed")


@register_task("bert_pretraining", dataclass=BertPretrainingConfig)
class BertPretrainingTask(Task):
    """Make pairs of segments with masked words, and give the model its second head.

    The pairs are `SentencePairs`.
    """

    cfg: BertPretrainingConfig

    def __init__(self, cfg: BertPretrainingConfig, dictionary: Dictionary):
        super().__init__(cfg)
        self.dictionary = dictionary
        self.mask = dictionary.add_symbol("<mask>")

    @classmethod
    def setup_task(cls, cfg: BertPretrainingConfig, **kwargs: Any) -> "BertPretrainingTask":
        check(cfg)
        path = os.path.join(utils.split_paths(cfg.data)[0], "dict.txt")
        if not os.path.exists(path):
            raise OptionError(
                f"data {cfg.data}: has no dict.txt; run fairseq-preprocess --only-source first"
            )
        dictionary = Dictionary.load(path)
        logger.info(f"dictionary: {len(dictionary)} types")
        return cls(cfg, dictionary)

    def load_dataset(
        self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any
    ) -> None:
        """Load the pairs of a split from the folder of this epoch.

        Raises:
            OptionError: the split is missing, or has fewer than two documents
        """
        paths = utils.split_paths(self.cfg.data)
        path = os.path.join(paths[(epoch - 1) % len(paths)], split)
        lines = data_utils.load_indexed_dataset(path, self.dictionary, combine=combine)
        if lines is None:
            raise OptionError(
                f"data {self.cfg.data}: has no {split}.* file; "
                "run fairseq-preprocess --only-source first"
            )
        masking = Masking(
            self.mask, self.cfg.mask_prob, self.cfg.leave_unmasked_prob, self.cfg.random_token_prob
        )
        pairs = SentencePairs(
            lines,
            lines.sizes,
            self.dictionary,
            self.cfg.tokens_per_sample,
            masking,
            self.cfg.seed,
            self.cfg.short_prob,
            self.cfg.lines_per_document,
        )
        if pairs.documents < 2:
            raise OptionError(
                f"data {path}: has {pairs.documents} documents, random segments need two; "
                "put an empty line "
                "after each, or use --lines-per-document"
            )
        logger.info(
            f"{split}: {pairs.documents} documents, {len(pairs)} pairs of segments from {path}"
        )
        self.datasets[split] = pairs

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> nn.Module:
        """Build the model with a head that tells next sentences from random ones.

        Raises:
            OptionError: the model is no BERT
        """
        model = super().build_model(cfg, from_checkpoint)
        if not isinstance(model, BertModel):
            name = getattr(cfg, "arch", getattr(cfg, "_name", None))
            raise OptionError(
                f"--arch {name}: --task bert_pretraining needs an architecture *_bert*"
            )
        model.register_classification_head(NEXT_SENTENCE, num_classes=2, dropout=0.0)
        return model

    def max_positions(self) -> int:
        return self.cfg.tokens_per_sample


def check(cfg: BertPretrainingConfig) -> None:
    """Refuse impossible values.

    Raises:
        OptionError: one line with the flag, its value and the valid values
    """
    probabilities: dict[str, float] = {
        name: getattr(cfg, name)
        for name in ("short_prob", "mask_prob", "leave_unmasked_prob", "random_token_prob")
    }
    for name, value in probabilities.items():
        if not 0 <= value <= 1:
            raise OptionError(f"{option_name(name)} {value}: must be between 0 and 1")
    if cfg.mask_prob == 0:
        raise OptionError(
            f"--mask-prob {cfg.mask_prob}: must be more than 0, or there is nothing to find again"
        )
    if cfg.leave_unmasked_prob + cfg.random_token_prob > 1:
        raise OptionError(
            f"--random-token-prob {cfg.random_token_prob}: must be at most 1 "
            "with --leave-unmasked-prob "
            f"{cfg.leave_unmasked_prob} added"
        )
    if cfg.tokens_per_sample < SPECIAL + 2:
        raise OptionError(
            f"--tokens-per-sample {cfg.tokens_per_sample}: must be at least {SPECIAL + 2}"
        )
    if cfg.lines_per_document < 0:
        raise OptionError(
            f"--lines-per-document {cfg.lines_per_document}: must be at least 1, "
            "or 0 for empty lines"
        )
