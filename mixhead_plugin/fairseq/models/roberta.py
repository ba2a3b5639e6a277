"""RoBERTa, masked language model and sentence classifier.

Architectures `<family>_roberta*` and `<family>_xlm`.
"""

from typing import Any, ClassVar

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models.roberta import model as upstream
from fairseq.modules.transformer_sentence_encoder import init_bert_params

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.layers import MixheadEncoder
from mixhead_plugin.fairseq.models.families import FamilyModel
from mixhead_plugin.fairseq.models.transformer import MixheadTransformerConfig
from mixhead_plugin.fairseq.options import AttentionOptions
from mixhead_plugin.fairseq.sites import SiteSizes


class MixheadRobertaEncoder(upstream.RobertaEncoder):
    def build_encoder(self, args: Any, dictionary: Any, embed_tokens: Any) -> MixheadEncoder:
        encoder = MixheadEncoder(
            MixheadTransformerConfig.from_namespace(args), dictionary, embed_tokens
        )
        encoder.apply(init_bert_params)
        return encoder


class MixheadRobertaModel(FamilyModel, upstream.RobertaModel):
    """fairseq's RoBERTa with the plugin's attention."""

    config = AttentionOptions
    encoder_type: ClassVar[type[MixheadRobertaEncoder]] = MixheadRobertaEncoder

    def __init__(self, args: Any, encoder: MixheadRobertaEncoder):
        super().__init__(args, encoder)
        for module in self.modules():
            if isinstance(module, MixheadAttention):
                module.scale_values()  # again, because init_bert_params has set the weights anew

    @staticmethod
    def add_args(parser: Any) -> None:
        upstream.RobertaModel.add_args(parser)
        # fairseq's model reads it, but has no flag for it
        parser.add_argument(
            "--no-token-positional-embeddings",
            action="store_true",
            help="learn no positions; give --relative-position then",
        )
        gen_parser_from_dataclass(parser, AttentionOptions(), delete_default=True)

    @classmethod
    def attention_sites(cls, args: Any) -> dict[str, SiteSizes]:
        sizes = cls.site_sizes(
            "encoder", args.encoder_embed_dim, args.encoder_attention_heads, args.encoder_layers
        )
        return {"encoder-self": sizes}

    @classmethod
    def check_args(cls, args: Any) -> None:
        super().check_args(args)
        kept = getattr(args, "mha_heads_to_keep", -1)
        if kept != -1:
            # fairseq cuts rows of its own projections, and knows neither other parameters nor
            # mixed heads.
            raise OptionError(
                f"--mha-heads-to-keep {kept}: must be left out; "
                "`python -m mixhead_plugin.analysis prune` removes heads"
            )
        factor = getattr(args, "mha_reg_scale_factor", 0)
        if factor != 0:
            # fairseq's penalty prepares for its way to prune. It counts rows of its own
            # projections, and with --value-head-dim leaves out or exceeds some of values.
            raise OptionError(
                f"--mha-reg-scale-factor {factor}: must be left out, it prepares for "
                "--mha-heads-to-keep, which the plugin does not have (for a trained model: "
                "--model-overrides \"{'mha_reg_scale_factor': 0}\")"
            )

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "MixheadRobertaModel":
        args = cls.prepared(args)
        if getattr(args, "tokens_per_sample", None) is None:
            args.tokens_per_sample = task.max_positions()
        if getattr(args, "max_positions", None) is None:
            args.max_positions = args.tokens_per_sample
        return cls(args, cls.encoder_type(args, task.source_dictionary))
