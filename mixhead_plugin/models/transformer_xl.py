"""Transformer-XL: architectures `<family>_transformer_xl*`."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Dict, List, NoReturn, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqLanguageModel
from fairseq.tasks import TASK_REGISTRY, FairseqTask
from omegaconf import II

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.models.families import FamilyModel, family_config, register_families
from mixhead_plugin.models.truncated_bptt import number_windows, set_up_from_checkpoints
from mixhead_plugin.modules.transformer_xl import TransformerXLDecoder
from mixhead_plugin.options import FAMILIES, AttentionOptions, AttentionShape, as_namespace, check_scope, complete

try:  # registers the task and fairseq's own Transformer-XL, which misses a package not before it is built
    from fairseq.examples.truncated_bptt.transformer_xl_model import TransformerXLConfig as StockConfig
    from fairseq.examples.truncated_bptt.truncated_bptt_lm_task import TruncatedBPTTLMTask as OrderedTask

    MISSING = ""
except ImportError as error:
    StockConfig, OrderedTask, MISSING = FairseqDataclass, FairseqTask, str(error)

TASK = "truncated_bptt_lm"
DEFAULT_MAX_TARGET_POSITIONS = 1024

# Whole numbers, and the least that each can be.
LEAST = {"n_layer": 1, "n_head": 1, "d_model": 2, "d_head": 1, "d_inner": 1, "div_val": 1, "mem_len": 0}


@dataclass
class TransformerXLConfig(AttentionOptions, StockConfig):
    """fairseq's config of its Transformer-XL plus the flags of the plugin."""

    head_dim: Optional[int] = field(
        default=None,
        metadata={"help": "size of one head; the same as --d-head, and stronger (in family fixhead the only one)"},
    )
    max_target_positions: Optional[int] = II("task.max_target_positions")  # language_modeling may have none
    tokens_per_sample: int = II("task.tokens_per_sample")


class TransformerXLModel(FamilyModel, FairseqLanguageModel):
    """Language model with a memory of the text before each window (Dai et al. 2019), and the plugin's attention."""

    embed_flag = "--d-model"
    heads_flag = "--n-head"

    @classmethod
    def options_of(cls, args: Any) -> TransformerXLConfig:
        return TransformerXLConfig.from_namespace(args)

    @classmethod
    def attention_shapes(cls, args: Any) -> Dict[str, AttentionShape]:
        cfg = cls.options_of(args)
        return {"decoder-self": cls.shape("decoder", cfg.d_model, cfg.n_head)}

    @classmethod
    def check_args(cls, args: Any) -> None:
        complete(args, cls.family)
        cfg = cls.options_of(args)
        _check_sizes(cfg)
        if cfg.attention_impl == "triton":
            raise OptionError("--attention-impl triton: lacks relative positions; must be auto, blockwise or reference")
        if cfg.relative_position != "none":
            raise OptionError(
                f"--relative-position {cfg.relative_position}: must be none, Transformer-XL has one of its own"
            )
        task = getattr(args, "task", None)
        if isinstance(task, str):  # on the command line alone
            _check_task(cfg, task, TASK_REGISTRY.get(task, FairseqTask))
            if not hasattr(args, "tokens_per_sample"):
                raise OptionError(f"--task {task}: Transformer-XL needs one with --tokens-per-sample, {TASK}")
            if getattr(args, "batch_size", None) is None and task == TASK:
                raise OptionError(f"--batch-size is missing: --task {TASK} cuts the text into so many rows")
        check_scope(cfg, cls.attention_shapes(args))  # before --d-head becomes a --head-dim, which scopes are good for
        if args.head_dim is None and "head_dim" not in FAMILIES[cls.family]:
            args.head_dim = cfg.d_head
        super().check_args(args)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "TransformerXLModel":
        args = as_namespace(args)
        cls.check_args(args)
        cfg = TransformerXLConfig.from_namespace(args)
        if isinstance(task, FairseqTask):
            names = (name for name, registered in TASK_REGISTRY.items() if registered is type(task))
            name = next(names, getattr(task.cfg, "_name", None) or type(task).__name__)
            _check_task(cfg, name, type(task))
        lengths = [cfg.max_target_positions, cfg.tokens_per_sample, DEFAULT_MAX_TARGET_POSITIONS]
        cfg.max_target_positions = next(n for n in lengths if isinstance(n, int))
        cutoffs = _cutoffs(cfg, len(task.target_dictionary))
        if isinstance(task, OrderedTask):
            number_windows(task)
        return cls(TransformerXLDecoder(cfg, task.target_dictionary, cutoffs))

    def reset_memory(self) -> None:
        """Forget the text before, of training and of evaluation."""
        self.decoder.memory.reset()


