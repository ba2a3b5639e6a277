"""Build Transformer-XL, architectures `<family>_transformer_xl*`, and repair the task that feeds it."""

import logging
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqLanguageModel
from fairseq.tasks import TASK_REGISTRY, FairseqTask
from omegaconf import II

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.models.families import FamilyModel
from mixhead_plugin.modules.transformer_xl import TransformerXLDecoder
from mixhead_plugin.options import AttentionOptions, AttentionShape

try:  # this registers the task
    from fairseq.examples.truncated_bptt.transformer_xl_model import TransformerXLConfig as UpstreamConfig
    from fairseq.examples.truncated_bptt.truncated_bptt_lm_task import TruncatedBPTTLMTask as OrderedTask
except ImportError:  # a fairseq without its examples: no Transformer-XL is registered
    UpstreamConfig, OrderedTask = FairseqDataclass, None

logger = logging.getLogger(__name__)

DEFAULT_MAX_TARGET_POSITIONS = 1024

LEAST = {"n_layer": 1, "n_head": 1, "d_model": 2, "d_head": 1, "d_inner": 1, "div_val": 1, "mem_len": 0}


@dataclass
class TransformerXLConfig(AttentionOptions, UpstreamConfig):
    """fairseq's config of Transformer-XL plus the flags of the plugin."""

    head_dim: Optional[int] = field(
        default=None, metadata={"help": "size of one head, overrides --d-head (default: --d-head)"}
    )
    max_target_positions: Optional[int] = II("task.max_target_positions")
    tokens_per_sample: int = II("task.tokens_per_sample")


class TransformerXLModel(FamilyModel, FairseqLanguageModel):
    """A language model with a memory of the text before each window (Dai et al. 2019) and the plugin's attention."""

    config = TransformerXLConfig
    by_dataclass = True
    embed_flag = "--d-model"
    heads_flag = "--n-head"

    @classmethod
    def attention_shapes(cls, args: Any) -> dict[str, AttentionShape]:
        cfg = cls.config.from_namespace(args)
        return {"decoder-self": cls.shape("decoder", cfg.n_head * cfg.d_head, cfg.n_head)}

    @classmethod
    def check_args(cls, args: Any) -> None:
        cfg = cls.config.from_namespace(args)
        for name, least in LEAST.items():
            if getattr(cfg, name) < least:
                raise OptionError(f"{option_name(name)} {getattr(cfg, name)}: must be at least {least}")
        if cfg.d_model % 2:
            raise OptionError(f"--d-model {cfg.d_model}: must be even, for as many sines as cosines of the distance")
        if cfg.cutoffs != sorted({cutoff for cutoff in cfg.cutoffs if cutoff > 0}):
            raise OptionError(
                f"--cutoffs {cfg.cutoffs}: must be numbers of words in ascending order, as in 20000,40000"
            )
        if cfg.same_length and cfg.mem_len == 0:
            raise OptionError("--same-length: needs a --mem-len of at least 1: each token sees that many positions")
        if cfg.attention_impl == "triton":
            raise OptionError("--attention-impl triton: lacks relative positions; must be auto, blockwise or reference")
        if cfg.relative_position != "none":
            raise OptionError(f"--relative-position {cfg.relative_position}: must be none, Transformer-XL has its own")
        super().check_args(args)
        task = getattr(args, "task", None)  # a name only on the command line
        if isinstance(task, str):
            _check_order(cfg, task, TASK_REGISTRY.get(task, FairseqTask))

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "TransformerXLModel":
        args = cls.prepared(args)
        cfg = cls.config.from_namespace(args)
        if isinstance(task, FairseqTask):
            _check_order(cfg, getattr(task.cfg, "_name", None) or type(task).__name__, type(task))
        cfg.head_dim = cfg.head_dim or cfg.d_head
        cfg.max_target_positions = cfg.max_target_positions or cfg.tokens_per_sample or DEFAULT_MAX_TARGET_POSITIONS
        cutoffs = _cutoffs(cfg, len(task.target_dictionary))
        if OrderedTask is not None and isinstance(task, OrderedTask):
            number_windows(task)
        return cls(TransformerXLDecoder(cfg, task.target_dictionary, cutoffs))

    def reset_memory(self) -> None:
        """Empty the memories of training and of evaluation."""
        self.decoder.memory.reset()


def _check_order(cfg: TransformerXLConfig, name: str, task: type[FairseqTask]) -> None:
    """Refuse --mem-len for a task whose windows do not come in the order of their text."""
    if cfg.mem_len > 0 and not issubclass(task, OrderedTask):
        raise OptionError(
            f"--mem-len {cfg.mem_len}: --task {name} does not keep the windows of a text in order; must be 0 "
            f"(for a trained model: --model-overrides \"{{'mem_len': 0}}\"), or --task truncated_bptt_lm"
        )


def _cutoffs(cfg: TransformerXLConfig, vocabulary: int) -> list[int]:
    """Return those of --cutoffs that are below the size of the vocabulary, and that size."""
    cutoffs = [*(cutoff for cutoff in cfg.cutoffs if cutoff < vocabulary), vocabulary]
    if cfg.d_model < cfg.div_val ** (len(cutoffs) - 1):
        raise OptionError(
            f"--div-val {cfg.div_val}: leaves the last of {len(cutoffs)} bands (--cutoffs) no column of --d-model "
            f"{cfg.d_model}"
        )
    return cutoffs


class _NumberedWindows:
    """Collate a window as the task does, and add its number to the batch."""

    def __init__(self, collate: Any):
        self.collate = collate

    def __call__(self, items: list[tuple[int, list[torch.Tensor]]]) -> dict[str, Any]:
        sample = self.collate(items)
        ((number, rows),) = items
        # fairseq-interactive asks for the lengths.
        sample["net_input"].update(window=int(number), src_lengths=torch.tensor([len(row) for row in rows]))
        return sample


def number_windows(task: Any) -> None:
    """Put the number of each window of the text into the `net_input` of this task's batches.

    fairseq does not pass the number to the model, which empties its memory when a new epoch or set begins.
    """
    if isinstance(task._collate_fn, _NumberedWindows):  # several models may share a task
        return
    task._collate_fn = _NumberedWindows(task._collate_fn)
    load = task.eval_lm_dataloader

    def eval_lm_dataloader(dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse a text with fewer windows than rows; fairseq-eval-lm would print a perplexity of 1."""
        windows, rows = len(dataset.data), task.cfg.batch_size
        if len(dataset) == 0:
            raise OptionError(
                f"--batch-size {rows}: must be at most {windows}, the number of windows of --tokens-per-sample "
                f"{task.cfg.tokens_per_sample} in the text"
            )
        if windows % rows:
            logger.warning(f"the last {windows % rows} windows fill no row and are left out; --batch-size 1 takes all")
        return load(dataset, *args, **kwargs)

    task.eval_lm_dataloader = eval_lm_dataloader


def _setup_task(cls: type[Any], cfg: Any, from_checkpoint: bool = False, **kwargs: Any) -> Any:
    """Set up the task; accept `from_checkpoint` of fairseq-validate, which fairseq's task does not."""
    if from_checkpoint:
        cfg.data_parallel_rank = cfg.data_parallel_size = None  # the checkpoint has those of its training
    return cls(cfg, **kwargs)


if OrderedTask is not None:
    OrderedTask.setup_task = classmethod(_setup_task)
