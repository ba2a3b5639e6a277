"""Every flag of the plugin once, what its values mean, and what is refused before anything is built."""

from argparse import Namespace
from dataclasses import dataclass, field, fields
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from fairseq.dataclass import FairseqDataclass
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from omegaconf import II, OmegaConf

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.modules.relative_position import RELATIVE_POSITIONS
from mixhead_plugin.ops import IMPLEMENTATIONS, NORMALIZERS, implementation_problem, triton

# Which attentions each --attention-scope changes.
SCOPES = {
    "all": ("encoder-self", "decoder-self", "cross"),
    "self": ("encoder-self", "decoder-self"),
    "cross": ("cross",),
    "encoder": ("encoder-self",),
    "decoder": ("decoder-self", "cross"),
    "decoder-self": ("decoder-self",),
}

TOKENS_PER_SAMPLE = II("task.tokens_per_sample")

# A family is a preset of the flags below, under the name `<family>_<stock architecture>`.
FAMILIES: Dict[str, Dict[str, Any]] = {
    "mixhead": {"head_mixing": "position-wise"},
    "fixhead": {
        "head_dim": TOKENS_PER_SAMPLE
    },  # the head size is the input length (low-rank bottleneck paper, section 3.1)
    "sigsoftmax": {"attention_normalizer": "sigsoftmax"},
    # The rows of l2 weights sum to as much as sqrt(n): the essay shrinks W_V and W_O; the factor is our choice.
    "l2": {"attention_normalizer": "l2", "value_init_scale": 0.5},
}

# What is beyond was mistyped: it would round to 0 or overflow, or take all memory.
LEAST_SCALE, GREATEST_SCALE = 1e-6, 1e6
GREATEST_SIZE = 100_000

_CHOICES = {
    "attention_normalizer": tuple(NORMALIZERS),
    "head_mixing": tuple(HEAD_MIXINGS),
    "attention_scope": tuple(SCOPES),
    "attention_impl": ("auto", *IMPLEMENTATIONS),
    "relative_position": tuple(RELATIVE_POSITIONS),
}


def _presets(name: str) -> str:
    values = [f"{preset[name]} in family {family}" for family, preset in FAMILIES.items() if name in preset]
    return "".join(f"; {value}" for value in values).replace(TOKENS_PER_SAMPLE, "--tokens-per-sample")


def _flag(name: str, default: Any, text: str) -> Any:
    """A dataclass field whose help also lists the choices and the defaults."""
    choices = f"; one of {', '.join(_CHOICES[name])}" if name in _CHOICES else ""
    shown = {"head_dim": "--embed-dim / heads", "heads_per_layer": "none"}.get(name, default)
    return field(default=default, metadata={"help": f"{text}{choices} (default: {shown}{_presets(name)})"})


@dataclass
class AttentionOptions(FairseqDataclass):
    """The flags that every architecture of the plugin has beside its stock ones."""

    attention_normalizer: str = _flag("attention_normalizer", "softmax", "how a row of scores becomes weights")
    head_mixing: str = _flag("head_mixing", "none", "where the matrix that mixes the heads comes from")
    head_dim: Optional[int] = _flag("head_dim", None, "size of one head, free of the embedding and the number of heads")
    attention_scope: str = _flag(
        "attention_scope",
        "all",
        "which attentions the other flags change; the rest stay fairseq's own softmax attention",
    )
    attention_impl: str = _flag("attention_impl", "auto", "which code computes the attention")
    value_init_scale: float = _flag("value_init_scale", 1.0, "factor on the initial weights of v_proj and out_proj")
    mixing_lr_scale: float = _flag("mixing_lr_scale", 1.0, "factor on the learning rate of the head mixing alone")

    relative_position: str = _flag(
        "relative_position",
        "none",
        "how self-attention sees distances, beside the stock positions (--no-token-positional-embeddings is for those)",
    )
    relative_gain: int = _flag(
        "relative_gain",
        0,
        "factors on the weights of self-attention, learned for each head and distance up to this; 0 is off",
    )
    heads_per_layer: Optional[str] = _flag(
        "heads_per_layer",
        None,
        "numbers of heads of each layer instead of the stock flags', as pruning leaves them: source:mixed heads or one "
        "number for both, as in 'encoder-self=8,6;decoder-self=8:6,7:8;cross=4,4'; needs --head-dim",
    )

    def heads_at(self, site: str, layer: int) -> Optional[Tuple[int, int]]:
        """The numbers of source and of mixed heads by --heads-per-layer; None if it has none for `place`."""
        heads = parse_heads_per_layer(self.heads_per_layer).get(site)
        return None if heads is None else heads[layer]

    def covers(self, site: str) -> bool:
        """Whether the flags change the attention at `place`, one of SCOPES['all']."""
        return site in SCOPES[self.attention_scope]


