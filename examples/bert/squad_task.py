"""The task of SQuAD 1.1: the answer to a question is a span of its context.

See Devlin et al. 2019, section 4.2.

The data are a folder with dict.txt, a WordPiece vocabulary, and a file of SQuAD's layout for each
set, train.json and valid.json. Loading a set cuts the text into windows; fairseq's --batch-size
counts windows.
"""

import logging
import math
import os
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Optional

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed import utils as distributed
from fairseq.logging import metrics
from fairseq.logging.meters import MetersDict, safe_round
from fairseq.tasks import register_task
from omegaconf import II, MISSING
from torch import Tensor, nn

from bert import squad_data
from bert.answers import NBestFile, Span, spans_of
from bert.bases import Task
from bert.span_head import install_span_head
from bert.squad_windows import SPECIAL, Sizes, SquadWindows
from bert.wordpiece import CONTINUATION, wordpiece
from mixhead_plugin.errors import OptionError, option_name

logger = logging.getLogger(__name__)

ANSWERS = "_answers"  # a meter; fairseq does not print names that begin with _


def _flag(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": f"{text} (default: {default})"})


@dataclass
class SquadTaskConfig(FairseqDataclass):
    data: str = field(
        default=MISSING, metadata={"help": "folder with dict.txt, train.json and valid.json"}
    )
    cased: bool = field(
        default=False, metadata={"help": "the vocabulary is cased: keep case and accents"}
    )
    max_seq_length: int = _flag(384, "tokens of a window: question, context, [CLS] and two [SEP]")
    doc_stride: int = _flag(128, "tokens of a context between the beginnings of its windows")
    max_query_length: int = _flag(64, "tokens of a question, longer ones are cut")
    n_best_size: int = _flag(20, "answers of each window in --nbest-file")
    max_answer_length: int = _flag(30, "the most tokens of a predicted answer")
    nbest_file: Optional[str] = field(
        default=None,
        metadata={"help": "file that fairseq-validate writes the best answers of each window to"},
    )
    max_positions: int = _flag(512, "the positions of the model")
    train_subset: str = II("dataset.train_subset")
    seed: int = II("common.seed")


def check(cfg: SquadTaskConfig) -> None:
    """Refuse impossible values.

    Raises:
        OptionError: one line with the flag, its value and the valid values
    """
    for name in ("doc_stride", "max_query_length", "n_best_size", "max_answer_length"):
        if getattr(cfg, name) < 1:
            raise OptionError(f"{option_name(name)} {getattr(cfg, name)}: must be at least 1")
    if cfg.max_seq_length > cfg.max_positions:
        raise OptionError(
            f"--max-seq-length {cfg.max_seq_length}: must be at most --max-positions "
            f"{cfg.max_positions}"
        )
    room = _sizes(cfg).least_room
    if room < 1:
        least = cfg.max_query_length + SPECIAL + 1
        raise OptionError(
            f"--max-seq-length {cfg.max_seq_length}: must be at least {least}, or no context fits "
            "beside "
            f"--max-query-length {cfg.max_query_length}"
        )
    if cfg.doc_stride > room:
        raise OptionError(
            f"--doc-stride {cfg.doc_stride}: must be at most {room}, the room for context in a "
            "window; "
            "else tokens between two windows are never read"
        )


def _sizes(cfg: Any) -> Sizes:
    return Sizes(cfg.max_seq_length, cfg.doc_stride, cfg.max_query_length)


def gather_rows(rows: Tensor) -> Tensor:
    """Concatenate the rows [B, C] of all data parallel workers; their B may differ."""
    group = distributed.get_data_parallel_group()
    if distributed.get_world_size(group) == 1:
        return rows
    numbers = torch.stack(
        distributed.all_gather(torch.tensor([len(rows)], device=rows.device), group)
    ).flatten()
    padded = rows.new_zeros(int(numbers.max()), rows.shape[1])
    padded[: len(rows)] = rows
    return torch.cat(
        [part[:number] for part, number in zip(distributed.all_gather(padded, group), numbers)]
    )


@register_task("squad", dataclass=SquadTaskConfig)
class SquadTask(Task):
    """Questions with a context, for the criterion `squad`."""

    cfg: SquadTaskConfig

    def __init__(self, cfg: SquadTaskConfig, dictionary: Dictionary):
        super().__init__(cfg)
        self.dictionary = dictionary
        self.tokeniser = wordpiece(dictionary, lowercase=not cfg.cased)
        self._questions: list[squad_data.Question] = []  # of all sets, by number
        self._contexts: list[str] = []  # the context of each question
        self._answers: list[Tensor] = []  # decoded, but not yet in a metric
        self._nbest: Optional[NBestFile] = None

    @classmethod
    def setup_task(cls, cfg: SquadTaskConfig, **kwargs: Any) -> "SquadTask":
        check(cfg)
        path = os.path.join(cfg.data, "dict.txt")
        if not os.path.isfile(path):
            raise OptionError(f"data {cfg.data}: has no dict.txt")
        dictionary = Dictionary.load(path)
        if not any(symbol.startswith(CONTINUATION) for symbol in dictionary.symbols):
            raise OptionError(
                f"{path}: must be a WordPiece vocabulary; it has no piece that begins with "
                f"{CONTINUATION}"
            )
        dictionary.add_symbol("<mask>")  # where a masked language model has it
        return cls(cfg, dictionary)

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> nn.Module:
        model = super().build_model(cfg, from_checkpoint)
        install_span_head(model, required=from_checkpoint)
        return model

    def load_dataset(self, split: str, combine: bool = False, **kwargs: Any) -> SquadWindows:
        path = os.path.join(self.cfg.data, f"{split}.json")
        try:
            content = squad_data.read_squad(path)
        except squad_data.SquadError as error:
            raise OptionError(str(error)) from None
        windows = SquadWindows(
            content,
            self.dictionary,
            self.tokeniser,
            _sizes(self.cfg),
            first_question=len(self._questions),
            seed=self.cfg.seed if split == self.cfg.train_subset else None,
        )
        self._questions += content.questions
        self._contexts += [content.contexts[question.context] for question in content.questions]
        logger.info(
            f"{path}: {len(content.questions):,} questions, {len(windows):,} windows; "
            f"{windows.cut:,} questions cut to "
            f"{self.cfg.max_query_length} tokens; {windows.unlocated:,} whose answer is not where "
            "the file says, left "
            "out of the loss"
        )
        self.datasets[split] = windows
        return windows

    def begin_epoch(self, epoch: int, model: nn.Module) -> None:
        if self.cfg.nbest_file is not None:
            raise OptionError(f"--nbest-file {self.cfg.nbest_file}: is for fairseq-validate")
        super().begin_epoch(epoch, model)

    def decode(self, sample: dict[str, Any], logits: Tensor) -> Tensor:
        """Find the best answer of each window, and write the n best ones to --nbest-file.

        The answers of all workers are gathered for `reduce_metrics`, so every worker must decode a
        batch. fairseq can gather such logging outputs itself, but only on GPUs.

        Args:
            sample: a batch of B windows
            logits: [B, N, 2]; -inf for padding

        Returns:
            float64 [B, 4] on the CPU: the question's number, the answer's first character and last
            + 1, and its score; a window without an answer has an empty one with a score of -inf
        """
        number = 1 if self.cfg.nbest_file is None else self.cfg.n_best_size
        spans = spans_of(sample, logits, number, self.cfg.max_answer_length)
        if self.cfg.nbest_file is not None:
            self._nbest_file().write(sample, spans)
        best = [each[0] if each else Span(0, 0, -math.inf) for each in spans]
        rows = [(question, *span) for question, span in zip(sample["question"].tolist(), best)]
        answers = torch.tensor(rows, dtype=torch.float64)
        self._answers.append(gather_rows(answers.to(logits.device)).cpu())
        return answers

    def _nbest_file(self) -> NBestFile:
        if distributed.get_data_parallel_world_size() > 1:
            raise OptionError(
                f"--nbest-file {self.cfg.nbest_file}: needs --distributed-world-size 1"
            )
        if self._nbest is None:
            try:
                self._nbest = NBestFile(self.cfg.nbest_file)
            except OSError as error:
                raise OptionError(f"--nbest-file {self.cfg.nbest_file}: {error.strerror}") from None
        return self._nbest

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        """Log the metrics of the criterion, and in validation exact_match and f1."""
        super().reduce_metrics(logging_outputs, criterion)
        if self._answers:
            metrics.log_concat_tensor(ANSWERS, torch.cat(self._answers))
            self._answers.clear()
            for name in squad_data.Score._fields:
                metrics.log_derived(name, partial(self._score, name))

    def _score(self, name: str, meters: MetersDict) -> float:
        best: dict[int, list[float]] = {}
        for question, *answer in meters[ANSWERS].tensor.tolist():
            if question not in best or answer[-1] > best[question][-1]:
                best[question] = answer
        predictions = {
            self._questions[int(question)].id: self._contexts[int(question)][int(start) : int(end)]
            for question, (start, end, _) in best.items()
        }
        seen = [self._questions[int(question)] for question in best]
        return safe_round(getattr(squad_data.score(seen, predictions), name), 2)

    def max_positions(self) -> int:
        return self.cfg.max_positions
