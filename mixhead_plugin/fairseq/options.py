"""The plugin's flags: what each one is, their families, and how configs hold them.

`checks.py` refuses what cannot work.
"""

from argparse import Namespace
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Any, NamedTuple, Optional

from fairseq.dataclass import FairseqDataclass
from omegaconf import II, OmegaConf

from mixhead_plugin.errors import OptionError
from mixhead_plugin.heads.sites import SITES, where
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

# What help says of a default that is None.
_WORDS_FOR_NONE = {
    "head_dim": "embedding / heads",
    "value_head_dim": "head-dim",
    "heads_per_layer": "none",
}


def _flag(name: str, default: Any, text: str) -> Any:
    """Return a dataclass field whose help also lists the choices and the defaults.

    For example 'what scales the outputs of heads before out_proj; one of none, head, element
    (default: none; head in family gated)'.
    """
    choices = ""
    if name in CHOICES:
        choices = f"; one of {', '.join(CHOICES[name])}"
    defaults = [_WORDS_FOR_NONE.get(name, str(default))]
    for family, preset in FAMILIES.items():
        if name in preset:
            defaults.append(f"{preset[name]} in family {family}")
    shown = "; ".join(defaults).replace(TOKENS_PER_SAMPLE, "--tokens-per-sample")
    return field(default=default, metadata={"help": f"{text}{choices} (default: {shown})"})


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
        flags.append((option.flag, type_, _flag(option.flag, option.default, option.help)))
    return make_dataclass("VariantFlags", flags, bases=(FairseqDataclass,))


_VariantFlags: Any = _flags_of_variant()


