"""BERT (Devlin et al., 2018): the architectures `<family>_bert*`.

BERT is fairseq's RoBERTa with token types, a pooler over [CLS] and another epsilon in its layer
norms. fairseq's dictionary calls [CLS] <s>, [SEP] </s>, [PAD] <pad>, [UNK] <unk> and [MASK] <mask>.
"""

import logging
from functools import partial
from typing import Any, ClassVar, NamedTuple, Optional

import torch
from fairseq.models.roberta.model import base_architecture as roberta_architecture
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from torch import Tensor, nn

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.models.families import register_families
from mixhead_plugin.fairseq.models.roberta import MixheadRobertaEncoder, MixheadRobertaModel

logger = logging.getLogger(__name__)

TOKEN_TYPES = 2
# The name of the head of pre-training. Class 0 means that B goes on where A ends, as in published
# checkpoints.
NEXT_SENTENCE = "next_sentence"


def infer_segments(tokens: Tensor, separator: int, pad: int) -> Tensor:
    """Return the token types of `[CLS] a [SEP] b [SEP]`.

    They are 0 up to the first separator and for padding, and 1 after it.

    Args:
        tokens: [B, N], int64
        separator: the index of [SEP]
        pad: the index of [PAD]

    Returns:
        [B, N], int64
    """
    separators = tokens.eq(separator).long()
    # [B, N], the number of separators before each token
    earlier = separators.cumsum(1) - separators
    return (earlier.gt(0) & tokens.ne(pad)).long()


class Pooler(nn.Module):
    """Transform the state of [CLS] for the classification heads."""

    def __init__(self, embed_dim: int):
        super().__init__()
        self.dense = nn.Linear(embed_dim, embed_dim)
        self.apply(init_bert_params)

    def forward(self, features: Tensor) -> Tensor:
        """Return [B, C] for features [B, N, C]."""
        return torch.tanh(self.dense(features[:, 0]))


class ClassificationHead(nn.Module):
    """Classify a sentence by a linear layer over the pooler."""

    def __init__(self, embed_dim: int, num_classes: int, dropout: float):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.out_proj = nn.Linear(embed_dim, num_classes)
        self.apply(init_bert_params)

    def forward(self, pooled: Tensor) -> Tensor:
        """Return [B, classes] for pooled states [B, C]."""
        return self.out_proj(self.dropout(pooled))


