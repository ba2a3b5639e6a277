"""Architectures of the papers that fairseq has no name for: `<family>_<name>` for every name of the table below."""

from argparse import Namespace
from dataclasses import field, fields, make_dataclass
from functools import partial
from typing import Any, Callable, Dict, NamedTuple

from fairseq.dataclass.utils import interpret_dc_type
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.models.transformer.transformer_legacy import transformer_iwslt_de_en
from fairseq.models.transformer_lm import (
    base_lm_architecture,
    transformer_lm_baevski_gbw,
    transformer_lm_baevski_wiki103,
)

# The models must be registered before their architectures.
from mixhead_plugin.models import synthesizer, transformer, transformer_lm, transformer_xl  # noqa: F401
from mixhead_plugin.models.families import register_architecture
from mixhead_plugin.options import FAMILIES


class RecipeArchitecture(NamedTuple):
    """What a name stands for; every value of `defaults` gives way to the user's flag."""

    model: str  # fairseq's model
    stock: Callable[[Any], None]  # fairseq's architecture: the values that `defaults` do not have
    defaults: Dict[str, Any]
    source: str


def _heads(number: int) -> RecipeArchitecture:
    sides = {f"{side}_attention_heads": number for side in ("encoder", "decoder")}
    return RecipeArchitecture("transformer", transformer_iwslt_de_en, sides, f"mixhead table 4, h {number}")


_BAEVSKI = {
    "decoder_layers": 16,
    "decoder_attention_heads": 8,
    "decoder_embed_dim": 1024,
    "decoder_ffn_embed_dim": 4096,
}

# Of the published code, as the counts of parameters show. fairseq's `transformer_xl` has the cutoffs of all three.
_TRANSFORMER_XL = {
    "n_layer": 16,
    "d_model": 410,
    "n_head": 10,
    "d_head": 41,
    "d_inner": 2100,
    "dropout": 0.1,
    "mem_len": 150,
}


def _nothing_more(args: Any) -> None:
    """What fairseq's `transformer_xl` adds to its dataclass"""


RECIPE_ARCHITECTURES = {
    # fairseq's `transformer_lm` normalises after each block; `base_lm_architecture` before it, as 16 layers need.
    # The paper asks for 'stronger regularization techniques like dropout' without figures: the three rates are ours.
    "transformer_lm_wiki2": RecipeArchitecture(
        "transformer_lm",
        base_lm_architecture,
        {
            "decoder_layers": 16,
            "decoder_attention_heads": 8,
            "decoder_embed_dim": 512,
            "decoder_ffn_embed_dim": 2048,
            "share_decoder_input_output_embed": True,
            "dropout": 0.5,
            "attention_dropout": 0.2,
            "activation_dropout": 0.2,
        },
        "mixhead table 2, vanilla Transformer",
    ),
    # 512 is the number of tokens, which --tokens-per-sample sets: this is fairseq's `transformer_lm_wiki103`, under a
    # name that has its sizes in YAML files too.
    "transformer_lm_wiki103_512": RecipeArchitecture(
        "transformer_lm", transformer_lm_baevski_wiki103, _BAEVSKI, "mixhead tables 1 and 7 to 10, Transformer-Baevski"
    ),
    # The same with the bands that Baevski & Auli have for this vocabulary and the dropouts of fairseq's
    # `transformer_lm_gbw`. The paper's count of parameters needs the projections tied.
    "transformer_lm_gbw_512": RecipeArchitecture(
        "transformer_lm",
        transformer_lm_baevski_gbw,
        {
            **_BAEVSKI,
            "adaptive_input": True,
            "adaptive_input_cutoff": "60000,160000",
            "adaptive_softmax_cutoff": "60000,160000",
            "tie_adaptive_weights": True,
            "tie_adaptive_proj": True,
        },
        "mixhead table 3, Transformer-Baevski",
    ),
    # The same sizes again; the maximal length, 512 too, comes from --tokens-per-sample.
    "synthesizer_lm_wiki103": RecipeArchitecture(
        "synthesizer_lm", transformer_lm_baevski_wiki103, _BAEVSKI, "mixhead table 1, Synthesizer"
    ),
    "transformer_xl_wiki103": RecipeArchitecture(
        "transformer_xl", _nothing_more, _TRANSFORMER_XL, "mixhead table 1, Transformer-XL"
    ),
    # The paper prints 40M parameters for it, and no rates: the inner size makes the 40M, the rates are ours as above.
    "transformer_xl_wiki2": RecipeArchitecture(
        "transformer_xl",
        _nothing_more,
        {**_TRANSFORMER_XL, "d_inner": 1000, "dropout": 0.5, "dropatt": 0.2},
        "mixhead table 2, Transformer-XL",
    ),
    "transformer_xl_lm1b": RecipeArchitecture(
        "transformer_xl",
        _nothing_more,
        {
            "n_layer": 18,
            "d_model": 1024,
            "n_head": 8,
            "d_head": 128,
            "d_inner": 4096,
            "div_val": 4,
            "mem_len": 32,
        },
        "mixhead table 3, Transformer-XL",
    ),
    # The head size is fixed in every family, whatever the number of heads: the paper varies it from 4 to 70.
    "transformer_lm_lm1b": RecipeArchitecture(
        "transformer_lm",
        base_lm_architecture,
        {
            "decoder_layers": 6,
            "decoder_attention_heads": 8,
            "decoder_embed_dim": 256,
            "decoder_ffn_embed_dim": 1024,
            "head_dim": 32,
            "share_decoder_input_output_embed": True,
            "dropout": 0.1,
            "attention_dropout": 0.1,
            "activation_dropout": 0.1,
        },
        "low-rank bottleneck paper, figures 1, 3 and 4",
    ),
    **{f"transformer_iwslt_de_en_h{number}": _heads(number) for number in (4, 32, 64)},
}


def _complete(architecture: RecipeArchitecture, args: Any) -> None:
    """Give `args` (Namespace or DictConfig, changed in place) every value that it lacks."""
    for name, default in architecture.defaults.items():
        if not hasattr(args, name):
            setattr(args, name, default)
    architecture.stock(args)


def _config(name: str, architecture: RecipeArchitecture, family: str) -> type:
    """The family's config of the model with the architecture's values as defaults."""
    values = Namespace()
    _complete(architecture, values)
    base = MODEL_DATACLASS_REGISTRY[f"{family}_{architecture.model}"]
    presets = []
    for f in fields(base):
        # what the model takes from the task, as --add-bos-token, is not the stock architecture's to say
        if f.name in architecture.defaults or (hasattr(values, f.name) and not str(f.default).startswith("${")):
            value = getattr(values, f.name)
            if interpret_dc_type(f.type) is int and isinstance(value, bool):
                value = int(value)  # fairseq's base_shuffle
            presets.append((f.name, f.type, field(default=value, metadata=f.metadata)))
    title = "".join(part.capitalize() for part in f"{family}_{name}_config".split("_"))
    config = make_dataclass(title, presets, bases=(base,), namespace={"__module__": __name__})
    globals()[title] = config  # where pickle looks for it
    return config


for _name, _entry in RECIPE_ARCHITECTURES.items():
    _by_dataclass = all(f"{family}_{_entry.model}" in MODEL_DATACLASS_REGISTRY for family in FAMILIES)
    register_architecture(
        _name, _entry.model, partial(_complete, _entry), partial(_config, _name, _entry) if _by_dataclass else None
    )