def parse_heads_per_layer(text: Optional[str]) -> Dict[str, List[Tuple[int, int]]]:
    """For each place the numbers of source and mixed heads, layer by layer.

    Raises:
        OptionError: it is not of the form that the flag's help describes
    """
    found: Dict[str, List[Tuple[int, int]]] = {}
    for part in (text or "").split(";"):
        if not part.strip():
            continue
        site, _, layers = (side.strip() for side in part.partition("="))
        problem = f"--heads-per-layer {text}: "
        if site not in SCOPES["all"]:
            raise OptionError(f"{problem}{site!r} must be one of {', '.join(SCOPES['all'])}")
        if site in found:
            raise OptionError(f"{problem}{site} must be there once")
        found[site] = []
        for layer in layers.split(","):
            numbers = [number.strip() for number in layer.split(":")]
            if not (
                1 <= len(numbers) <= 2
                and all(number.isdecimal() and 1 <= int(number) <= GREATEST_SIZE for number in numbers)
            ):
                raise OptionError(f"{problem}{layer.strip()!r} must be one number of heads or source:mixed, from 1 on")
            found[site].append((int(numbers[0]), int(numbers[-1])))
    return found


def format_heads_per_layer(heads: Dict[str, List[Tuple[int, int]]]) -> str:
    """What `parse_heads_per_layer` reads."""
    layers = {
        site: ",".join(str(source) if source == mixed else f"{source}:{mixed}" for source, mixed in numbers)
        for site, numbers in heads.items()
    }
    return ";".join(f"{site}={numbers}" for site, numbers in layers.items())


OPTION_NAMES = tuple(f.name for f in fields(AttentionOptions) if not f.name.startswith("_"))


class AttentionShape(NamedTuple):
    """What is known of the attention at one place before it is built."""

    embed_flag: str  # the stock flag of the next
    embed_dim: int
    heads_flag: str
    num_heads: int
    layers: Optional[int] = None  # None where --heads-per-layer is not known


def as_namespace(args: Any) -> Namespace:
    """What fairseq gives to `build_model`, flat: fairseq's own converters lose unknown keys of a DictConfig.

    The flags of `common`, which a YAML file keeps beside the model's, come along: some matter to ours.
    """
    if not OmegaConf.is_config(args):
        return args
    common = (args._get_parent() or {}).get("common", {})
    return Namespace(**{**common, **OmegaConf.to_container(args, resolve=True, enum_to_str=True)})


# What `model_options` says of a model that is not the plugin's.
STOCK_MODEL = Namespace()


def model_options(model: Any) -> Optional[Namespace]:
    """The complete flags of the model that a Namespace or DictConfig describes, which itself stays as it is.

    STOCK_MODEL for a model that is not the plugin's, None for one that nobody has registered.
    """
    registered = _registered(model)
    if registered is None:
        return None
    family = getattr(registered, "family", None)
    if family is None:
        return STOCK_MODEL
    args = Namespace(**vars(as_namespace(model)))
    complete(args, family)
    return args


def _registered(model: Any) -> Optional[type]:
    name = getattr(model, "arch", None) or getattr(model, "_name", None)
    return ARCH_MODEL_REGISTRY.get(name) or MODEL_REGISTRY.get(name)


def attention_heads(model: Any, options: Namespace) -> Dict[str, int]:
    """The numbers of heads, by the flag that sets them, of what --attention-scope covers.

    Args:
        model: as in `model_options`
        options: what that returned
    """
    sides = dict.fromkeys("encoder" if p == "encoder-self" else "decoder" for p in SCOPES[options.attention_scope])
    flags = dict.fromkeys(_registered(model).heads_flag.format(side=side) for side in sides)
    heads = {flag: getattr(options, flag[2:].replace("-", "_"), None) for flag in flags}
    return {flag: number for flag, number in heads.items() if number is not None}


def complete(args: Any, family: str) -> None:
    """Give `args` (Namespace or DictConfig, changed in place) the family's value of every flag that it lacks."""
    for option in fields(AttentionOptions):
        if option.name in OPTION_NAMES:
            value = getattr(args, option.name, None)
            if value is None:
                value = FAMILIES[family].get(option.name, option.default)
            if value == TOKENS_PER_SAMPLE:
                value = getattr(args, "tokens_per_sample", None)
            # fairseq's parsers read a flag whose default is another flag as text
            if FAMILIES[family].get(option.name) == TOKENS_PER_SAMPLE and isinstance(value, str) and value.isdecimal():
                value = int(value)
            setattr(args, option.name, value)


