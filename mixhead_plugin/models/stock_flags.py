"""What fairseq's own flags cannot do. fairseq would say so by a traceback, of the first batch often, or not at all."""

import math
import re
from typing import Any, Iterator, List, Optional, Tuple

import torch
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.criterions.sentence_prediction import SentencePredictionCriterion

from mixhead_plugin.errors import OptionError, option_name

_SIDES = ("encoder", "decoder")
_ADAPTIVE = {"adaptive_softmax": "decoder_output_dim", "adaptive_input": "decoder_input_dim"}  # by width of its bands

# Whole numbers of at least 1.
SIZES = (
    *(f"{side}_{size}" for side in _SIDES for size in ("embed_dim", "ffn_embed_dim", "layers")),
    *("decoder_input_dim", "decoder_output_dim", "quant_noise_pq_block_size"),
    *("max_positions", "max_source_positions", "max_target_positions", "tokens_per_sample"),
)
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", "adaptive_softmax_dropout", "pooler_dropout")
LESS_THAN_1 = ("encoder_layerdrop", "decoder_layerdrop", "quant_noise_pq", "quant_noise_scalar")


def check_stock_flags(args: Any) -> None:
    """Refuse what no model can be built with, or what its first batch would end with.

    Args:
        args: complete, flat

    Raises:
        OptionError: one line with the flag, its value and what would be valid
    """
    for name in SIZES:
        value = _number(args, name)
        if value is not None and value < 1:
            raise OptionError(f"{option_name(name)} {value}: must be at least 1")
    for name in (*DROPOUTS, *LESS_THAN_1):
        value = _number(args, name)
        if value is not None and not (0 <= value < 1 if name in LESS_THAN_1 else 0 <= value <= 1):
            least = "from 0 to less than 1" if name in LESS_THAN_1 else "between 0 and 1"
            raise OptionError(f"{option_name(name)} {value}: must be a probability, {least}")
    for side in _SIDES:
        kept = getattr(args, f"{side}_layers_to_keep", None)
        numbers = [number.strip() for number in (kept or "0").split(",")]
        if not all(number.isdecimal() for number in numbers) or len(set(numbers)) < len(numbers):
            raise OptionError(f"--{side}-layers-to-keep {kept}: must be numbers of layers, each once, as 0,2,4")
        if kept and getattr(args, "heads_per_layer", None):
            raise OptionError(f"--{side}-layers-to-keep {kept}: must be left out with --heads-per-layer")
    _check_adaptive(args)
    _check_shared(args)
    _check_quantisation(args)


def check_training_flags(args: Any, config: Any) -> None:
    """Refuse what the training could not begin with; for what is typed on a command line, where all flags are at hand.

    Args:
        args: complete
        config: the model's, with the defaults of the flags that `args` lack

    Raises:
        OptionError: as above
    """
    optimizer = getattr(args, "optimizer", None)
    if optimizer == "composite":
        raise OptionError("--optimizer composite: takes its groups from a YAML file alone; use fairseq-hydra-train")
    if getattr(args, "cpu", False) or not torch.cuda.is_available():
        for name in ("memory_efficient_fp16", "fp16", "amp"):
            if getattr(args, name, False):
                raise OptionError(f"{option_name(name)}: needs a GPU; must be left out, or --bf16 in its place")
        if getattr(args, "quant_noise_scalar", 0):
            raise OptionError(f"--quant-noise-scalar {args.quant_noise_scalar}: needs a GPU; must be 0")
    if getattr(args, "task", None) == "masked_lm":
        _check_masking(args)
    smoothing = _number(args, "label_smoothing")
    if smoothing is not None and not 0 <= smoothing < 1:
        raise OptionError(f"--label-smoothing {smoothing}: must be from 0 to less than 1")
    _check_criterion(args, config)


def check_vocabulary(args: Any, vocabulary: int) -> None:
    """Refuse bands of rare words that begin beyond the vocabulary.

    Args:
        args: complete, flat
        vocabulary: words of the target

    Raises:
        OptionError: as above
    """
    for name in ("adaptive_softmax_cutoff", "adaptive_input_cutoff"):
        if _adaptive(args, name) and (cutoffs := _cutoffs(args, name)) and cutoffs[-1] > vocabulary:
            raise OptionError(
                f"{option_name(name)} {getattr(args, name)}: must be at most {vocabulary}, the size of the vocabulary"
            )


def _number(args: Any, name: str) -> Optional[float]:
    """None also where a config without a task has the name of another option; fairseq reads some numbers as texts."""
    value = getattr(args, name, None)
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        return int(value)
    return value if isinstance(value, (int, float)) else None


def _adaptive(args: Any, name: str) -> bool:
    return bool(getattr(args, name, None)) and (
        name != "adaptive_input_cutoff" or getattr(args, "adaptive_input", False)
    )


def _cutoffs(args: Any, name: str) -> List[int]:
    value = getattr(args, name)
    numbers = value.split(",") if isinstance(value, str) else [str(number) for number in value]
    cutoffs = [int(number) if number.strip().isdecimal() else 0 for number in numbers]
    if any(start >= stop for start, stop in zip([0, *cutoffs], cutoffs)):
        raise OptionError(
            f"{option_name(name)} {value}: must be words greater than 0 in ascending order, as 20000,60000"
        )
    return cutoffs