def _check_sizes(cfg: TransformerXLConfig) -> None:
    for name, least in LEAST.items():
        value = getattr(cfg, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise OptionError(f"{option_name(name)} {value}: must be a whole number of at least {least}")
    if cfg.d_model % 2:
        raise OptionError(f"--d-model {cfg.d_model}: must be even, for as many sines as cosines of the distance")
    for name in ("dropout", "dropatt"):
        if not 0 <= getattr(cfg, name) < 1:
            raise OptionError(f"{option_name(name)} {getattr(cfg, name)}: must be a probability, less than 1")
    if not isinstance(cfg.clamp_len, int) or isinstance(cfg.clamp_len, bool):
        raise OptionError(f"--clamp-len {cfg.clamp_len}: must be a distance, or 0 or less for none")
    shown = ",".join(map(str, cfg.cutoffs))
    if not all(isinstance(cutoff, int) for cutoff in cfg.cutoffs) or any(
        start >= stop for start, stop in zip([0, *cfg.cutoffs], cfg.cutoffs)
    ):
        raise OptionError(f"--cutoffs {shown}: must be words greater than 0 in ascending order, as 20000,40000")
    if cfg.same_length and cfg.mem_len == 0:
        raise OptionError("--same-length: lets each token see --mem-len tokens, which must then be at least 1, not 0")


def _check_task(cfg: TransformerXLConfig, name: str, task: type) -> None:
    """Refuse a memory where windows do not come in the order of their text."""
    if cfg.mem_len > 0 and not issubclass(task, OrderedTask):
        raise OptionError(
            f"--mem-len {cfg.mem_len}: --task {name} does not keep the windows of a text in order; must be 0 "
            f"(for a trained model: --model-overrides \"{{'mem_len': 0}}\"), or --task {TASK}"
        )


def _cutoffs(cfg: TransformerXLConfig, vocabulary: int) -> List[int]:
    """--cutoffs as far as the vocabulary goes, and its size"""
    cutoffs = [*(cutoff for cutoff in cfg.cutoffs if cutoff < vocabulary), vocabulary]
    bands = len(cutoffs)
    if cfg.d_model // cfg.div_val ** (bands - 1) < 1:
        raise OptionError(
            f"--div-val {cfg.div_val}: leaves the last of {bands} bands (--cutoffs) no column of --d-model "
            f"{cfg.d_model}"
        )
    return cutoffs


class NoTransformerXL(FamilyModel):
    """What stands for the model where fairseq lacks the example with its task: says so when it is asked for."""

    @classmethod
    def add_args(cls, parser: Any) -> NoReturn:
        raise OptionError(
            f"--arch {cls.family}_transformer_xl: this fairseq lacks fairseq.examples.truncated_bptt, with the "
            f"task and the flags ({MISSING}); fairseq-fixed has it"
        )

    @classmethod
    def check_args(cls, args: Any) -> NoReturn:
        cls.add_args(None)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> NoReturn:
        cls.add_args(None)


if MISSING:
    MODELS = register_families(NoTransformerXL, "transformer_xl", architectures={"transformer_xl": lambda args: None})
else:
    set_up_from_checkpoints(OrderedTask)
    MODELS = register_families(TransformerXLModel, "transformer_xl", partial(family_config, TransformerXLConfig))
