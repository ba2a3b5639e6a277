"""Language model and masked language model of gated attention units.

Architectures `gau_lm` and `gau_roberta`, also in the families l2 and sigsoftmax.
"""

import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Optional

from fairseq import utils
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.modules import AdaptiveInput
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from torch import nn

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.fairseq.checks import check_whole_number
from mixhead_plugin.fairseq.config import flat_copy, set_missing
from mixhead_plugin.fairseq.layers import MixheadDecoder, MixheadEncoder
from mixhead_plugin.fairseq.models.families import FamilyModel
from mixhead_plugin.fairseq.models.gated_attention.checkpoint import check_units
from mixhead_plugin.fairseq.models.gated_attention.unit import (
    GatedAttentionUnit,
    GatedDecoderLayer,
    GatedEncoderLayer,
)
from mixhead_plugin.fairseq.models.roberta import MixheadRobertaEncoder, MixheadRobertaModel
from mixhead_plugin.fairseq.models.transformer import MixheadTransformerConfig
from mixhead_plugin.fairseq.models.transformer_lm import (
    MixheadLanguageModel,
    MixheadLanguageModelConfig,
)
from mixhead_plugin.fairseq.options import flag_field
from mixhead_plugin.fairseq.sites import SiteSizes


@dataclass
class GatedOptions(FairseqDataclass):
    """The flags of gated attention units."""

    gau_expansion: int = flag_field(
        "gau_expansion",
        2,
        "size of a unit's gate and of its values, as a multiple of the model's size",
    )
    gau_query_dim: int = flag_field("gau_query_dim", 128, "size of a unit's queries and keys")


@dataclass
class GatedConfig(GatedOptions, MixheadTransformerConfig):
    """The nested config of encoder and decoder; build it with `from_namespace` only."""


# Why flags of other models and attentions must be left out.
ONE_HEAD = "a gated attention unit has one head, of --gau-query-dim"
NO_FEED_FORWARD = "a gated attention unit is its own feed-forward block, see --gau-expansion"
ROTARY = "gated attention units have rotary positions"
SWISH = "gated attention units use swish"

_ACTIVATIONS: Any = ChoiceEnum(utils.get_available_activation_fns())


@dataclass
class GatedLanguageModelConfig(GatedOptions, MixheadLanguageModelConfig):
    """The flat config of the language model."""

    decoder_input_dim: Optional[int] = flag_field(
        "decoder_input_dim", None, "decoder input dimension", no_value="the embedding"
    )
    decoder_output_dim: Optional[int] = flag_field(
        "decoder_output_dim", None, "decoder output dimension", no_value="the embedding"
    )
    # None, because fairseq's defaults could not be told from what a user has asked for
    decoder_attention_heads: Optional[int] = field(
        default=None, metadata={"help": "must be left out, see --gau-query-dim"}
    )
    decoder_ffn_embed_dim: Optional[int] = field(
        default=None, metadata={"help": "must be left out, see --gau-expansion"}
    )
    activation_fn: Optional[_ACTIVATIONS] = field(
        default=None, metadata={"help": f"must be left out, {SWISH}"}
    )


class ForeignFlag(NamedTuple):
    """A flag of other models and attentions that means nothing to a unit."""

    neutral: tuple[Any, ...]  # values beside None that ask for nothing, and are not refused
    reason: str  # why the flag must be left out