def check(options: AttentionOptions, family: str, shapes: Dict[str, AttentionShape], scale_heads: bool = False) -> None:
    """Refuse what cannot work or would silently do nothing.

    Args:
        options: complete, see `complete`
        family: a key of FAMILIES
        shapes: the attentions that the model will have, by place
        scale_heads: whether fairseq's --scale-heads is on

    Raises:
        OptionError: one line with the flag, its value and what would be valid
    """
    for name in _CHOICES:
        _check_choice(options, name)

    problem = implementation_problem(options.attention_impl)
    if problem:
        usable = [impl for impl in _CHOICES["attention_impl"] if not implementation_problem(impl)]
        raise OptionError(
            f"--attention-impl {options.attention_impl}: {problem}; usable here: {', '.join(usable)} "
            "(for a trained model: --model-overrides \"{'attention_impl': 'auto'}\")"
        )
    if options.head_dim is not None and not (isinstance(options.head_dim, int) and options.head_dim >= 1):
        raise OptionError(
            f"--head-dim {options.head_dim}: must be a whole number of at least 1 (leave it out for "
            f"{'--tokens-per-sample' if 'head_dim' in FAMILIES[family] else 'embedding / heads'})"
        )
    if options.head_dim is not None and options.head_dim > GREATEST_SIZE:
        raise OptionError(f"--head-dim {options.head_dim}: must be at most {GREATEST_SIZE}")
    if options.head_dim is None and "head_dim" in FAMILIES[family]:
        raise OptionError(
            f"--head-dim is missing: family {family} needs a head size, at best the input length, where the task has "
            "no --tokens-per-sample"
        )
    for name in ("value_init_scale", "mixing_lr_scale"):
        if not LEAST_SCALE <= getattr(options, name) <= GREATEST_SCALE:
            raise OptionError(
                f"{option_name(name)} {getattr(options, name)}: must be a number greater than 0, from {LEAST_SCALE:f} "
                f"to {GREATEST_SCALE:g}"
            )
    if options.mixing_lr_scale != 1 and not HEAD_MIXINGS[options.head_mixing].trained:
        trained = ", ".join(name for name, kind in HEAD_MIXINGS.items() if kind.trained)
        raise OptionError(
            f"--mixing-lr-scale {options.mixing_lr_scale}: has no effect with --head-mixing {options.head_mixing}; "
            f"must be 1, or --head-mixing one of {trained}"
        )

    check_scope(options, shapes)
    _check_heads_per_layer(options, shapes)
    if scale_heads and "decoder-self" in parse_heads_per_layer(options.heads_per_layer):
        raise OptionError(
            "--scale-heads: must be left out with --heads-per-layer, it scales as many heads in each layer"
        )
    _check_relative(options, shapes)
    heads = max(shape.num_heads for site, shape in shapes.items() if options.covers(site))
    if heads == 1 and HEAD_MIXINGS[options.head_mixing].build and not HEAD_MIXINGS[options.head_mixing].trained:
        raise OptionError(f"--head-mixing {options.head_mixing}: has no effect on one head; use more attention heads")
    for site, shape in shapes.items():
        _check_shape(options, site, shape)
        _check_kernels(options, site, shape)
        own_dim = options.head_dim is not None and options.covers(site)
        if scale_heads and site == "decoder-self" and own_dim and options.head_dim * shape.num_heads != shape.embed_dim:
            raise OptionError(
                f"--scale-heads: needs --head-dim {shape.embed_dim // shape.num_heads} "
                f"({shape.embed_flag} / {shape.heads_flag}), not {options.head_dim}"
            )


def _check_choice(options: AttentionOptions, name: str) -> None:
    if getattr(options, name) not in _CHOICES[name]:
        raise OptionError(f"{option_name(name)} {getattr(options, name)}: must be one of {', '.join(_CHOICES[name])}")


