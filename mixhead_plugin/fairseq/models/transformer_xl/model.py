"""Transformer-XL: architectures `<family>_transformer_xl*`."""

from dataclasses import dataclass
from typing import Any, Optional

from fairseq.models import FairseqLanguageModel
from fairseq.tasks import TASK_REGISTRY, FairseqTask
from omegaconf import II

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.checks import check_whole_number, part_errors_as_option_errors
from mixhead_plugin.fairseq.fairseq_examples import TransformerXLConfig, TruncatedBPTTLMTask
from mixhead_plugin.fairseq.models.families import FamilyModel
from mixhead_plugin.fairseq.models.transformer_xl.decoder import MixheadTransformerXLDecoder
from mixhead_plugin.fairseq.options import AttentionOptions, flag_field
from mixhead_plugin.fairseq.relative import refuse_relative_position
from mixhead_plugin.fairseq.sites import SiteSizes
from mixhead_plugin.fairseq.task_marks import ask_for_window_numbers

DEFAULT_MAX_TARGET_POSITIONS = 1024

# The smallest value of each flag.
LEAST = {
    "n_layer": 1,
    "n_head": 1,
    "d_model": 2,
    "d_head": 1,
    "d_inner": 1,
    "div_val": 1,
    "mem_len": 0,
}


@dataclass
class MixheadTransformerXLConfig(AttentionOptions, TransformerXLConfig):
    """fairseq's config of Transformer-XL plus the flags of the plugin."""

    head_dim: Optional[int] = flag_field("head_dim", None, "size of one head", no_value="--d-head")
    max_target_positions: Optional[int] = II("task.max_target_positions")
    tokens_per_sample: int = II("task.tokens_per_sample")


class MixheadTransformerXLModel(FamilyModel, FairseqLanguageModel):
    """Dai et al. 2019: a language model with a memory of the text before each window."""

    config = MixheadTransformerXLConfig
    by_dataclass = True
    embed_flag = "--d-model"
    heads_flag = "--n-head"

    @classmethod
    def attention_sites(cls, args: Any) -> dict[str, SiteSizes]:
        cfg = cls.config.from_namespace(args)
        sizes = cls.site_sizes("decoder", cfg.d_model, cfg.n_head)
        return {"decoder-self": sizes._replace(head_dim=cfg.d_head, relative=True)}

    @classmethod
    def check_args(cls, args: Any) -> None:
        cfg = cls.config.from_namespace(args)
        for name, least in LEAST.items():
            check_whole_number(name, getattr(cfg, name), least)
        if cfg.d_model % 2:
            raise OptionError(
                f"--d-model {cfg.d_model}: must be even, for as many sines as cosines of the "
                "distance"
            )
        if cfg.cutoffs != sorted({cutoff for cutoff in cfg.cutoffs if cutoff > 0}):
            raise OptionError(
                f"--cutoffs {cfg.cutoffs}: must be numbers of words in ascending order, as "
                "20000,40000"
            )
        if cfg.same_length and cfg.mem_len == 0:
            raise OptionError(
                "--same-length: needs a --mem-len of at least 1: each token sees that many "
                "positions"
            )
        with part_errors_as_option_errors():
            refuse_relative_position(cfg, ", Transformer-XL has its own")
        super().check_args(args)
        # The flags of a command have the name of the task. `build_model` checks the task that a
        # program, or a YAML file, gives.
        task = getattr(args, "task", None)
        if isinstance(task, str):
            _check_order(cfg, task, TASK_REGISTRY.get(task, FairseqTask))

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "MixheadTransformerXLModel":
        args = cls.prepared(args)
        cfg = cls.config.from_namespace(args)
        if isinstance(task, FairseqTask):
            name = getattr(task.cfg, "_name", None) or type(task).__name__
            _check_order(cfg, name, type(task))
        cfg.head_dim = cfg.head_dim or cfg.d_head
        cfg.max_target_positions = (
            cfg.max_target_positions or cfg.tokens_per_sample or DEFAULT_MAX_TARGET_POSITIONS
        )
        cutoffs = _cutoffs(cfg, len(task.target_dictionary))
        if isinstance(task, TruncatedBPTTLMTask):
            # So that a new epoch or set begins with an empty memory.
            ask_for_window_numbers(task)
        return cls(MixheadTransformerXLDecoder(cfg, task.target_dictionary, cutoffs))

    def reset_memory(self) -> None:
        """Empty the memories of training and of evaluation."""
        self.decoder.memory.reset()


def _check_order(cfg: MixheadTransformerXLConfig, name: str, task: type[FairseqTask]) -> None:
    """Refuse --mem-len for a task whose windows do not come in the order of their text."""
    if cfg.mem_len > 0 and not issubclass(task, TruncatedBPTTLMTask):
        raise OptionError(
            f"--mem-len {cfg.mem_len}: --task {name} does not keep the windows of a text in order; "
            "must be 0 (for a trained model: --model-overrides \"{'mem_len': 0}\"), or --task "
            "truncated_bptt_lm"
        )


def _cutoffs(cfg: MixheadTransformerXLConfig, vocabulary: int) -> list[int]:
    """Return those of --cutoffs that are below the size of the vocabulary, and that size."""
    cutoffs = [*(cutoff for cutoff in cfg.cutoffs if cutoff < vocabulary), vocabulary]
    # Band i has d_model // div_val**i columns.
    divisions = len(cutoffs) - 1
    if cfg.d_model < cfg.div_val**divisions:
        most = 1
        while (most + 1) ** divisions <= cfg.d_model:
            most += 1
        raise OptionError(
            f"--div-val {cfg.div_val}: leaves the last of {len(cutoffs)} bands (--cutoffs) no "
            f"column of --d-model {cfg.d_model}; must be at most {most}"
        )
    return cutoffs
