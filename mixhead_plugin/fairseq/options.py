"""The plugin's flags: what each one is, and the families that preset them.

`config.py` takes them out of fairseq's configs, and `checks.py` refuses what cannot work.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from omegaconf import II

from mixhead_plugin.fairseq.heads_per_layer import parse_heads_per_layer
from mixhead_plugin.heads.sites import SITES
from mixhead_plugin.parts import OPTIONS, Variant

# The attentions that each --attention-scope changes, by site.
SCOPES = {
    "all": SITES,
    "self": ("encoder-self", "decoder-self"),
    "cross": ("cross",),
    "encoder": ("encoder-self",),
    "decoder": ("decoder-self", "cross"),
    "decoder-self": ("decoder-self",),
}

TOKENS_PER_SAMPLE = II("task.tokens_per_sample")

# A family presets the flags below in all its architectures, `<family>_<fairseq's architecture>`.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixhead": {"head_mixing": "position-wise"},
    # The head size is the input length (low-rank bottleneck paper, section 4).
    "fixhead": {"head_dim": TOKENS_PER_SAMPLE},
    "sigsoftmax": {"attention_normalizer": "sigsoftmax"},
    # A row of l2 weights sums to at most sqrt(n), therefore the essay shrinks W_V and W_O. We chose
    # the factor.
    "l2": {"attention_normalizer": "l2", "value_init_scale": 0.5},
    "talking_heads": {
        "head_mixing": "position-independent",
        "score_mixing": "position-independent",
    },
    "differential": {"head_mixing": "differential"},
    "gated": {"attention_gate": "head"},
}

# What each flag that is a text may be.
CHOICES: dict[str, tuple[str, ...]] = {"attention_scope": tuple(SCOPES)}
for _option in OPTIONS.values():
    if _option.choices:
        CHOICES[_option.flag] = tuple(_option.choices)

# What a default of None means, for the fields of `Variant`.
_WORDS_FOR_NONE = {"head_dim": "embedding / heads", "value_head_dim": "head-dim"}


def flag_field(
    name: str, default: Any, text: str, *, choices: Collection[str] = (), no_value: str = ""
) -> Any:
    """Return a dataclass field whose help also lists the choices and the defaults.

    For example 'what scales the outputs of heads before out_proj; one of none, head, element
    (default: none; head in family gated)'.

    Args:
        name: of the field, which is that of the flag without dashes
        default: the default of all families that do not preset the flag
        text: what the flag is for
        choices: the values of a flag that is a text
        no_value: what a default of None means
    """
    values = f"; one of {', '.join(choices)}" if choices else ""
    defaults = [no_value if default is None else str(default)]
    for family, preset in FAMILIES.items():
        if name in preset:
            defaults.append(f"{preset[name]} in family {family}")
    shown = "; ".join(defaults).replace(TOKENS_PER_SAMPLE, "--tokens-per-sample")
    return field(default=default, metadata={"help": f"{text}{values} (default: {shown})"})


def _flags_of_variant() -> Any:
    """Return a dataclass with one flag for each field of `Variant`.

    It is made, not written, so that `Variant` stays the only table of them. fairseq reads flags
    from dataclasses: `head_mixing` becomes --head-mixing.
    """
    flags = []
    for each in fields(Variant):
        option = OPTIONS[each.name]
        type_: Any = each.type
        if option.default is None:
            # `int | None`, spelt as typing.Optional[int]: fairseq's parser looks for this text.
            type_ = Optional[type_]
        flag = flag_field(
            option.flag,
            option.default,
            option.help,
            choices=option.choices,
            no_value=_WORDS_FOR_NONE.get(option.flag, ""),
        )
        flags.append((option.flag, type_, flag))
    return make_dataclass("VariantFlags", flags, bases=(FairseqDataclass,))


_VariantFlags: Any = _flags_of_variant()


@dataclass
class AttentionOptions(_VariantFlags):
    """The flags that every architecture of the plugin adds to fairseq's.

    `--head-mixing` and 13 others are fields of `parts.variant.Variant`, so a search for head_mixing
    in this file finds only the families that preset it. `FLAGS` below has the names of all flags:

        python -c "from mixhead_plugin.fairseq.options import FLAGS; print(*FLAGS)"

    The flags below say which attentions the others are for, and how a training begins and goes on.
    """

    attention_scope: str = flag_field(
        "attention_scope",
        "all",
        "which attentions the other flags change; the rest keep fairseq's softmax attention",
        choices=SCOPES,
    )
    value_init_scale: float = flag_field(
        "value_init_scale", 1.0, "factor on the initial weights of v_proj and out_proj"
    )
    mixing_lr_scale: float = flag_field(
        "mixing_lr_scale", 1.0, "factor on the learning rate of head, score, feature mixing"
    )
    heads_per_layer: Optional[str] = flag_field(
        "heads_per_layer",
        None,
        "numbers of heads of each layer after pruning: source:mixed heads, or one number for both, "
        "as in 'encoder-self=8,6;decoder-self=8:6,7:8;cross=4,4'; needs --head-dim",
        no_value="none",
    )

    def covers(self, site: str) -> bool:
        """Return whether --attention-scope includes a site, one of SITES."""
        return site in SCOPES[self.attention_scope]

    def heads_at(self, site: str, layer: int) -> tuple[int, int] | None:
        """Return the numbers of source and mixed heads that --heads-per-layer gives to a layer.

        Args:
            site: one of SITES
            layer: the number of the layer, from 0

        Returns:
            the two numbers, or None if the flag does not name the site
        """
        by_site = parse_heads_per_layer(self.heads_per_layer)
        if site not in by_site:
            return None
        return by_site[site][layer]

    def variant(self, site: str) -> Variant:
        """Return what the flags ask of the attentions at `site`."""
        variant = Variant.of_flags(self)
        if site == "cross":
            # Queries and keys are in different sentences: there is no distance between them.
            return replace(variant, relative_position="none", relative_gain=0)
        return variant

    def attention_arguments(self, site: str) -> dict[str, Any]:
        """Return the arguments of `MixheadAttention` that the flags set for `site`."""
        return {
            "variant": self.variant(site),
            "value_init_scale": self.value_init_scale,
            "mixing_lr_scale": self.mixing_lr_scale,
        }


# All flags of the plugin, without dashes. fairseq's own field of every dataclass, `_name`, is none.
FLAGS = tuple(f.name for f in fields(AttentionOptions) if not f.name.startswith("_"))