@dataclass
class AttentionOptions(_VariantFlags):
    """The flags that every architecture of the plugin adds to fairseq's.

    Those of one attention come from the table of `Variant`. Those below say which attentions they
    are for, and how a training begins and goes on.
    """

    attention_scope: str = _flag(
        "attention_scope",
        "all",
        "which attentions the other flags change; the rest keep fairseq's softmax attention",
    )
    value_init_scale: float = _flag(
        "value_init_scale", 1.0, "factor on the initial weights of v_proj and out_proj"
    )
    mixing_lr_scale: float = _flag(
        "mixing_lr_scale", 1.0, "factor on the learning rate of head, score, feature mixing"
    )
    heads_per_layer: Optional[str] = _flag(
        "heads_per_layer",
        None,
        "numbers of heads of each layer after pruning: source:mixed heads, or one number for both, "
        "as in 'encoder-self=8,6;decoder-self=8:6,7:8;cross=4,4'; needs --head-dim",
    )

    def covers(self, site: str) -> bool:
        """Return whether --attention-scope includes a site, one of SITES."""
        return site in SCOPES[self.attention_scope]

    def heads_at(self, site: str, layer: int) -> tuple[int, int] | None:
        """Return the numbers of source and mixed heads that --heads-per-layer gives to a layer.

        Args:
            site: one of SITES
            layer: its number, from 0

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


def parse_heads_per_layer(text: Any) -> dict[str, list[tuple[int, int]]]:
    """Return the numbers of source and mixed heads of each layer, by site; refuse a malformed text.

    'encoder-self=8,6;cross=4:3' gives {"encoder-self": [(8, 8), (6, 6)], "cross": [(4, 3)]}.

    Args:
        text: the value of --heads-per-layer; None or an empty text for none. A YAML file may hold
            something else, such as a number, which is refused.
    """
    heads: dict[str, list[tuple[int, int]]] = {}
    if text is None or text == "":
        return heads
    flag = f"--heads-per-layer {text}"
    for piece in str(text).split(";"):
        if not piece.strip():
            continue  # such as what follows a last semicolon
        site, _, layers = piece.partition("=")
        site = site.strip()
        if site not in SITES:
            raise OptionError(f"{flag}: {site!r} must be one of {', '.join(SITES)}")
        if site in heads:
            raise OptionError(f"{flag}: {site} must be there once, not twice")
        heads[site] = [_heads_of_layer(layer, flag) for layer in layers.split(",")]
    if not heads:  # semicolons alone
        raise OptionError(
            f"{flag}: must name an attention, as in 'encoder-self=8,6', or be left out"
        )
    return heads


def _heads_of_layer(text: str, flag: str) -> tuple[int, int]:
    """Return the numbers of source and mixed heads of '8:6', or of '8' for equal ones."""
    source, colon, mixed = text.strip().partition(":")
    if not colon:
        mixed = source
    for number in (source, mixed):
        if not number.strip().isdecimal() or int(number) < 1:
            raise OptionError(
                f"{flag}: {text.strip()!r} must be a number of heads or source:mixed, from 1 on"
            )
    return int(source), int(mixed)


class SiteSizes(NamedTuple):
    """The sizes of the attentions at one site, and the flags that set them."""

    embed_flag: str
    embed_dim: int
    heads_flag: str
    num_heads: int
    layers: int | None = None  # None for a model that does not take --heads-per-layer
    relative: bool = False  # whether the attention itself adds scores of distances


def side_of(site: str) -> str:
    """Return whose layers have the attentions of a site: "encoder" or "decoder"."""
    # Attention to the encoder, `cross`, lies in the layers of the decoder.
    return "encoder" if site == "encoder-self" else "decoder"


def side_of_attention(name: str) -> str:
    """Return "encoder" or "decoder" for the name of an attention, as `decoder.layers.0.self_attn`.

    A wrapper of the model, such as torch's DistributedDataParallel, may have put its name before.
    """
    return side_of(where(name).site)


def as_namespace(args: Any) -> Any:
    """Return the flags that fairseq gives to `build_model` as one flat namespace.

    fairseq's own converters drop the plugin's flags from a DictConfig. A YAML file keeps the flags
    of `common` beside the model's: the result has both.

    Args:
        args: a DictConfig, which stays as it is; or a Namespace or a dataclass, which is changed
            in place, and returned
    """
    if OmegaConf.is_config(args):
        # The parent is the whole config. omegaconf has no public way to it.
        whole = args._get_parent() or {}
        own: Any = OmegaConf.to_container(args, resolve=True, enum_to_str=True)
        args = Namespace(**{**whole.get("common", {}), **own})

    # The dataclass that a program gives may have references such as ${task.tokens_per_sample} as
    # defaults, and no task to resolve them. `fill_in` knows what --head-dim is then.
    for name, value in vars(args).items():
        is_reference = isinstance(value, str) and value.startswith("${")
        if is_reference and name != "head_dim":
            setattr(args, name, None)
    return args


def fill_in(args: Any, family: str) -> None:
    """Set the missing flags of the plugin to the values of a family.

    Args:
        args: the flags of a model, changed in place
        family: a key of FAMILIES, or "" for none of them
    """
    preset = FAMILIES.get(family, {})
    for name in FLAGS:
        default = getattr(AttentionOptions, name)
        # None, as `null` in a YAML file, leaves out a flag whose default is None. The checks refuse
        # it for any other flag: who writes `head_mixing: null` may mean `none`.
        is_set = hasattr(args, name)
        if default is None:
            is_set = getattr(args, name, None) is not None
        if not is_set:
            setattr(args, name, preset.get(name, default))
    if args.head_dim == TOKENS_PER_SAMPLE:
        args.head_dim = _input_length(args)


def _input_length(args: Any) -> int:
    """Return --tokens-per-sample, the head size of family fixhead."""
    length = getattr(args, "tokens_per_sample", None)
    if not isinstance(length, int):
        raise OptionError(
            "--head-dim is missing: without --tokens-per-sample, family fixhead needs a head size"
        )
    return length


def model_name(flags: Any) -> str | None:
    """Return the name of the architecture or of the model in the flags of a model."""
    return getattr(flags, "arch", None) or getattr(flags, "_name", None)
