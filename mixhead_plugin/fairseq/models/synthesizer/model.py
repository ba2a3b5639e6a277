"""Language model without query-key products, which fairseq lacks: `<family>_synthesizer_lm*`."""

from dataclasses import dataclass
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from torch import nn

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.fairseq.checks import check_whole_number, part_errors_as_option_errors
from mixhead_plugin.fairseq.config import flat_copy
from mixhead_plugin.fairseq.layers import MixheadDecoder, MixheadDecoderLayer
from mixhead_plugin.fairseq.models.synthesizer.attention import (
    SYNTHESIZERS,
    SynthesizerAttention,
    refuse_in_synthesizer,
    row_of,
)
from mixhead_plugin.fairseq.models.transformer import MixheadTransformerConfig
from mixhead_plugin.fairseq.models.transformer_lm import (
    MixheadLanguageModel,
    MixheadLanguageModelConfig,
)
from mixhead_plugin.fairseq.options import flag_field
from mixhead_plugin.fairseq.sites import SiteSizes
from mixhead_plugin.fairseq.task_marks import set_longest_input


@dataclass
class SynthesizerOptions(FairseqDataclass):
    """The flags of the Synthesizer."""

    synthesizer: str = flag_field(
        "synthesizer",
        "dense",
        "where the scores of the attention come from",
        choices=SYNTHESIZERS,
    )
    synthesizer_rank: Optional[int] = flag_field(
        "synthesizer_rank",
        None,
        "rank of each head's scores, with --synthesizer factorized-random",
        no_value="8",
    )
    synthesizer_factor: Optional[int] = flag_field(
        "synthesizer_factor",
        None,
        "the factor a, where a * b is the maximal length, with --synthesizer factorized-dense",
        no_value="the root of the maximal length",
    )


@dataclass
class SynthesizerConfig(SynthesizerOptions, MixheadTransformerConfig):
    """The nested config of the decoder; build it with `from_namespace` only."""


@dataclass
class SynthesizerLanguageModelConfig(SynthesizerOptions, MixheadLanguageModelConfig):
    """The flat config of the language model."""


class SynthesizerDecoderLayer(MixheadDecoderLayer):
    # No decoder of fairseq sets its add_bias_kv and add_zero_attn, the constant keys.
    def build_self_attention(self, embed_dim: int, cfg: Any, **constant_keys: bool) -> nn.Module:
        rank_or_factor = None
        size_option = SYNTHESIZERS[cfg.synthesizer].size_option
        if size_option is not None:
            rank_or_factor = getattr(cfg, size_option)
        return SynthesizerAttention(
            embed_dim,
            cfg.decoder.attention_heads,
            cfg.max_target_positions,
            cfg.synthesizer,
            rank_or_factor,
            dropout=cfg.attention_dropout,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            causal=True,
            **cfg.attention_arguments("decoder-self"),
        )


class SynthesizerDecoder(MixheadDecoder):
    layer_type = SynthesizerDecoderLayer


class SynthesizerLanguageModel(MixheadLanguageModel):
    """fairseq's decoder-only Transformer with synthetic scores, for inputs up to a maximal length.

    That length is --max-target-positions. By default it is --tokens-per-sample, plus 1 with
    --add-bos-token.
    """

    config = SynthesizerLanguageModelConfig
    decoder_config = SynthesizerConfig
    decoder_type = SynthesizerDecoder

    @classmethod
    def attention_sites(cls, args: Any) -> dict[str, SiteSizes]:
        sites = super().attention_sites(args)
        for site, sizes in sites.items():
            # These heads cannot be pruned, so --heads-per-layer has no meaning here.
            sites[site] = sizes._replace(layers=None)
        return sites

    @classmethod
    def check_args(cls, args: Any) -> None:
        super().check_args(args)
        options = cls.config.from_namespace(args)
        longest = getattr(args, "max_target_positions", None)
        if longest is None and getattr(args, "tokens_per_sample", None) is None:
            raise OptionError(
                "--max-target-positions is missing: a synthesizer has scores only up to this "
                "position"
            )
        if longest is None:
            longest = _longest_block(args)
        else:
            _check_longest(args, longest)
        _check_synthesizer(options, longest)
        _check_kernels(options)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "SynthesizerLanguageModel":
        args = flat_copy(args)
        has_longest = getattr(args, "max_target_positions", None) is not None
        if not has_longest and getattr(args, "tokens_per_sample", None) is not None:
            args.max_target_positions = _longest_block(args)
        model = super().build_model(args, task)
        set_longest_input(task, args.max_target_positions)
        return model


def _check_longest(args: Any, longest: int) -> None:
    """Refuse a maximal length below 1, or below that of the blocks that the task cuts."""
    check_whole_number("max_target_positions", longest, least=1)
    # With --sample-break-mode eos, fairseq leaves out sentences that are too long. All other modes
    # cut the text into blocks of --tokens-per-sample.
    if getattr(args, "sample_break_mode", "eos") == "eos":
        return
    needed = _longest_block(args)
    if longest < needed:
        raise OptionError(
            f"--max-target-positions {longest}: must be at least {needed}, for --tokens-per-sample "
            f"{args.tokens_per_sample}; a synthesizer has scores only up to this position"
        )


def _longest_block(args: Any) -> int:
    """Return the length of the longest input that the task cuts from a text."""
    if getattr(args, "add_bos_token", False):  # one more token, at the beginning
        return args.tokens_per_sample + 1
    return args.tokens_per_sample


def _check_synthesizer(options: SynthesizerLanguageModelConfig, longest: int) -> None:
    """Refuse what the class of the attention refuses, and the rank or factor of another one.

    Args:
        options: the flags
        longest: the length of the longest input
    """
    with part_errors_as_option_errors({"synthesizer": "--synthesizer"}):
        row = row_of(options.synthesizer)
    for name, other in SYNTHESIZERS.items():
        if name == options.synthesizer or other.size_option is None:
            continue
        size = getattr(options, other.size_option)
        if size is not None:
            raise OptionError(
                f"{option_name(other.size_option)} {size}: must be left out, or used with "
                f"--synthesizer {name}"
            )

    flags = {"max_length": "--max-target-positions"}
    rank_or_factor = None
    if row.size_option is not None:
        flags["rank_or_factor"] = option_name(row.size_option)
        rank_or_factor = getattr(options, row.size_option)
    with part_errors_as_option_errors(flags):
        refuse_in_synthesizer(options.synthesizer, rank_or_factor, longest, options)


def _check_kernels(options: SynthesizerLanguageModelConfig) -> None:
    """Refuse the kernels where scores are trained that they would give no gradient."""
    if options.attention_impl == "triton" and SYNTHESIZERS[options.synthesizer].trained_bias:
        others = ", ".join(name for name, row in SYNTHESIZERS.items() if not row.trained_bias)
        raise OptionError(
            "--attention-impl triton: gives the scores no gradient; must be auto, blockwise or "
            f"reference, or --synthesizer one of {others}"
        )