def check_scope(options: AttentionOptions, shapes: Dict[str, AttentionShape]) -> None:
    """Refuse an --attention-scope that a model of these attentions has no use for."""
    scope = options.attention_scope
    _check_choice(options, "attention_scope")
    if not any(options.covers(site) for site in shapes):
        useful = [name for name, sites in SCOPES.items() if any(site in shapes for site in sites)]
        raise OptionError(
            f"--attention-scope {scope}: this model has no such attention, only {', '.join(shapes)}; "
            f"must be one of {', '.join(useful)}"
        )
    defaults = AttentionOptions()
    stock = all(getattr(options, name) == getattr(defaults, name) for name in OPTION_NAMES if name != "attention_scope")
    if scope != "all" and stock:
        raise OptionError(
            f"--attention-scope {scope}: has no effect with --attention-normalizer softmax, --head-mixing none and no "
            "--head-dim; change one of them or leave the scope out"
        )


def _check_heads_per_layer(options: AttentionOptions, shapes: Dict[str, AttentionShape]) -> None:
    per_layer = parse_heads_per_layer(options.heads_per_layer)
    flag = f"--heads-per-layer {options.heads_per_layer}"
    if per_layer and options.head_dim is None:
        raise OptionError(f"{flag}: needs --head-dim, the size of one head")
    for site, heads in per_layer.items():
        if site not in shapes or not options.covers(site):
            possible = ", ".join(site for site in shapes if options.covers(site))
            raise OptionError(f"{flag}: {site} must be one of {possible}, which this model has in --attention-scope")
        layers = shapes[site].layers
        if layers is None:
            raise OptionError(f"{flag}: must be left out, this model's layers have the same heads")
        if len(heads) != layers:
            raise OptionError(f"{flag}: {site} must have {layers} numbers, one for each layer, not {len(heads)}")
        if options.head_mixing == "none" and any(source != mixed for source, mixed in heads):
            raise OptionError(f"{flag}: source and mixed heads must be as many with --head-mixing none")


def _check_relative(options: AttentionOptions, shapes: Dict[str, AttentionShape]) -> None:
    flags = [
        f"{option_name(name)} {getattr(options, name)}"
        for name in ("relative_position", "relative_gain")
        if getattr(options, name) not in ("none", 0)
    ]
    if not isinstance(options.relative_gain, int) or options.relative_gain < 0:
        raise OptionError(f"--relative-gain {options.relative_gain}: must be a distance of at least 1, or 0 for none")
    if options.relative_gain > GREATEST_SIZE:
        raise OptionError(f"--relative-gain {options.relative_gain}: must be at most {GREATEST_SIZE}")
    own = [shape for site, shape in shapes.items() if site != "cross" and options.covers(site)]
    if flags and not own:
        raise OptionError(
            f"{flags[0]}: is for self-attention, which --attention-scope {options.attention_scope} leaves out"
        )
    for shape in own:
        head_dim = options.head_dim if options.head_dim is not None else shape.embed_dim // max(1, shape.num_heads)
        if options.relative_position == "rotary" and head_dim % 2 != 0:
            raise OptionError(f"--relative-position rotary: needs an even head size, not {head_dim} (--head-dim)")


def _check_shape(options: AttentionOptions, site: str, shape: AttentionShape) -> None:
    heads = f"{shape.heads_flag} {shape.num_heads}"
    if shape.num_heads < 1:
        raise OptionError(f"{heads}: must be at least 1")
    if shape.embed_dim % shape.num_heads == 0 or (options.head_dim is not None and options.covers(site)):
        return
    hint = "must divide it" if options.head_dim is not None else "must divide it, or --head-dim must be set"
    where = f" of the {site} attention, which --attention-scope {options.attention_scope} leaves as it is,"
    raise OptionError(
        f"{heads}{'' if options.covers(site) else where} does not divide {shape.embed_flag} {shape.embed_dim}: {hint}"
    )


def _check_kernels(options: AttentionOptions, site: str, shape: AttentionShape) -> None:
    """What the first batch would be refused for"""
    if options.attention_impl != "triton" or not options.covers(site):
        return
    head_dim = shape.embed_dim // shape.num_heads if options.head_dim is None else options.head_dim
    mixes = HEAD_MIXINGS[options.head_mixing].build is not None
    heads = parse_heads_per_layer(options.heads_per_layer).get(site, [(shape.num_heads, shape.num_heads)])
    problem = triton.variant_problem(options.attention_normalizer, max(source for source, _ in heads), head_dim, mixes)
    if site != "cross" and options.relative_position == "t5":
        problem = problem or "has no kernel for --relative-position t5"
    if site != "cross" and options.relative_gain:
        problem = problem or "has no kernel for --relative-gain"
    if any(source != mixed for source, mixed in heads):
        problem = problem or "has no kernel for other numbers of mixed heads than of source heads"
    if problem:
        raise OptionError(f"--attention-impl triton: {problem}; must be auto, blockwise or reference")
