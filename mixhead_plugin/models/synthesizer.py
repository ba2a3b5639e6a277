"""Language model with attention without query-key products: architectures `<family>_synthesizer_lm*`.

fairseq has no such model. This is its decoder-only Transformer with every flag, see `modules/synthesizer.py`.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Dict, List, Optional

import numpy as np
from fairseq.dataclass import FairseqDataclass
from torch import Tensor, nn

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.models.families import family_config, register_families
from mixhead_plugin.models.transformer import TransformerConfig
from mixhead_plugin.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from mixhead_plugin.modules.layers import MixheadDecoder, MixheadDecoderLayer, at_its_rate, flags_of_attention
from mixhead_plugin.modules.synthesizer import SYNTHESIZERS, SynthesizerAttention
from mixhead_plugin.options import AttentionShape, as_namespace

_OWN_SIZES = {kind.own_size.option: name for name, kind in SYNTHESIZERS.items() if kind.own_size}


def _own_size(option: str) -> Any:
    """The field of a size that one synthesizer alone has."""
    size = SYNTHESIZERS[_OWN_SIZES[option]].own_size
    text = f"{size.text}, with --synthesizer {_OWN_SIZES[option]} (default: {size.default_text})"
    return field(default=None, metadata={"help": text})


@dataclass
class SynthesizerOptions(FairseqDataclass):
    """The flags that the Synthesizer has beside the plugin's others."""

    synthesizer: str = field(
        default="dense",
        metadata={
            "help": f"where the scores of the attention come from; one of {', '.join(SYNTHESIZERS)} (default: dense)"
        },
    )
    synthesizer_rank: Optional[int] = _own_size("synthesizer_rank")
    synthesizer_factor: Optional[int] = _own_size("synthesizer_factor")

    @property
    def own_size(self) -> Optional[int]:
        """The size that the chosen synthesizer alone has, if it is set."""
        size = SYNTHESIZERS[self.synthesizer].own_size
        return None if size is None else getattr(self, size.option)


@dataclass
class SynthesizerConfig(SynthesizerOptions, TransformerConfig):
    """The nested config of the decoder; build it with `from_namespace` only."""


@dataclass
class SynthesizerLanguageModelConfig(SynthesizerOptions, TransformerLanguageModelConfig):
    """The flat config of the language model."""


class SynthesizerDecoderLayer(MixheadDecoderLayer):
    def build_self_attention(
        self, embed_dim: int, cfg: Any, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> nn.Module:
        if add_bias_kv or add_zero_attn:
            raise ValueError("a synthesizer has no scores for constant keys")
        attention = SynthesizerAttention(
            embed_dim,
            cfg.decoder.attention_heads,
            cfg.max_target_positions,
            cfg.synthesizer,
            cfg.own_size,
            dropout=cfg.attention_dropout,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            causal=True,
            **flags_of_attention(cfg),
        )
        return at_its_rate(attention, cfg)


class SynthesizerDecoder(MixheadDecoder):
    layer_type = SynthesizerDecoderLayer

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Optional[Dict[str, List[Tensor]]],
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]] = None,
        full_context_alignment: bool = False,
        alignment_layer: Optional[int] = None,
        alignment_heads: Optional[int] = None,
    ):
        """As in fairseq, tokens [B, N].

        Raises:
            ValueError: a sentence begins with padding. Nothing of fairseq pads a language model's input on the left;
                the scores would be those of other positions than the sentence has alone.
        """
        padding = prev_output_tokens.eq(self.padding_idx)
        # Padding elsewhere may be: beam search with a prefix drags dead hypotheses along, filled with any token.
        if bool((padding[:, 0] & ~padding.all(1)).any()):
            raise ValueError("prev_output_tokens: a synthesizer needs padding on the right, here it is on the left")
        return self.extract_features_scriptable(
            prev_output_tokens, encoder_out, incremental_state, full_context_alignment, alignment_layer, alignment_heads
        )


