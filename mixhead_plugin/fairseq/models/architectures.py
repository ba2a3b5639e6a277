"""The table of architectures, fairseq's and those of the papers.

Each is registered as `<family>_<name>`, in every family that its model has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_INV_REGISTRY
from fairseq.models import transformer_lm as lm
from fairseq.models.transformer.transformer_legacy import transformer_iwslt_de_en

from mixhead_plugin.fairseq.config import set_missing
from mixhead_plugin.fairseq.fairseq_examples import TruncatedBPTTLMTask
from mixhead_plugin.fairseq.models.families import FamilyModel, Preset, register_families
from mixhead_plugin.fairseq.models.gated_attention import model as gated_attention
from mixhead_plugin.fairseq.models.gated_attention.model import (
    GatedLanguageModel,
    GatedRobertaModel,
)
from mixhead_plugin.fairseq.models.roberta import MixheadRobertaModel
from mixhead_plugin.fairseq.models.synthesizer.model import SynthesizerLanguageModel
from mixhead_plugin.fairseq.models.transformer import MixheadTransformerModel
from mixhead_plugin.fairseq.models.transformer_lm import MixheadLanguageModel
from mixhead_plugin.fairseq.models.transformer_xl.model import MixheadTransformerXLModel


@dataclass(frozen=True)
class Architecture:
    """The flags that a name presets; the user's flags override them."""

    model: type[FamilyModel]
    defaults: dict[str, Any]
    source: str
    # Sets the values that are not in `defaults`, as fairseq does for its own architecture. What it
    # leaves out comes from the dataclass.
    upstream: Callable[[Any], None] = lambda args: None

    def __call__(self, args: Any) -> None:
        """Set the missing values of `args` (Namespace or DictConfig, changed in place)."""
        set_missing(args, self.defaults)
        self.upstream(args)


def _translation(heads: int) -> Architecture:
    both_sides = {"encoder_attention_heads": heads, "decoder_attention_heads": heads}
    return Architecture(
        MixheadTransformerModel, both_sides, f"mixhead table 4, h {heads}", transformer_iwslt_de_en
    )


def _decoder(*, layers: int, heads: int, embed_dim: int, inner: int) -> dict[str, Any]:
    return {
        "decoder_layers": layers,
        "decoder_attention_heads": heads,
        "decoder_embed_dim": embed_dim,
        "decoder_ffn_embed_dim": inner,
    }


def _dropouts(*, residual: float, attention: float, activation: float) -> dict[str, Any]:
    return {"dropout": residual, "attention_dropout": attention, "activation_dropout": activation}


def _xl(
    *, layers: int, d_model: int, heads: int, head_dim: int, inner: int, mem_len: int
) -> dict[str, Any]:
    return {
        "n_layer": layers,
        "d_model": d_model,
        "n_head": heads,
        "d_head": head_dim,
        "d_inner": inner,
        "mem_len": mem_len,
    }


MODELS: dict[str, type[FamilyModel]] = {
    "transformer": MixheadTransformerModel,
    "transformer_lm": MixheadLanguageModel,
    "roberta": MixheadRobertaModel,
    "transformer_xl": MixheadTransformerXLModel,
    "synthesizer_lm": SynthesizerLanguageModel,
    "gau_lm": GatedLanguageModel,
    "gau_roberta": GatedRobertaModel,
}


def _of_fairseq() -> dict[str, Architecture]:
    """Return the architectures of fairseq for all models that it has."""
    architectures = {}
    for fairseq_name, model in MODELS.items():
        for name in ARCH_MODEL_INV_REGISTRY.get(fairseq_name, ()):
            architectures[name] = Architecture(model, {}, "fairseq", ARCH_CONFIG_REGISTRY[name])
    return architectures


