"""A head that finds the first and the last token of an answer."""

import logging
from typing import Any, Optional

from torch import Tensor, nn

from mixhead_plugin.errors import OptionError

logger = logging.getLogger(__name__)


class SpanHead(nn.Module):
    """Map the features of each token to the logits of being first and last.

    See Devlin et al. 2019, section 4.2.

    It replaces the head of the masked language model. So it acts inside the model's `forward`, as
    data parallel training needs it, and no parameter goes unused.

    Args:
        embed_dim: the size of the features
        required: refuse a checkpoint without this head; else the head keeps its random values, for
            training
    """

    def __init__(self, embed_dim: int, required: bool):
        super().__init__()
        self.required = required
        self.out_proj = nn.Linear(embed_dim, 2)
        nn.init.normal_(self.out_proj.weight, std=0.02)  # as BERT's other weights
        nn.init.zeros_(self.out_proj.bias)

    def forward(
        self, features: Tensor, masked_tokens: Optional[Tensor] = None, **unused: Any
    ) -> Tensor:
        """Return [B, N, 2] for features [B, N, C].

        fairseq passes `masked_tokens` to every head of a language model.
        """
        return self.out_proj(features)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Drop the head of a language model from a checkpoint.

        This head stays as it is if the checkpoint has none.
        """
        own = {f"{name}.{key}": value for key, value in self.state_dict().items()}
        for key in list(state_dict):
            if key.startswith(f"{name}.") and key not in own:
                del state_dict[key]
        if not own.keys() <= state_dict.keys():
            if self.required:
                raise OptionError(
                    "--path: the model has no head for answers; train it with --task squad first"
                )
            logger.warning(
                "the checkpoint has no head for answers; the model's is random, and must be trained"
            )
            state_dict.update(own)


def install_span_head(model: nn.Module, required: bool = False) -> None:
    """Let a RoBERTa or BERT return [B, N, 2]; for `required` see `SpanHead`.

    Raises:
        OptionError: the model is another
    """
    encoder = getattr(model, "encoder", None)
    if getattr(encoder, "lm_head", None) is None:
        raise OptionError(
            f"--task squad: needs an architecture of BERT or RoBERTa, not a {type(model).__name__}"
        )
    encoder.lm_head = SpanHead(model.args.encoder_embed_dim, required)
