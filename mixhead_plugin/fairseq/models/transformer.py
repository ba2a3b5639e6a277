"""Encoder-decoder Transformer: architectures `<family>_transformer*`."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fairseq.criterions.label_smoothed_cross_entropy_with_alignment import (
    LabelSmoothedCrossEntropyCriterionWithAlignment,
)
from fairseq.models import transformer as upstream

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.checks import part_errors_as_option_errors
from mixhead_plugin.fairseq.layers import MixheadDecoder, MixheadEncoder
from mixhead_plugin.fairseq.models.families import FamilyModel
from mixhead_plugin.fairseq.options import SCOPES, AttentionOptions
from mixhead_plugin.fairseq.relative import refuse_relative
from mixhead_plugin.fairseq.sites import SiteSizes
from mixhead_plugin.ops import NORMALIZERS

logger = logging.getLogger(__name__)


@dataclass
class MixheadTransformerConfig(AttentionOptions, upstream.TransformerConfig):
    """fairseq's nested config plus the flags of the plugin; build it with `from_namespace` only."""


class MixheadTransformerModel(FamilyModel, upstream.TransformerModel):
    """fairseq's Transformer with the plugin's attention: encoder, decoder and between them."""

    config = MixheadTransformerConfig

    @classmethod
    def attention_sites(cls, args: Any) -> dict[str, SiteSizes]:
        cfg = MixheadTransformerConfig.from_namespace(args)
        encoder = cls.site_sizes(
            "encoder", cfg.encoder.embed_dim, cfg.encoder.attention_heads, cfg.encoder.layers
        )
        decoder = cls.site_sizes(
            "decoder", cfg.decoder.embed_dim, cfg.decoder.attention_heads, cfg.decoder.layers
        )
        sites = {"encoder-self": encoder, "decoder-self": decoder}
        if not cfg.no_cross_attention:
            sites["cross"] = decoder
        return sites

    @classmethod
    def check_args(cls, args: Any) -> None:
        super().check_args(args)
        # --cross-self-attention lets the decoder attend to source and target at once.
        reads_both = getattr(args, "cross_self_attention", False)
        if reads_both and "decoder-self" in SCOPES[args.attention_scope]:
            with part_errors_as_option_errors():
                refuse_relative(
                    args, " with --cross-self-attention: the distance to the source is not defined"
                )

    def check_training(self, cfg: Any, criterion: Any) -> None:
        """Refuse a criterion that needs other weights, before a training; see `fairseq/hooks.py`.

        A model that is loaded to be used is not checked, because older checkpoints may have what is
        refused here.
        """
        super().check_training(cfg, criterion)
        problem = self.weights_problem()
        if problem and isinstance(criterion, LabelSmoothedCrossEntropyCriterionWithAlignment):
            raise OptionError(
                f"--criterion {cfg.criterion._name}: takes the logarithm of the weights of "
                f"encoder-decoder attention, but {problem}; must be another criterion, or used "
                "with --attention-scope self"
            )

    def warn_of_alignment(self, shown: str) -> None:
        """Warn that --print-alignment shows no probabilities; see `fairseq/hooks.py`."""
        problem = self.weights_problem()
        if problem:
            logger.warning(f"--print-alignment {shown}: {problem}; they are no probabilities")

    def weights_problem(self) -> str:
        """Return why the weights of encoder-decoder attention are no positive distribution.

        It is an empty string if they are one. All attentions between encoder and decoder have the
        same flags.
        """
        for attention in self._cross_attentions():
            variant = attention.variant
            if variant.head_mixing not in ("none", "average"):
                return (
                    f"--head-mixing {variant.head_mixing} mixes them, so they may be below 0 or "
                    "above 1"
                )
            if not NORMALIZERS[variant.normalizer].is_distribution:
                return (
                    f"--attention-normalizer {variant.normalizer} gives weights that may be 0, "
                    "or not sum to 1"
                )
            if variant.attention_sink != "none":
                return f"--attention-sink {variant.attention_sink} takes a part of them away"
        return ""

    def _cross_attentions(self) -> Iterator[MixheadAttention]:
        """Yield the plugin's attentions between encoder and decoder."""
        for module in self.decoder.modules():
            if isinstance(module, MixheadAttention) and module.encoder_decoder_attention:
                yield module

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "MixheadTransformerModel":
        args = cls.prepared(args)
        return super().build_model(MixheadTransformerConfig.from_namespace(args), task)

    @classmethod
    def build_encoder(
        cls, cfg: MixheadTransformerConfig, src_dict: Any, embed_tokens: Any
    ) -> MixheadEncoder:
        return MixheadEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(
        cls, cfg: MixheadTransformerConfig, tgt_dict: Any, embed_tokens: Any
    ) -> MixheadDecoder:
        return MixheadDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)

    def set_beam_size(self, beam: int) -> None:
        """Keep keys and values of the source once for each sentence, not once for each hypothesis.

        fairseq's beam search calls this with the number of hypotheses of a sentence.
        """
        for attention in self._cross_attentions():
            attention.set_beam_size(beam)
