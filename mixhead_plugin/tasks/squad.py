"""SQuAD 1.1 as a task of fairseq: the answer to a question is a span of its context (Devlin et al. 2019, section 4.2).

The data are a folder with dict.txt, a WordPiece vocabulary, and a file of SQuAD's layout for each set, train.json and
valid.json. Text is tokenised and cut into windows when a set is loaded; fairseq's --batch-size counts windows.
"""

import logging
import math
import os
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Dict, List, Optional

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed import utils as distributed
from fairseq.logging import metrics
from fairseq.logging.meters import MetersDict, safe_round
from fairseq.tasks import register_task
from omegaconf import II, MISSING
from torch import Tensor, nn

from mixhead_plugin.data import squad
from mixhead_plugin.data.answers import NBestFile, Span, spans_of
from mixhead_plugin.data.squad_windows import SPECIAL, Sizes, SquadWindows
from mixhead_plugin.data.wordpiece import CONTINUATION, WordPiece
from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.modules.span_head import install_span_head
from mixhead_plugin.tasks.base import Task

logger = logging.getLogger(__name__)

ANSWERS = "_answers"  # a meter; fairseq prints none with such a name


def _flag(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": f"{text} (default: {default})"})


@dataclass
class SquadTaskConfig(FairseqDataclass):
    data: str = field(default=MISSING, metadata={"help": "folder with dict.txt, train.json and valid.json"})
    cased: bool = field(default=False, metadata={"help": "the vocabulary is cased: keep case and accents"})
    max_seq_length: int = _flag(384, "tokens of a window: the question, as much of the context as fits, [CLS], 2 [SEP]")
    doc_stride: int = _flag(128, "tokens of a context between the beginnings of its windows")
    max_query_length: int = _flag(64, "tokens of a question, longer ones are cut")
    n_best_size: int = _flag(20, "answers of each window in --nbest-file")
    max_answer_length: int = _flag(30, "tokens of an answer that is predicted")
    nbest_file: Optional[str] = field(
        default=None, metadata={"help": "of fairseq-validate: where to write the best answers of each window"}
    )
    max_positions: int = _flag(512, "tokens that the model has positions for")
    train_subset: str = II("dataset.train_subset")
    seed: int = II("common.seed")


def check(cfg: SquadTaskConfig) -> None:
    """Refuse what cannot work.

    Raises:
        OptionError: one line with the flag, its value and what would be valid
    """
    for name in ("doc_stride", "max_query_length", "n_best_size", "max_answer_length"):
        if getattr(cfg, name) < 1:
            raise OptionError(f"{option_name(name)} {getattr(cfg, name)}: must be at least 1")
    if cfg.max_seq_length > cfg.max_positions:
        raise OptionError(f"--max-seq-length {cfg.max_seq_length}: must be at most --max-positions {cfg.max_positions}")
    room = _sizes(cfg).least_room
    if room < 1:
        least = cfg.max_query_length + SPECIAL + 1
        raise OptionError(
            f"--max-seq-length {cfg.max_seq_length}: must be at least {least}, or no context fits beside "
            f"--max-query-length {cfg.max_query_length}"
        )
    if cfg.doc_stride > room:
        raise OptionError(
            f"--doc-stride {cfg.doc_stride}: must be at most {room}, the context that a window has room for, or what "
            "lies between two windows is never read"
        )


def _sizes(cfg: Any) -> Sizes:
    return Sizes(cfg.max_seq_length, cfg.doc_stride, cfg.max_query_length)


def gather_rows(rows: Tensor) -> Tensor:
    """The rows [B, C] of all data parallel workers, whose B may differ, one after the other; the same on each."""
    group = distributed.get_data_parallel_group()
    if distributed.get_world_size(group) == 1:
        return rows
    numbers = torch.stack(distributed.all_gather(torch.tensor([len(rows)], device=rows.device), group)).flatten()
    padded = rows.new_zeros(int(numbers.max()), rows.shape[1])
    padded[: len(rows)] = rows
    return torch.cat([part[:number] for part, number in zip(distributed.all_gather(padded, group), numbers)])


@register_task("squad", dataclass=SquadTaskConfig)
class SquadTask(Task):
    """Questions with a context, for the criterion `squad`."""

    cfg: SquadTaskConfig

    def __init__(self, cfg: SquadTaskConfig, dictionary: Dictionary):
        super().__init__(cfg)
        self.dictionary = dictionary
        self.tokeniser = WordPiece(dictionary.symbols[dictionary.nspecial :], lowercase=not cfg.cased)
        self._questions: List[squad.Question] = []  # of all sets, by number
        self._contexts: List[str] = []  # of these questions
        self._answers: List[Tensor] = []  # decoded, and not yet in any metric
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
                f"{path}: must be a WordPiece vocabulary; it has no piece that begins with {CONTINUATION}"
            )
        dictionary.add_symbol("<mask>")  # where a masked language model has it
        return cls(cfg, dictionary)

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> nn.Module:
        model = super().build_model(cfg, from_checkpoint)
        install_span_head(model)
        return model

    def load_dataset(self, split: str, combine: bool = False, **kwargs: Any) -> SquadWindows:
        path = os.path.join(self.cfg.data, f"{split}.json")
        try:
            content = squad.read_squad(path)
        except squad.SquadError as error:
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
            f"{path}: {len(content.questions):,} questions, {len(windows):,} windows; {windows.cut:,} questions cut to "
            f"{self.cfg.max_query_length} tokens; {windows.unlocated:,} whose answer is not where the file says, left "
            "out of the loss"
        )
        self.datasets[split] = windows
        return windows

    def begin_epoch(self, epoch: int, model: nn.Module) -> None:
        if self.cfg.nbest_file is not None:
            raise OptionError(f"--nbest-file {self.cfg.nbest_file}: is for fairseq-validate")
        super().begin_epoch(epoch, model)

    def decode(self, sample: Dict[str, Any], logits: Tensor) -> Tensor:
        """The best answer of each window; the n best go to --nbest-file, if there is one.

        `reduce_metrics` finds those of all workers, which must decode a batch each. fairseq's own way for what cannot
        be summed, --all-gather-list-size, needs GPUs.

        Args:
            sample: a batch of B windows
            logits: [B, N, 2]; -inf for padding

        Returns:
            float64 [B, 4] on the CPU: the question's number, the answer's first character and last + 1, its score;
            an empty answer with a score of -inf where the window has none
        """
        number = 1 if self.cfg.nbest_file is None else self.cfg.n_best_size
        spans = spans_of(sample, logits, number, self.cfg.max_answer_length)
        if self.cfg.nbest_file is not None:
            self._nbest_file().write(sample, spans)
        best = [found[0] if found else Span(0, 0, -math.inf) for found in spans]
        rows = [(question, *span) for question, span in zip(sample["question"].tolist(), best)]
        answers = torch.tensor(rows, dtype=torch.float64)
        self._answers.append(gather_rows(answers.to(logits.device)).cpu())
        return answers

    def _nbest_file(self) -> NBestFile:
        if distributed.get_data_parallel_world_size() > 1:
            raise OptionError(f"--nbest-file {self.cfg.nbest_file}: needs --distributed-world-size 1")
        if self._nbest is None:
            try:
                self._nbest = NBestFile(self.cfg.nbest_file)
            except OSError as error:
                raise OptionError(f"--nbest-file {self.cfg.nbest_file}: {error.strerror}") from None
        return self._nbest

    def reduce_metrics(self, logging_outputs: List[Dict[str, Any]], criterion: Any) -> None:
        """The criterion's, and in validation exact_match and f1 of the questions that were seen."""
        super().reduce_metrics(logging_outputs, criterion)
        if self._answers:
            metrics.log_concat_tensor(ANSWERS, torch.cat(self._answers))
            self._answers.clear()
            for name in squad.Score._fields:
                metrics.log_derived(name, partial(self._score, name))

    def _score(self, name: str, meters: MetersDict) -> float:
        best: Dict[int, List[float]] = {}
        for question, *answer in meters[ANSWERS].tensor.tolist():
            if question not in best or answer[-1] > best[question][-1]:
                best[question] = answer
        predictions = {
            self._questions[int(question)].id: self._contexts[int(question)][int(start) : int(end)]
            for question, (start, end, _) in best.items()
        }
        seen = [self._questions[int(question)] for question in best]
        return safe_round(getattr(squad.score(seen, predictions), name), 2)

    def max_positions(self) -> int:
        return self.cfg.max_positions

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        return self.dictionary