class SynthesizerLanguageModel(TransformerLanguageModel):
    """fairseq's decoder-only Transformer with synthetic scores, for inputs up to a maximal length.

    That length is --max-target-positions, else --tokens-per-sample and the token of --add-bos-token.
    """

    @classmethod
    def options_of(cls, args: Any) -> SynthesizerLanguageModelConfig:
        return SynthesizerLanguageModelConfig.from_namespace(args)

    @classmethod
    def attention_shapes(cls, args: Any) -> Dict[str, AttentionShape]:
        # --heads-per-layer is how pruned models are written down, and these heads can be masked but not cut
        return {site: shape._replace(layers=None) for site, shape in super().attention_shapes(args).items()}

    @classmethod
    def check_args(cls, args: Any) -> None:
        if getattr(args, "synthesizer", None) is None:
            args.synthesizer = "dense"
        super().check_args(args)
        _check_length(args)
        _check_synthesizer(args)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "SynthesizerLanguageModel":
        args = as_namespace(args)
        if _number(args, "max_target_positions") is None and _number(args, "tokens_per_sample") is not None:
            args.max_target_positions = _longest_block(args)
        model = super().build_model(args, task)
        _refuse_longer_inputs(task, args.max_target_positions)
        return model

    @classmethod
    def build_decoder(cls, args: Any, dictionary: Any, embed_tokens: nn.Module) -> SynthesizerDecoder:
        cfg = SynthesizerConfig.from_namespace(args)
        return SynthesizerDecoder(cfg, dictionary, embed_tokens, no_encoder_attn=True)


def _refuse_longer_inputs(task: Any, max_length: int) -> None:
    """Let fairseq-eval-lm refuse inputs that are too long.

    It would leave them out of the perplexity, with a warning. Only fairseq-eval-lm calls this method of the task.
    """
    original = getattr(task, "eval_lm_dataloader", None)
    if original is None:
        return

    def eval_lm_dataloader(dataset: Any, *args: Any, **kwargs: Any) -> Any:
        longest = int(np.max(dataset.sizes)) + bool(getattr(task.args, "add_bos_token", False))
        if longest > max_length:
            raise OptionError(
                f"--tokens-per-sample {task.args.tokens_per_sample}: the data have an input of {longest} tokens, the "
                f"--synthesizer has scores for {max_length}; use at most as many, and no --sample-break-mode eos if "
                "sentences are longer"
            )
        return original(dataset, *args, **kwargs)

    task.eval_lm_dataloader = eval_lm_dataloader


def _number(args: Any, name: str) -> Optional[int]:
    """None also where a config without a task has the name of the task's option instead"""
    value = getattr(args, name, None)
    return None if isinstance(value, str) else value


def _longest_block(args: Any) -> int:
    """The longest input that the task cuts from a text."""
    return args.tokens_per_sample + bool(_number(args, "add_bos_token"))


def _check_synthesizer(args: Any) -> None:
    kind = SYNTHESIZERS.get(args.synthesizer)
    if kind is None:
        raise OptionError(f"--synthesizer {args.synthesizer}: must be one of {', '.join(SYNTHESIZERS)}")
    for option, name in _OWN_SIZES.items():
        value = getattr(args, option, None)
        if value is None:
            continue
        if name != args.synthesizer:
            raise OptionError(
                f"{option_name(option)} {value}: has no effect with --synthesizer {args.synthesizer}; "
                f"leave it out, or use --synthesizer {name}"
            )
        if not (isinstance(value, int) and value >= 1):
            raise OptionError(f"{option_name(option)} {value}: must be a whole number of at least 1")
        longest = _number(args, "max_target_positions") or _longest_block(args)
        if option == "synthesizer_factor" and value > longest:
            raise OptionError(f"{option_name(option)} {value}: must be at most the maximal length, {longest}")
    if args.relative_position != "none":
        raise OptionError(
            f"--relative-position {args.relative_position}: must be none, a synthesizer scores absolute positions"
        )
    if args.attention_impl == "triton" and kind.trained_bias:
        others = ", ".join(name for name, other in SYNTHESIZERS.items() if not other.trained_bias)
        raise OptionError(
            f"--attention-impl triton: gives the scores of --synthesizer {args.synthesizer} no gradient; use auto, or "
            f"one of {others}"
        )


def _check_length(args: Any) -> None:
    longest = _number(args, "max_target_positions")
    if longest is None:
        if not _number(args, "tokens_per_sample"):
            raise OptionError("--max-target-positions is missing: a synthesizer has scores for so many positions alone")
        return
    if longest < 1:
        raise OptionError(f"--max-target-positions {longest}: must be at least 1")
    # sentences, --sample-break-mode eos, are as long as they are: fairseq leaves out those that are too long
    cuts = getattr(args, "sample_break_mode", "eos") != "eos"
    if cuts and longest < _longest_block(args):
        raise OptionError(
            f"--max-target-positions {longest}: a synthesizer has scores for so many positions alone; must be at least "
            f"{_longest_block(args)}, for --tokens-per-sample {args.tokens_per_sample}"
        )


def _sizes_of_the_config(args: Any) -> None:
    """`<family>_synthesizer_lm` has the sizes of `transformer_lm`, the defaults of its dataclass."""


MODELS = register_families(
    SynthesizerLanguageModel,
    "synthesizer_lm",
    partial(family_config, SynthesizerLanguageModelConfig),
    {"synthesizer_lm": _sizes_of_the_config},
)
