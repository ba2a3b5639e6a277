"""The plugin's flags, their check before a model is built, and the families that preset them."""

import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Optional

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from omegaconf import II, OmegaConf

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.ops import (
    IMPLEMENTATIONS,
    NORMALIZERS,
    RelativeScores,
    implementation_problem,
    triton,
)
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.parts import MIXINGS, PARTS, VARIANT, Assembly, PartError, sizes_of

# The attentions that each --attention-scope changes, by site.
SCOPES = {
    "all": ("encoder-self", "decoder-self", "cross"),
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

CHOICES = {
    "attention_normalizer": tuple(NORMALIZERS),
    "attention_scope": tuple(SCOPES),
    "attention_impl": ("auto", *IMPLEMENTATIONS),
    **{option: tuple(values) for option, values in VARIANT.items() if option != "normalizer"},
}


def _flag(name: str, default: Any, text: str) -> Any:
    """Return a dataclass field whose help also lists the choices and the defaults."""
    choices = f"; one of {', '.join(CHOICES[name])}" if name in CHOICES else ""
    defaults = [
        {"head_dim": "embedding / heads", "heads_per_layer": "none"}.get(name, str(default))
    ]
    defaults += [
        f"{preset[name]} in family {family}"
        for family, preset in FAMILIES.items()
        if name in preset
    ]
    shown = "; ".join(defaults).replace(TOKENS_PER_SAMPLE, "--tokens-per-sample")
    return field(default=default, metadata={"help": f"{text}{choices} (default: {shown})"})


@dataclass
class AttentionOptions(FairseqDataclass):
    """The flags that every architecture of the plugin adds to fairseq's."""

    attention_normalizer: str = _flag(
        "attention_normalizer", "softmax", "how a row of scores becomes weights"
    )
    head_mixing: str = _flag(
        "head_mixing", "none", "where the matrix that mixes the heads comes from"
    )
    score_mixing: str = _flag(
        "score_mixing", "none", "where the matrix comes from that mixes the heads' scores"
    )
    feature_mixing: str = _flag(
        "feature_mixing", "none", "how heads share queries, keys and values, or outputs"
    )
    mixed_features: str = _flag(
        "mixed_features", "qkv", "what --feature-mixing heads or shared mixes: q, k, v"
    )
    attention_sink: str = _flag(
        "attention_sink", "none", "the score of one more key in each row, which has no value"
    )
    attention_gate: str = _flag(
        "attention_gate", "none", "what scales the outputs of heads before out_proj"
    )
    head_dim: Optional[int] = _flag(
        "head_dim", None, "size of one head, independent of embedding and number of heads"
    )
    attention_scope: str = _flag(
        "attention_scope",
        "all",
        "which attentions the other flags change; the rest keep fairseq's softmax attention",
    )
    attention_impl: str = _flag("attention_impl", "auto", "which code computes the attention")
    value_init_scale: float = _flag(
        "value_init_scale", 1.0, "factor on the initial weights of v_proj and out_proj"
    )
    mixing_start: str = _flag(
        "mixing_start",
        "identity",
        "what M starts as in a new model, with --head-mixing position-independent or position-wise "
        "(its b): "
        "random is normal with deviation 1/sqrt(H), uniform is 1/H everywhere; "
        "a checkpoint without M still becomes the identity",
    )
    mixing_lr_scale: float = _flag(
        "mixing_lr_scale", 1.0, "factor on the learning rate of head, score, feature mixing"
    )
    relative_position: str = _flag(
        "relative_position",
        "none",
        "how self-attention sees distances; fairseq's positions are added too, "
        "except with --no-token-positional-embeddings",
    )
    relative_gain: int = _flag(
        "relative_gain",
        0,
        "learn factors on the weights of self-attention, one for each head and distance up to this "
        "number; 0 is off",
    )
    heads_per_layer: Optional[str] = _flag(
        "heads_per_layer",
        None,
        "numbers of heads of each layer after pruning: source:mixed heads, or one number for both, "
        "as in "
        "'encoder-self=8,6;decoder-self=8:6,7:8;cross=4,4'; needs --head-dim",
    )

    def heads_at(self, site: str, layer: int) -> tuple[int, int] | None:
        """Return the numbers of source and mixed heads by --heads-per-layer, None if it does not
        name `site`.
        """
        heads = parse_heads_per_layer(self.heads_per_layer).get(site)
        return None if heads is None else heads[layer]

    def covers(self, site: str) -> bool:
        """Return True if --attention-scope includes `site`, one of SCOPES['all']."""
        return site in SCOPES[self.attention_scope]


OPTION_NAMES = tuple(f.name for f in fields(AttentionOptions) if not f.name.startswith("_"))


def parse_heads_per_layer(text: str | None) -> dict[str, list[tuple[int, int]]]:
    """Return the numbers of source and mixed heads of each layer, by site;
    refuse a malformed text.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    flag = f"--heads-per-layer {text}"
    if text is None or text == "":
        return found
    for part in filter(str.strip, str(text).split(";")):
        site, _, layers = (side.strip() for side in part.partition("="))
        if site not in SCOPES["all"] or site in found:
            raise OptionError(
                f"{flag}: {site!r} must be one of {', '.join(SCOPES['all'])}, at most once"
            )
        found[site] = []
        for layer in layers.split(","):
            source, colon, mixed = (number.strip() for number in layer.partition(":"))
            numbers = [source, mixed] if colon else [source, source]
            if not all(number.isdecimal() and int(number) >= 1 for number in numbers):
                raise OptionError(
                    f"{flag}: {layer.strip()!r} must be a number of heads or source:mixed, from 1 "
                    "on"
                )
            found[site].append((int(numbers[0]), int(numbers[1])))
    if not found:
        raise OptionError(
            f"{flag}: must name an attention, as in 'encoder-self=8,6', or be left out"
        )
    return found


class AttentionSite(NamedTuple):
    """The sizes of the attention at one site, and the flags that set them."""

    embed_flag: str
    embed_dim: int
    heads_flag: str
    num_heads: int
    layers: int | None = None  # None for a model that does not take --heads-per-layer
    relative: bool = False  # whether the attention itself adds scores of distances


def as_namespace(args: Any) -> Any:
    """Return the flags that fairseq gives to `build_model` as one flat namespace.

    fairseq's own converters drop the plugin's flags from a DictConfig. A YAML file keeps the flags
    of `common` beside the model's: the result has both. A reference to a value of the task becomes
    None if there is no task.
    """
    if OmegaConf.is_config(args):
        common = (args._get_parent() or {}).get("common", {})
        args = Namespace(
            **{**common, **OmegaConf.to_container(args, resolve=True, enum_to_str=True)}
        )
    if getattr(args, "head_dim", None) == TOKENS_PER_SAMPLE:
        args.head_dim = _input_length(args)
    for name, value in vars(args).items():
        if isinstance(value, str) and value.startswith("${"):
            setattr(args, name, None)
    return args


def complete(args: Any, family: str | None = None) -> None:
    """Set the missing flags of `args` in place to the family's values; by default the model's name
    gives the family.
    """
    name = model_name(args)
    registered = str(ARCH_MODEL_NAME_REGISTRY.get(name, name))
    preset = FAMILIES.get(
        family or next((f for f in FAMILIES if registered.startswith(f"{f}_")), ""), {}
    )
    for option in fields(AttentionOptions):
        if option.name in OPTION_NAMES and getattr(args, option.name, None) is None:
            value = preset.get(option.name, option.default)
            setattr(args, option.name, _input_length(args) if value == TOKENS_PER_SAMPLE else value)


def _input_length(args: Any) -> int:
    length = getattr(args, "tokens_per_sample", None)
    if not isinstance(length, int):
        raise OptionError(
            "--head-dim is missing: without --tokens-per-sample, family fixhead needs a head size"
        )
    return length


# `model_options` returns this for fairseq's own models.
FAIRSEQ_MODEL = Namespace()


def model_options(model: Any) -> Namespace | None:
    """Return the complete flags of a plugin model, FAIRSEQ_MODEL for fairseq's own, None for an
    unknown name.
    """
    registered = _registered(model)
    if not hasattr(registered, "attention_sites"):
        return None if registered is None else FAIRSEQ_MODEL
    args = as_namespace(model if OmegaConf.is_config(model) else Namespace(**vars(model)))
    complete(args)
    return args


def most_heads(args: Any) -> int:
    """Return the largest number of source heads of the plugin's attentions, by the complete flags
    of their model.
    """
    covered = _check_scope(args, _registered(args).attention_sites(args))
    return max(source for site, shape in covered.items() for source, _ in _heads(args, site, shape))


def model_name(model: Any) -> str | None:
    return getattr(model, "arch", None) or getattr(model, "_name", None)


def _registered(model: Any) -> type | None:
    return ARCH_MODEL_REGISTRY.get(model_name(model)) or MODEL_REGISTRY.get(model_name(model))


def check(args: Any, shapes: dict[str, AttentionSite]) -> None:
    """Refuse complete flags that cannot work, or have no effect, in a model with the attentions
    `shapes`, by site.
    """
    for name, choices in CHOICES.items():
        if getattr(args, name) not in choices:
            raise OptionError(
                f"{option_name(name)} {getattr(args, name)}: must be one of {', '.join(choices)}"
            )
    for name in ("value_init_scale", "mixing_lr_scale"):
        value = getattr(args, name)
        if isinstance(value, bool) or not (
            isinstance(value, (int, float)) and 0 < value < math.inf
        ):
            raise OptionError(f"{option_name(name)} {value}: must be a number greater than 0")
    for name, least in (("head_dim", 1), ("relative_gain", 0)):
        value = getattr(args, name)
        if value is None:
            continue
        # YAML's `true` is an int
        if isinstance(value, bool) or not (isinstance(value, int) and value >= least):
            raise OptionError(
                f"{option_name(name)} {value}: must be a whole number of at least {least}"
            )
    covered = _check_scope(args, shapes)
    for site, shape in shapes.items():
        _check_shape(args, site, shape, site in covered)
    _check_parts(args, covered)
    _check_heads_per_layer(args, covered)
    if covered.keys() <= {"cross"}:
        refuse_relative(
            args, f"with --attention-scope {args.attention_scope}, which has no self-attention"
        )
    _check_learning_rate(args)
    _check_quantisation(args, covered)
    _check_implementation(args, covered)
    for side in ("encoder", "decoder"):
        if getattr(args, f"{side}_xformers_att_config", None) is not None:
            raise OptionError(
                f"--{side}-xformers-att-config: must be left out, the plugin computes the attention"
            )


def _check_scope(args: Any, shapes: dict[str, AttentionSite]) -> dict[str, AttentionSite]:
    """Return the attentions that --attention-scope covers."""
    flag = f"--attention-scope {args.attention_scope}"
    covered = {
        site: shape for site, shape in shapes.items() if site in SCOPES[args.attention_scope]
    }
    if not covered:
        useful = [name for name, sites in SCOPES.items() if any(site in shapes for site in sites)]
        raise OptionError(
            f"{flag}: the model has no such attention; must be one of {', '.join(useful)}"
        )
    defaults = vars(AttentionOptions())
    changed = any(
        getattr(args, name) != defaults[name] for name in OPTION_NAMES if name != "attention_scope"
    )
    if args.attention_scope != "all" and not changed:
        raise OptionError(
            f"{flag}: has no effect without another flag of the plugin; must be all, or left out"
        )
    return covered


def _check_parts(args: Any, covered: dict[str, AttentionSite]) -> None:
    """Refuse parts of the attention that do not go together, or not with the number of heads or
    their size.
    """
    for name, table in PARTS.items():
        flag, kind = f"{option_name(name)} {getattr(args, name)}", table[getattr(args, name)]
        if kind.uncut and args.heads_per_layer:
            raise OptionError(
                f"--heads-per-layer {args.heads_per_layer}: must be left out with {flag}, "
                f"{kind.uncut}"
            )
    for site, shape in covered.items():
        try:
            _example(args, site, shape, shape.num_heads)
        except PartError as error:
            flag = {"num_heads": shape.heads_flag}.get(error.option, option_name(error.option))
            raise OptionError(f"{flag} {error.value}: {error.problem}") from None


def _example(
    args: Any, site: str, shape: AttentionSite, heads: int, mixed_heads: int | None = None
) -> AttentionInputs:
    """Return a call of the attention at a site, without numbers; `mixed_heads` is None for the
    usual number.
    """
    # one flag has a longer name
    variant = {name: getattr(args, name, args.attention_normalizer) for name in VARIANT}
    gain, head_dim = args.relative_gain, args.head_dim or shape.embed_dim // shape.num_heads
    if site == "cross":
        variant["relative_position"], gain = "none", 0
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        sizes = sizes_of(variant, heads, head_dim, shape.embed_dim, mixed_heads=mixed_heads)
        assembly = Assembly()
        assembly.add_parts(variant, sizes, gain)
        query, x = torch.empty(1, heads, 1, head_dim), torch.empty(1, 1, shape.embed_dim)
        value = torch.empty(1, sizes.mixed_heads, 1, sizes.value_dim)
        relative = RelativeScores(query, query[0]) if shape.relative else None
        return assembly.inputs_of(query, query, value, query, x, relative=relative)


def _check_heads_per_layer(args: Any, covered: dict[str, AttentionSite]) -> None:
    per_layer = parse_heads_per_layer(args.heads_per_layer)
    flag = f"--heads-per-layer {args.heads_per_layer}"
    if per_layer and args.head_dim is None:
        raise OptionError(f"{flag}: needs --head-dim, the size of one head")
    for site, heads in per_layer.items():
        if getattr(args, f"{site.split('-')[0]}_layers_to_keep", None):
            raise OptionError(
                f"{flag}: must be left out with --{site.split('-')[0]}-layers-to-keep"
            )
        if site not in covered:
            raise OptionError(
                f"{flag}: {site} must be one of {', '.join(covered)}, which --attention-scope "
                "covers"
            )
        layers = covered[site].layers
        if layers is None:
            raise OptionError(
                f"{flag}: must be left out, the layers of this model have the same heads"
            )
        if len(heads) != layers:
            raise OptionError(
                f"{flag}: {site} must have {layers} numbers, one for each layer, not {len(heads)}"
            )
        if args.head_mixing == "none" and any(source != mixed for source, mixed in heads):
            raise OptionError(
                f"{flag}: must have as many source as mixed heads with --head-mixing none"
            )
    if "decoder-self" in per_layer and getattr(args, "scale_heads", False):
        raise OptionError(
            "--scale-heads: must be left out with --heads-per-layer, it needs equal numbers of "
            "heads"
        )


def _check_shape(args: Any, site: str, shape: AttentionSite, covered: bool) -> None:
    """Refuse a number of heads that does not divide the embedding, unless --head-dim sets their
    size.
    """
    own_size = covered and args.head_dim is not None
    if shape.num_heads < 1 or (shape.embed_dim % shape.num_heads and not own_size):
        hint = (
            ", or set --head-dim"
            if covered
            else f" ({site}, outside --attention-scope {args.attention_scope})"
        )
        raise OptionError(
            f"{shape.heads_flag} {shape.num_heads}: must divide {shape.embed_flag} "
            f"{shape.embed_dim}{hint}"
        )
    scaled = site == "decoder-self" and getattr(args, "scale_heads", False)
    if scaled and own_size and args.head_dim * shape.num_heads != shape.embed_dim:
        raise OptionError(
            f"--scale-heads: needs --head-dim {shape.embed_dim / shape.num_heads:g}, not "
            f"{args.head_dim}"
        )


def refuse_relative(args: Any, reason: str) -> None:
    for name, off in (("relative_position", "none"), ("relative_gain", 0)):
        if getattr(args, name) != off:
            raise OptionError(f"{option_name(name)} {getattr(args, name)}: must be {off} {reason}")


def _check_learning_rate(args: Any) -> None:
    flag = f"--mixing-lr-scale {args.mixing_lr_scale}"
    if args.mixing_lr_scale == 1:
        return
    if not any(PARTS[name][getattr(args, name)].trained for name in MIXINGS):
        mixings = ", ".join(f"{option_name(name)} {getattr(args, name)}" for name in MIXINGS)
        raise OptionError(f"{flag}: has no effect with {mixings}; must be 1")
    if getattr(args, "fp16", False) and not getattr(args, "fp16_no_flatten_grads", False):
        raise OptionError(
            f"{flag}: with --fp16 needs --fp16-no-flatten-grads, which keeps the parameters apart"
        )
    # The first two round small steps to 0; the others rearrange the parameters.
    for name, value in (
        ("memory_efficient_fp16", True),
        ("memory_efficient_bf16", True),
        ("ddp_backend", "fully_sharded"),
        ("zero_sharding", "os"),
        ("optimizer", "composite"),
    ):
        if getattr(args, name, None) == value:
            raise OptionError(
                f"{flag}: must be 1 with {option_name(name)}{'' if value is True else f' {value}'}"
            )


def _check_quantisation(args: Any, covered: dict[str, AttentionSite]) -> None:
    """Refuse a block size of quantisation noise that does not divide out_proj's inputs, heads *
    head size.
    """
    if not getattr(args, "quant_noise_pq", 0) or args.head_dim is None:
        return
    flag, block = "--quant-noise-pq-block-size", getattr(args, "quant_noise_pq_block_size", 8)
    for heads in {
        mixed for site, shape in covered.items() for _, mixed in _heads(args, site, shape)
    }:
        if heads * args.head_dim % block:
            raise OptionError(
                f"--head-dim {args.head_dim}: times {heads} heads must be a multiple of {flag} "
                f"{block}"
            )


def _check_implementation(args: Any, covered: dict[str, AttentionSite]) -> None:
    """Refuse an implementation that could not compute the first batch."""
    flag = f"--attention-impl {args.attention_impl}"
    if problem := implementation_problem(args.attention_impl):
        usable = [impl for impl in CHOICES["attention_impl"] if not implementation_problem(impl)]
        raise OptionError(
            f"{flag}: {problem}; usable here: {', '.join(usable)} (also by --model-overrides)"
        )
    if args.attention_impl == "triton" and (problem := next(_triton_problems(args, covered), "")):
        raise OptionError(f"{flag}: {problem}; must be auto, blockwise or reference")


def _triton_problems(args: Any, covered: dict[str, AttentionSite]) -> Iterator[str]:
    """Yield the reasons why the kernels cannot compute the model's attentions."""
    if getattr(args, "cpu", False):
        yield "needs a GPU, which --cpu excludes"
    for site, shape in covered.items():
        for source, mixed in _heads(args, site, shape):
            call = _example(args, site, shape, source, None if source == mixed else mixed)
            if problem := triton.kernel_problem(call):
                yield problem


def _heads(args: Any, site: str, shape: AttentionSite) -> list[tuple[int, int]]:
    """Return the numbers of source and mixed heads of the layers at a site; one entry if they are
    all equal.
    """
    return parse_heads_per_layer(args.heads_per_layer).get(
        site, [(shape.num_heads, shape.num_heads)]
    )