# By names without dashes; {side} is encoder or decoder.
NOT_FOR_UNITS = {
    "head_mixing": ForeignFlag(("none",), ONE_HEAD),
    "score_mixing": ForeignFlag(("none",), ONE_HEAD),
    "feature_mixing": ForeignFlag(("none",), ONE_HEAD),
    # The general checks would ask for a mixing beside them.
    "mixed_features": ForeignFlag(("qkv",), ONE_HEAD),
    "mixing_start": ForeignFlag(("identity",), ONE_HEAD),
    "mixing_rank": ForeignFlag((2,), ONE_HEAD),
    "mixing_lr_scale": ForeignFlag((1,), ONE_HEAD),
    "head_dim": ForeignFlag((), ONE_HEAD),
    "value_head_dim": ForeignFlag((), "values have the size that --gau-expansion asks for"),
    "heads_per_layer": ForeignFlag((), ONE_HEAD),
    "{side}_attention_heads": ForeignFlag((), ONE_HEAD),
    "scale_heads": ForeignFlag((False,), ONE_HEAD),
    "mha_heads_to_keep": ForeignFlag((-1,), ONE_HEAD),
    "mha_reg_scale_factor": ForeignFlag((0,), ONE_HEAD),
    "attention_gate": ForeignFlag(("none",), "a gated attention unit has its own gate"),
    "{side}_ffn_embed_dim": ForeignFlag((), NO_FEED_FORWARD),
    "activation_dropout": ForeignFlag((0,), NO_FEED_FORWARD),
    "relu_dropout": ForeignFlag((0,), NO_FEED_FORWARD),
    "scale_fc": ForeignFlag((False,), NO_FEED_FORWARD),
    "ffn_blocks_to_remove": ForeignFlag((-1,), NO_FEED_FORWARD),
    "ffn_reg_scale_factor": ForeignFlag((0,), NO_FEED_FORWARD),
    "base_layers": ForeignFlag((0,), NO_FEED_FORWARD),
    "relative_position": ForeignFlag(("none", "rotary"), ROTARY),
    "decoder_learned_pos": ForeignFlag((False,), ROTARY),
    "scale_attn": ForeignFlag((False,), "a gated attention unit has one norm, at its beginning"),
    "scale_resids": ForeignFlag((False,), "a gated attention unit adds its output as it is"),
}


class GatedModel(FamilyModel):
    """What both models share: their families, and the check of their flags and checkpoints."""

    # The other families are about several heads, and a unit has one.
    families = ("", "sigsoftmax", "l2")
    side: ClassVar[str]  # "encoder" or "decoder"
    not_for_units: ClassVar[dict[str, ForeignFlag]] = NOT_FOR_UNITS

    @classmethod
    def attention_sites(cls, args: Any) -> dict[str, SiteSizes]:
        embed_dim = getattr(args, f"{cls.side}_embed_dim")
        return {f"{cls.side}-self": cls.site_sizes(cls.side, embed_dim, num_heads=1)}

    @classmethod
    def check_args(cls, args: Any) -> None:
        for name, row in cls.not_for_units.items():
            option = name.format(side=cls.side)
            value = getattr(args, option, None)
            if value is not None and value not in row.neutral:
                _refuse(option, value, f"must be left out, {row.reason}")
        # The model's size here already, because the other checks would first refuse the size of
        # values, which follows from it.
        embed_dim = f"{cls.side}_embed_dim"
        for option in ("gau_expansion", "gau_query_dim", embed_dim):
            check_whole_number(option, getattr(args, option), least=1)
        if args.gau_query_dim % 2 != 0:
            _refuse("gau_query_dim", args.gau_query_dim, "must be even, for rotary positions")

        # To the other checks, a unit is an attention with one head. Quantisation noise does not see
        # the size of this head, because the maps of a unit read the model's size or a multiple.
        of_one_head = copy.copy(args)
        of_one_head.head_dim = args.gau_query_dim
        of_one_head.value_head_dim = args.gau_expansion * getattr(args, embed_dim)
        of_one_head.relative_position = "rotary"
        of_one_head.quant_noise_pq = 0
        super().check_args(of_one_head)

    def check_checkpoint(self, state_dict: dict[str, Any]) -> None:
        check_units(self, state_dict)


def _refuse(option: str, value: Any, problem: str) -> None:
    shown = "" if value is True else f" {value}"  # a switch has no value
    raise OptionError(f"{option_name(option)}{shown}: {problem}")


# Both have twice as many layers as fairseq's model, because two units stand where an attention and
# a feed-forward block stood. The family l2 presets a smaller value_init_scale for attentions; the
# essay leaves the start of units as it is.


def gau_lm(args: Any) -> None:
    """Set the missing flags of the language model; its other defaults are those of its config."""
    set_missing(args, {"decoder_embed_dim": 512, "decoder_layers": 12})
    _set_flags_of_units(args, "decoder")


def gau_roberta(args: Any) -> None:
    """Set the missing flags of the masked language model; its other defaults are fairseq's."""
    set_missing(
        args,
        {
            "encoder_embed_dim": 768,
            "encoder_layers": 24,
            "layernorm_embedding": False,  # as in fairseq's roberta_prenorm
            # or fairseq would set its own
            "encoder_attention_heads": None,
            "encoder_ffn_embed_dim": None,
        },
    )
    _set_flags_of_units(args, "encoder")