ARCHITECTURES = {
    **_of_fairseq(),
    "synthesizer_lm": Architecture(SynthesizerLanguageModel, {}, "fairseq's transformer_lm"),
    "gau_lm": Architecture(GatedLanguageModel, {}, "Hua et al. 2022", gated_attention.gau_lm),
    "gau_roberta": Architecture(
        GatedRobertaModel, {}, "l2 essay, 'full-GAU architecture'", gated_attention.gau_roberta
    ),
    # `base_lm_architecture` normalises before each block, as 16 layers need; `transformer_lm`
    # normalises after it. The paper asks for strong regularisation but gives no numbers: we chose
    # the three dropouts.
    "transformer_lm_wiki2": Architecture(
        MixheadLanguageModel,
        {
            **_decoder(layers=16, heads=8, embed_dim=512, inner=2048),
            **_dropouts(residual=0.5, attention=0.2, activation=0.2),
            "share_decoder_input_output_embed": True,
        },
        "mixhead table 2, vanilla Transformer",
        lm.base_lm_architecture,
    ),
    # The sizes of fairseq's `transformer_lm_wiki103`. The 512 in the name is --tokens-per-sample.
    "transformer_lm_wiki103_512": Architecture(
        MixheadLanguageModel,
        _decoder(layers=16, heads=8, embed_dim=1024, inner=4096),
        "mixhead tables 1 and 7 to 10, Transformer-Baevski",
        lm.transformer_lm_baevski_wiki103,
    ),
    # The bands are those of Baevski & Auli for this vocabulary, the dropouts those of fairseq's
    # `transformer_lm_gbw`. With tied projections, the number of parameters is the paper's.
    "transformer_lm_gbw_512": Architecture(
        MixheadLanguageModel,
        {
            **_decoder(layers=16, heads=8, embed_dim=1024, inner=4096),
            "adaptive_input": True,
            "adaptive_input_cutoff": "60000,160000",
            "adaptive_softmax_cutoff": "60000,160000",
            "tie_adaptive_weights": True,
            "tie_adaptive_proj": True,
        },
        "mixhead table 3, Transformer-Baevski",
        lm.transformer_lm_baevski_gbw,
    ),
    # --tokens-per-sample sets the maximal length, 512 in the paper.
    "synthesizer_lm_wiki103": Architecture(
        SynthesizerLanguageModel,
        _decoder(layers=16, heads=8, embed_dim=1024, inner=4096),
        "mixhead table 1, Synthesizer",
        lm.transformer_lm_baevski_wiki103,
    ),
    # The sizes are those of the published code: the numbers of parameters agree. The cutoffs are
    # fairseq's.
    "transformer_xl_wiki103": Architecture(
        MixheadTransformerXLModel,
        {
            **_xl(layers=16, d_model=410, heads=10, head_dim=41, inner=2100, mem_len=150),
            "dropout": 0.1,
        },
        "mixhead table 1, Transformer-XL",
    ),
    # The inner size follows from the paper's 40M parameters. The paper gives no dropouts: we chose
    # them.
    "transformer_xl_wiki2": Architecture(
        MixheadTransformerXLModel,
        {
            **_xl(layers=16, d_model=410, heads=10, head_dim=41, inner=1000, mem_len=150),
            "dropout": 0.5,
            "dropatt": 0.2,
        },
        "mixhead table 2, Transformer-XL",
    ),
    "transformer_xl_lm1b": Architecture(
        MixheadTransformerXLModel,
        {
            **_xl(layers=18, d_model=1024, heads=8, head_dim=128, inner=4096, mem_len=32),
            "div_val": 4,
        },
        "mixhead table 3, Transformer-XL",
    ),
    # The head size is the same in every family and for every number of heads; the paper varies this
    # from 4 to 70.
    "transformer_lm_lm1b": Architecture(
        MixheadLanguageModel,
        {
            **_decoder(layers=6, heads=8, embed_dim=256, inner=1024),
            **_dropouts(residual=0.1, attention=0.1, activation=0.1),
            "share_decoder_input_output_embed": True,
            "head_dim": 32,
        },
        "low-rank bottleneck paper, figures 1, 3 and 4",
        lm.base_lm_architecture,
    ),
    **{f"transformer_iwslt_de_en_h{heads}": _translation(heads) for heads in (4, 32, 64)},
}

if TruncatedBPTTLMTask is None:  # a fairseq without its examples
    del MODELS["transformer_xl"]
    for _name in list(ARCHITECTURES):
        if _name.startswith("transformer_xl"):
            del ARCHITECTURES[_name]


def _register_all() -> None:
    """Register every model with its architectures."""
    for model_name, model in MODELS.items():
        own: dict[str, Preset] = {}
        for name, entry in ARCHITECTURES.items():
            if entry.model is model:
                own[name] = entry
        register_families(model, model_name, own)


_register_all()
