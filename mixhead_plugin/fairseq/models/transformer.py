"""Encoder-decoder Transformer: architectures `<family>_transformer*`."""

import logging
from dataclasses import dataclass
from typing import Any

from fairseq.criterions.label_smoothed_cross_entropy_with_alignment import (
    LabelSmoothedCrossEntropyCriterionWithAlignment,
)
from fairseq.models import transformer as upstream

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.checks import refuse_relative
from mixhead_plugin.fairseq.layers import MixheadDecoder, MixheadEncoder
from mixhead_plugin.fairseq.models.families import FamilyModel
from mixhead_plugin.fairseq.options import AttentionOptions, AttentionSite

logger = logging.getLogger(__name__)

# The values of --attention-normalizer whose weights are positive and sum to 1.
DISTRIBUTIONS = ("softmax", "sigsoftmax")


@dataclass
class TransformerConfig(AttentionOptions, upstream.TransformerConfig):
    """fairseq's nested Transformer config plus the flags of the plugin; build it with
    `from_namespace` only.
    """


class TransformerModel(FamilyModel, upstream.TransformerModel):
    """fairseq's Transformer with the plugin's attention in the encoder, the decoder and between
    them.
    """

    config = TransformerConfig

    @classmethod
    def attention_sites(cls, args: Any) -> dict[str, AttentionSite]:
        cfg = TransformerConfig.from_namespace(args)
        encoder = cls.shape(
            "encoder", cfg.encoder.embed_dim, cfg.encoder.attention_heads, cfg.encoder.layers
        )
        decoder = cls.shape(
            "decoder", cfg.decoder.embed_dim, cfg.decoder.attention_heads, cfg.decoder.layers
        )
        shapes = {"encoder-self": encoder, "decoder-self": decoder}
        return shapes if cfg.no_cross_attention else {**shapes, "cross": decoder}

    @classmethod
    def check_args(cls, args: Any) -> None:
        super().check_args(args)
        if getattr(args, "cross_self_attention", False) and args.attention_scope not in (
            "encoder",
            "cross",
        ):
            refuse_relative(
                args, "with --cross-self-attention: the distance to the source is not defined"
            )

    def check_training(self, cfg: Any, criterion: Any) -> None:
        """Refuse a criterion that needs other weights, before a training; see `fairseq/hooks.py`.

        A model that is loaded to be used is not checked: older checkpoints may have what is refused
        here.
        """
        problem = self.weights_problem()
        if problem and isinstance(criterion, LabelSmoothedCrossEntropyCriterionWithAlignment):
            raise OptionError(
                f"--criterion {cfg.criterion._name}: takes the logarithm of the weights of "
                "encoder-decoder attention, "
                f"but {problem}; must be another criterion, or used with --attention-scope self"
            )

    def warn_of_alignment(self, shown: str) -> None:
        """Warn that --print-alignment shows no probabilities; see `fairseq/hooks.py`."""
        if problem := self.weights_problem():
            logger.warning(f"--print-alignment {shown}: {problem}; they are no probabilities")

    def weights_problem(self) -> str:
        """Return why the weights of encoder-decoder attention are no positive distribution, or an
        empty string.
        """
        for module in self.decoder.modules():
            if isinstance(module, MixheadAttention) and module.encoder_decoder_attention:
                if module.variant.head_mixing not in ("none", "average"):
                    return (
                        f"--head-mixing {module.variant.head_mixing} mixes them, so they may be "
                        "below 0 or above 1"
                    )
                if module.normalizer not in DISTRIBUTIONS:
                    return (
                        f"--attention-normalizer {module.normalizer} gives weights that may be 0, "
                        "or not sum to 1"
                    )
                if module.attention_sink is not None:
                    return (
                        f"--attention-sink {module.variant.attention_sink} takes a part of them "
                        "away"
                    )
        return ""

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "TransformerModel":
        args = cls.prepared(args)
        return super().build_model(TransformerConfig.from_namespace(args), task)

    @classmethod
    def build_encoder(
        cls, cfg: TransformerConfig, src_dict: Any, embed_tokens: Any
    ) -> MixheadEncoder:
        return MixheadEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(
        cls, cfg: TransformerConfig, tgt_dict: Any, embed_tokens: Any
    ) -> MixheadDecoder:
        return MixheadDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)

    def set_beam_size(self, beam: int) -> None:
        """Keep the encoder's output once for each sentence, not once for each beam; beam search
        calls this.
        """
        for module in self.decoder.modules():
            if isinstance(module, MixheadAttention) and module.encoder_decoder_attention:
                module.set_beam_size(beam)