def _set_flags_of_units(args: Any, side: str) -> None:
    """Set the flags that units need in both models.

    Two of them are overwritten, because units leave no choice there. Another value is not refused:
    a config that a program makes has fairseq's False for both, whether it was asked for or not.

    Args:
        args: the flags of a model, changed in place
        side: "encoder" or "decoder"
    """
    set_missing(
        args,
        {
            "value_init_scale": 1.0,
            "gau_expansion": GatedOptions.gau_expansion,
            "gau_query_dim": GatedOptions.gau_query_dim,
        },
    )
    # Each unit has its norm at its beginning, so nothing else normalises the output of the last.
    setattr(args, f"{side}_normalize_before", True)
    # Units have rotary positions, and no others beside them.
    args.no_token_positional_embeddings = True


class GatedDecoder(MixheadDecoder):
    layer_type = GatedDecoderLayer


class GatedLanguageModel(GatedModel, MixheadLanguageModel):
    """fairseq's decoder-only Transformer with gated attention units as its layers."""

    config = GatedLanguageModelConfig
    decoder_config = GatedConfig
    decoder_type = GatedDecoder
    side = "decoder"
    # fairseq's RoBERTa always sets it, so there it tells nothing of what a user has asked for.
    not_for_units: ClassVar[dict[str, ForeignFlag]] = {
        **NOT_FOR_UNITS,
        "activation_fn": ForeignFlag((), SWISH),
    }

    @classmethod
    def check_args(cls, args: Any) -> None:
        # --tie-adaptive-weights needs both to be equal, and None is the size of the model.
        complete = copy.copy(args)
        _set_input_and_output(complete)
        super().check_args(complete)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "GatedLanguageModel":
        args = flat_copy(args)
        gau_lm(args)
        _set_input_and_output(args)
        return super().build_model(args, task)

    @classmethod
    def build_input(cls, args: Any, dictionary: Any) -> nn.Module:
        embedding = super().build_input(args, dictionary)
        if isinstance(embedding, AdaptiveInput):
            _draw_first_words(embedding, dictionary.pad())
        return embedding


def _set_input_and_output(args: Any) -> None:
    """Set the sizes of input and output, where they are None, to the model's; changes `args`."""
    for name in ("decoder_input_dim", "decoder_output_dim"):
        if getattr(args, name, None) is None:
            setattr(args, name, args.decoder_embed_dim)


def _draw_first_words(embedding: AdaptiveInput, padding_idx: int) -> None:
    """Draw the word of each later band of adaptive inputs that fairseq starts at 0.

    Its number in the band is that of padding in the dictionary, so fairseq takes it for padding. A
    unit without bias maps 0 to 0, and the derivative of a norm at 0 is 1 / sqrt(eps): behind eight
    units, the gradient of a batch with such a word had a norm of 1e11.
    """
    for band in list(embedding.embeddings)[1:]:
        words = band[0]
        nn.init.normal_(words.weight.data[padding_idx], std=words.embedding_dim**-0.5)


class GatedEncoder(MixheadEncoder):
    layer_type = GatedEncoderLayer


class GatedRobertaEncoder(MixheadRobertaEncoder):
    def build_encoder(self, args: Any, dictionary: Any, embed_tokens: Any) -> GatedEncoder:
        encoder = GatedEncoder(GatedConfig.from_namespace(args), dictionary, embed_tokens)
        encoder.apply(init_bert_params)
        return encoder


class GatedRobertaModel(GatedModel, MixheadRobertaModel):
    """fairseq's RoBERTa with gated attention units as its layers."""

    encoder_type = GatedRobertaEncoder
    side = "encoder"

    def __init__(self, args: Any, encoder: GatedRobertaEncoder):
        super().__init__(args, encoder)
        for module in self.modules():
            if isinstance(module, GatedAttentionUnit):
                module.reset_parameters()  # again, because init_bert_params has set them anew

    @staticmethod
    def add_args(parser: Any) -> None:
        MixheadRobertaModel.add_args(parser)
        gen_parser_from_dataclass(parser, GatedOptions(), delete_default=True)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "GatedRobertaModel":
        args = flat_copy(args)
        gau_roberta(args)
        return super().build_model(args, task)