class BertEncoder(MixheadRobertaEncoder):
    """Add token types to RoBERTa's encoder, and set the epsilon of its layer norms."""

    def __init__(self, args: Any, dictionary: Any):
        super().__init__(args, dictionary)
        self.segment_embeddings = nn.Embedding(TOKEN_TYPES, args.encoder_embed_dim)
        for module in self.modules():
            # torch's or apex's; fairseq's layers have no option
            if type(module).__name__.endswith("LayerNorm"):
                module.eps = args.layer_norm_eps

    def forward(
        self,
        src_tokens: Tensor,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        masked_tokens: Optional[Tensor] = None,
        segments: Optional[Tensor] = None,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Encode tokens as fairseq's RoBERTa does.

        Args:
            src_tokens: [B, N], int64
            features_only: return the states of the last layer instead of the logits of the language
                model
            return_all_hiddens: also return the states of all layers as `inner_states`, each [N, B,
                C]
            masked_tokens: bool [B, N]; logits are computed for these positions alone
            segments: the token types, int64 [B, N]; `infer_segments` finds them by default

        Returns:
            features [B, N, C] or logits [B, N, V] or, with `masked_tokens`, [masked, V]; and a
            dictionary
        """
        if segments is None:
            segments = infer_segments(src_tokens, self.dictionary.eos(), self.dictionary.pad())
        # fairseq's encoder adds the positions to these embeddings, and normalises the sum.
        # [B, N, C]
        embeddings = self.sentence_encoder.embed_tokens(src_tokens) + self.segment_embeddings(
            segments
        )
        features, extra = self.extract_features(
            src_tokens, return_all_hiddens, token_embeddings=embeddings
        )
        if features_only:
            return features, extra
        return self.output_layer(features, masked_tokens=masked_tokens), extra


class BertModel(MixheadRobertaModel):
    """BERT with the attention of mixhead_plugin.

    The pooler comes with the first of `classification_heads`. Without a head it would have no
    gradient, and data parallel training refuses parameters without a gradient.
    """

    encoder_type: ClassVar[type] = BertEncoder

    def __init__(self, args: Any, encoder: BertEncoder):
        super().__init__(args, encoder)
        self.pooler: Optional[Pooler] = None

    @staticmethod
    def add_args(parser: Any) -> None:
        MixheadRobertaModel.add_args(parser)
        parser.add_argument(
            "--layer-norm-eps",
            type=float,
            metavar="E",
            help="epsilon of layer norms (default: 1e-12)",
        )

    @classmethod
    def check_args(cls, args: Any) -> None:
        super().check_args(args)
        if not 0 < args.layer_norm_eps < 1:
            raise OptionError(
                f"--layer-norm-eps {args.layer_norm_eps}: must be a small number greater than 0"
            )
        if args.pooler_activation_fn != "tanh":
            raise OptionError(
                f"--pooler-activation-fn {args.pooler_activation_fn}: must be tanh, as in BERT's "
                "pooler"
            )

    def forward(
        self,
        src_tokens: Tensor,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        classification_head_name: Optional[str] = None,
        beside: Optional[str] = None,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Run the encoder and the heads.

        Args:
            src_tokens, features_only, return_all_hiddens, kwargs: arguments of
                `BertEncoder.forward`
            classification_head_name: a key of `classification_heads`; its output replaces the
                logits
            beside: another key; its output is `extra["beside"]`, so that one pass serves both
                objectives of pre-training
        """
        name = classification_head_name
        if name is None and beside is None:
            return self.encoder(src_tokens, features_only, return_all_hiddens, **kwargs)
        masked_tokens = kwargs.pop("masked_tokens", None)
        features, extra = self.encoder(src_tokens, True, return_all_hiddens, **kwargs)
        if beside is not None:
            extra["beside"] = self._classify(beside, features)
        if name is not None:
            return self._classify(name, features), extra
        if features_only:
            return features, extra
        return self.encoder.output_layer(features, masked_tokens=masked_tokens), extra

    def _classify(self, name: str, features: Tensor) -> Tensor:
        return self.classification_heads[name](self.pooler(features))

    def register_classification_head(
        self,
        name: str,
        num_classes: int,
        inner_dim: Optional[int] = None,
        dropout: Optional[float] = None,
    ) -> None:
        """Add a head for whole sentences over the pooler that all heads share.

        Args:
            name: its key in `classification_heads`
            num_classes: the size of its output
            inner_dim: fairseq's argument; BERT's heads have the size of the pooler
            dropout: applied to the output of the pooler; --pooler-dropout by default
        """
        embed_dim = self.args.encoder_embed_dim
        if inner_dim not in (None, embed_dim):
            raise ValueError(f"inner_dim {inner_dim}: BERT's pooler has {embed_dim}")
        if name in self.classification_heads:
            logger.warning(f"head {name}: replaces the head of that name")
        if self.pooler is None:
            self.pooler = Pooler(embed_dim)
        dropout = self.args.pooler_dropout if dropout is None else dropout
        self.classification_heads[name] = ClassificationHead(embed_dim, num_classes, dropout)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        # RoBERTa's heads have a pooler each, so fairseq must not see those of the checkpoint.
        prefix = f"{name}." if name else ""
        heads = _pop(state_dict, f"{prefix}classification_heads.")
        # adds the model's own heads to `state_dict`
        super().upgrade_state_dict_named(state_dict, name)
        for head in dict.fromkeys(key.partition(".")[0] for key in heads):
            self._take_head(head, heads, state_dict, f"{prefix}classification_heads.")
        pooler = _pop(state_dict, f"{prefix}pooler.")
        if self.pooler is None:
            return
        if not pooler:
            logger.warning("the checkpoint has no pooler; the model's keeps its initial values")
            pooler = self.pooler.state_dict()
        state_dict.update({f"{prefix}pooler.{key}": value for key, value in pooler.items()})

    def _take_head(
        self, head: str, heads: dict[str, Tensor], state_dict: dict[str, Tensor], prefix: str
    ) -> None:
        """Put one of the checkpoint's `heads` into `state_dict` if the shapes are equal."""
        entries = {key: value for key, value in heads.items() if key.startswith(f"{head}.")}
        shapes = {key: value.shape for key, value in entries.items()}
        embed_dim = self.args.encoder_embed_dim
        classes = len(entries.get(f"{head}.out_proj.bias", ()))
        fits = shapes == {
            f"{head}.out_proj.weight": (classes, embed_dim),
            f"{head}.out_proj.bias": (classes,),
        }
        if (
            fits
            and head not in self.classification_heads
            and getattr(self.args, "load_checkpoint_heads", False)
        ):
            self.register_classification_head(head, classes)
        if head not in self.classification_heads:
            logger.warning(
                f"the checkpoint's head {head} is left out: this model has no head of that name"
            )
        elif fits and classes == self.classification_heads[head].out_proj.out_features:
            state_dict.update({f"{prefix}{key}": value for key, value in entries.items()})
        else:
            logger.warning(
                f"the checkpoint's head {head} is left out: this model's has another shape"
            )


def _pop(state_dict: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Take the entries of a module out of `state_dict`; their names lose the prefix."""
    names = [name for name in state_dict if name.startswith(prefix)]
    return {name.removeprefix(prefix): state_dict.pop(name) for name in names}


class BertArchitecture(NamedTuple):
    """The sizes of a BERT; the user's flags override them."""

    encoder_layers: int
    encoder_embed_dim: int
    encoder_ffn_embed_dim: int
    encoder_attention_heads: int
    head_dim: Optional[int]  # None: the default of the family
    source: str


# By table of the low-rank bottleneck paper: the sizes of embedding and inner layer, and of each
# model the number of heads and their size. Table 2 does not give the inner size. Its parameter
# counts imply that of BERT large, for an embedding of 512 too.
FIXED_HEAD_SIZES = {
    "1": (1024, 4096, [(8, 128), (16, 64), (32, 32)]),
    "2A": (512, 4096, [(8, 128), (12, 128), (16, 128), (32, 128)]),
    "2B": (512, 4096, [(8, 32), (8, 64), (8, 256)]),
    "3A": (768, 3072, [(8, 128), (12, 128), (16, 128), (20, 128)]),
}


def _architectures() -> dict[str, BertArchitecture]:
    base = BertArchitecture(12, 768, 3072, 12, None, "Devlin et al., base")
    large = BertArchitecture(24, 1024, 4096, 16, None, "Devlin et al., large")
    architectures = {"bert": base, "bert_base": base, "bert_large": large}
    for table, (embed_dim, ffn_dim, rows) in FIXED_HEAD_SIZES.items():
        source = f"low-rank bottleneck paper, table {table}"
        for heads, head_dim in rows:
            sizes = BertArchitecture(24, embed_dim, ffn_dim, heads, head_dim, source)
            architectures[f"bert_d{embed_dim}_h{heads}_k{head_dim}"] = sizes
    return architectures


BERT_ARCHITECTURES = _architectures()


def base_architecture(args: Any, sizes: BertArchitecture = BERT_ARCHITECTURES["bert"]) -> None:
    """Set every value that `args` (Namespace or DictConfig, changed in place) lacks."""
    values = sizes._asdict()
    del values["source"]
    values |= {"max_positions": 512, "layer_norm_eps": 1e-12, "pooler_dropout": 0.1}
    for name, value in values.items():
        if value is not None and getattr(args, name, None) is None:
            setattr(args, name, value)
    roberta_architecture(args)


register_families(
    BertModel,
    "bert",
    {name: partial(base_architecture, sizes=sizes) for name, sizes in BERT_ARCHITECTURES.items()},
)
