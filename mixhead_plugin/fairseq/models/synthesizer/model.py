"""Language model without query-key products, which fairseq lacks: `<family>_synthesizer_lm*`."""

import shlex
from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from torch import nn

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.fairseq.config import as_namespace
from mixhead_plugin.fairseq.layers import MixheadDecoder, MixheadDecoderLayer
from mixhead_plugin.fairseq.models.synthesizer.attention import SYNTHESIZERS, SynthesizerAttention
from mixhead_plugin.fairseq.models.transformer import MixheadTransformerConfig
from mixhead_plugin.fairseq.models.transformer_lm import (
    MixheadLanguageModel,
    MixheadLanguageModelConfig,
)
from mixhead_plugin.fairseq.sites import SiteSizes


def _flag(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class SynthesizerOptions(FairseqDataclass):
    """The flags of the Synthesizer."""

    synthesizer: str = _flag(
        "dense",
        f"where the scores of the attention come from; one of {', '.join(SYNTHESIZERS)} (default: "
        "dense)",
    )
    synthesizer_rank: Optional[int] = _flag(
        None, "rank of each head's scores, with --synthesizer factorized-random (default: 8)"
    )
    synthesizer_factor: Optional[int] = _flag(
        None,
        "the factor a, where a * b is the maximal length, with --synthesizer factorized-dense "
        "(default: the root of the maximal length)",
    )


@dataclass
class SynthesizerConfig(SynthesizerOptions, MixheadTransformerConfig):
    """The nested config of the decoder; build it with `from_namespace` only."""


@dataclass
class SynthesizerLanguageModelConfig(SynthesizerOptions, MixheadLanguageModelConfig):
    """The flat config of the language model."""


class SynthesizerDecoderLayer(MixheadDecoderLayer):
    def build_self_attention(self, embed_dim: int, cfg: Any, **constant_keys: bool) -> nn.Module:
        return SynthesizerAttention(
            embed_dim,
            cfg.decoder.attention_heads,
            cfg.max_target_positions,
            cfg.synthesizer,
            getattr(cfg, SYNTHESIZERS[cfg.synthesizer].size_option, None),
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
        if longest is None and not getattr(args, "tokens_per_sample", None):
            raise OptionError(
                "--max-target-positions is missing: a synthesizer has scores only up to this "
                "position"
            )
        # With --sample-break-mode eos, fairseq leaves out sentences that are too long. All other
        # modes cut the text into blocks of --tokens-per-sample.
        in_blocks = getattr(args, "sample_break_mode", "eos") != "eos"
        if longest is not None and in_blocks and longest < _longest_block(args):
            raise OptionError(
                f"--max-target-positions {longest}: must be at least {_longest_block(args)}, for "
                f"--tokens-per-sample {args.tokens_per_sample}; a synthesizer has scores only up "
                "to this position"
            )
        _check_synthesizer(options, longest or _longest_block(args))

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "SynthesizerLanguageModel":
        args = as_namespace(args)
        has_longest = getattr(args, "max_target_positions", None) is not None
        if not has_longest and getattr(args, "tokens_per_sample", None) is not None:
            args.max_target_positions = _longest_block(args)
        model = super().build_model(args, task)
        task.longest_input = args.max_target_positions  # see repairs/longer_inputs.py
        return model


def _longest_block(args: Any) -> int:
    """Return the length of the longest input that the task cuts from a text."""
    if getattr(args, "add_bos_token", False):  # one more token, at the beginning
        return args.tokens_per_sample + 1
    return args.tokens_per_sample


def _check_synthesizer(options: SynthesizerLanguageModelConfig, longest: int) -> None:
    """Refuse flags that a Synthesizer cannot have; `longest` is the length of its inputs."""
    row = SYNTHESIZERS.get(options.synthesizer)
    if row is None:
        raise OptionError(
            f"--synthesizer {shlex.quote(str(options.synthesizer))}: must be one of "
            f"{', '.join(SYNTHESIZERS)}"
        )
    for name, other in SYNTHESIZERS.items():
        value = getattr(options, other.size_option, None)
        flag = f"{option_name(other.size_option)} {value}"
        if value is not None and other is not row:
            raise OptionError(f"{flag}: must be left out, or used with --synthesizer {name}")
        if value is not None and value < 1:
            raise OptionError(f"{flag}: must be at least 1")
    if options.synthesizer_factor is not None and options.synthesizer_factor > longest:
        raise OptionError(
            f"--synthesizer-factor {options.synthesizer_factor}: must be at most the length, "
            f"{longest}"
        )
    if options.relative_position != "none":
        raise OptionError(
            f"--relative-position {options.relative_position}: must be none, the scores are "
            "absolute"
        )
    if options.feature_mixing in ("heads", "shared") and options.mixed_features != "v":
        flag = f"--mixed-features {options.mixed_features}"
        raise OptionError(
            f"{flag}: must be v, a Synthesizer has values alone that --feature-mixing can mix"
        )
    if options.score_mixing != "none" and not row.multiplies:
        others = ", ".join(name for name, other in SYNTHESIZERS.items() if other.multiplies)
        flag = f"--score-mixing {options.score_mixing}"
        raise OptionError(
            f"{flag}: must be none, or --synthesizer one of {others}, whose products it can mix"
        )
    if options.attention_impl == "triton" and row.trained_bias:
        others = ", ".join(name for name, other in SYNTHESIZERS.items() if not other.trained_bias)
        flag = "--attention-impl triton"
        raise OptionError(
            f"{flag}: gives the scores no gradient; must be auto, or --synthesizer one of {others}"
        )