def _check_adaptive(args: Any) -> None:
    for kind, width in _ADAPTIVE.items():
        if not _adaptive(args, f"{kind}_cutoff"):
            continue
        bands = len(_cutoffs(args, f"{kind}_cutoff")) + 1
        factor = getattr(args, f"{kind}_factor", 4)
        if not (0 < factor < math.inf):
            raise OptionError(f"{option_name(kind)}-factor {factor}: must be a number greater than 0")
        columns = _number(args, width)
        if columns is not None and int(columns // factor ** (bands - 1)) < 1:
            raise OptionError(
                f"{option_name(kind)}-factor {factor}: leaves the last of {bands} bands ({option_name(kind)}-cutoff) "
                f"no column of {option_name(width)} {getattr(args, width)}"
            )


def _check_shared(args: Any) -> None:
    embed = getattr(args, "decoder_embed_dim", None)
    shared = ""
    for name in ("cross_self_attention", "merge_src_tgt_embed", "share_all_embeddings"):
        if getattr(args, name, False):
            shared = "" if name == "cross_self_attention" else option_name(name)
            if args.encoder_embed_dim != embed:
                raise OptionError(
                    f"{option_name(name)}: needs --encoder-embed-dim {embed}, not {args.encoder_embed_dim}"
                )
    if getattr(args, "share_decoder_input_output_embed", False):
        shared = shared or "--share-decoder-input-output-embed"
    if not shared or getattr(args, "adaptive_softmax_cutoff", None):
        return
    for name in ("adaptive_input", "character_embeddings"):
        if hasattr(args, "decoder_input_dim") and getattr(args, name, False):
            raise OptionError(f"{shared}: must be left out with {option_name(name)}, which has no matrix to share")
    width = "decoder_input_dim" if hasattr(args, "decoder_input_dim") else "decoder_embed_dim"
    output = _number(args, "decoder_output_dim")
    if output is not None and output != getattr(args, width):
        raise OptionError(f"{shared}: needs --decoder-output-dim {getattr(args, width)}, not {output}")


def _check_quantisation(args: Any) -> None:
    """Noise of product quantisation drops whole blocks of the input features of a layer."""
    if getattr(args, "quant_noise_pq", 0):
        if getattr(args, "tie_adaptive_weights", False) and _adaptive(args, "adaptive_softmax_cutoff"):
            raise OptionError(f"--quant-noise-pq {args.quant_noise_pq}: cannot act on --tie-adaptive-weights")
        block = getattr(args, "quant_noise_pq_block_size", 8)
        for flag, width in _widths(args):
            if width % block != 0:
                raise OptionError(
                    f"--quant-noise-pq-block-size {block}: must divide {flag}, with --quant-noise-pq "
                    f"{args.quant_noise_pq}"
                )
    learned = hasattr(args, "max_positions") or any(getattr(args, f"{s}_learned_pos", False) for s in _SIDES)
    if (
        getattr(args, "quant_noise_scalar", 0)
        and learned
        and not getattr(args, "no_token_positional_embeddings", False)
    ):
        raise OptionError(
            f"--quant-noise-scalar {args.quant_noise_scalar}: fairseq has no learned positions with noise; must be 0, "
            "or positions not learned"
        )


def _widths(args: Any) -> Iterator[Tuple[str, int]]:
    """The numbers of input features of all layers, and what they are called."""
    names = [f"{side}_{size}" for side in _SIDES for size in ("embed_dim", "ffn_embed_dim")]
    for name in names:
        value = _number(args, name)
        if value is not None:
            yield f"{option_name(name)} {value}", value
    for kind, width in _ADAPTIVE.items():
        value = _number(args, width)
        if value is not None and _adaptive(args, f"{kind}_cutoff"):
            for band in range(len(_cutoffs(args, f"{kind}_cutoff")) + 1):
                columns = int(value // getattr(args, f"{kind}_factor", 4) ** band)
                yield f"{columns}, the columns of band {band + 1} of {option_name(kind)}-cutoff", columns


def _check_masking(args: Any) -> None:
    """What fairseq's masked_lm asserts, or takes a whole batch for."""
    probabilities = {name: getattr(args, name) for name in ("mask_prob", "leave_unmasked_prob", "random_token_prob")}
    for name, value in probabilities.items():
        if not 0 <= value <= 1:
            raise OptionError(f"{option_name(name)} {value}: must be between 0 and 1")
    if args.mask_prob in (0, 1):
        raise OptionError(f"--mask-prob {args.mask_prob}: must be more than 0 and less than 1")
    if args.leave_unmasked_prob + args.random_token_prob > 1:
        raise OptionError(
            f"--random-token-prob {args.random_token_prob}: must be at most 1 with --leave-unmasked-prob "
            f"{args.leave_unmasked_prob} added"
        )


def _check_criterion(args: Any, config: Any) -> None:
    """An adaptive softmax has a loss of its own; two regularisations of RoBERTa are in one criterion alone."""
    name = getattr(args, "criterion", None)
    criterion = CRITERION_REGISTRY.get(name) if isinstance(name, str) else None
    if criterion is None:
        return
    for option in ("mha_reg_scale_factor", "ffn_reg_scale_factor"):
        if getattr(args, option, 0) and not issubclass(criterion, SentencePredictionCriterion):
            raise OptionError(
                f"{option_name(option)} {getattr(args, option)}: has no effect with --criterion {name}; must be 0, or "
                "--criterion sentence_prediction"
            )
    if not hasattr(config, "adaptive_softmax_cutoff"):
        return
    cutoff = getattr(args, "adaptive_softmax_cutoff", None)
    if issubclass(criterion, AdaptiveLoss) and not cutoff:
        raise OptionError(f"--criterion {name}: needs --adaptive-softmax-cutoff")
    if cutoff and issubclass(criterion, (CrossEntropyCriterion, LabelSmoothedCrossEntropyCriterion)):
        raise OptionError(
            f"--criterion {name}: has no gradient through --adaptive-softmax-cutoff {cutoff}; must be adaptive_loss or "
            "orthogonal_adaptive_loss"
        )
