"""Refuse flags that cannot work, or that have no effect, before a model is built.

Every message is one line that begins with the flag and its value, and says what would be valid.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.fairseq.options import (
    CHOICES,
    OPTION_NAMES,
    SCOPES,
    AttentionOptions,
    AttentionSite,
    parse_heads_per_layer,
)
from mixhead_plugin.ops import RelativeScores, implementation_problem, triton
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.parts import MIXINGS, OPTIONS, Assembly, PartError, Variant

Sites = Mapping[str, AttentionSite]


def check_flags(args: Any, sites: Sites) -> None:
    """Refuse flags that cannot work, or have no effect.

    Args:
        args: the complete flags of a model
        sites: the attentions of the model, by one of SCOPES["all"]

    Raises:
        OptionError: the first flag that is wrong
    """
    options = AttentionOptions.from_namespace(args)
    _check_scope_name(options)
    _check_scale("value_init_scale", options.value_init_scale)
    _check_scale("mixing_lr_scale", options.mixing_lr_scale)
    with in_words_of_flags():
        variant = Variant.of_flags(options)

    covered = covered_sites(options, sites)
    for site, shape in sites.items():
        _check_division(
            args, site, shape, own_size=site in covered and variant.head_dim is not None
        )
        if site == "decoder-self":
            _check_scale_heads(args, variant, shape, covered)
    _check_parts(options, covered)
    _check_heads_per_layer(args, options, covered)
    if covered.keys() <= {"cross"}:
        reason = f"with --attention-scope {options.attention_scope}, which has no self-attention"
        refuse_relative(options, reason)
    _check_learning_rate(args, options, variant)
    _check_quantisation(args, options, covered)
    _check_implementation(args, options, covered)
    _check_xformers(args)


@contextmanager
def in_words_of_flags(heads_flag: str = "") -> Iterator[None]:
    """Turn a PartError, which names a field of `Variant`, into an OptionError with its flag.

    Args:
        heads_flag: the flag of the number of heads, where that may be the fault
    """
    try:
        yield
    except PartError as error:
        flag = heads_flag
        if error.option in OPTIONS:
            flag = option_name(OPTIONS[error.option].flag)
        raise OptionError(f"{flag} {error.value}: {error.problem}") from None


def refuse_relative(options: Any, reason: str) -> None:
    """Refuse relative positions and gains; `reason` ends the message."""
    if options.relative_position != "none":
        raise OptionError(f"--relative-position {options.relative_position}: must be none {reason}")
    if options.relative_gain != 0:
        raise OptionError(f"--relative-gain {options.relative_gain}: must be 0 {reason}")


def covered_sites(options: AttentionOptions, sites: Sites) -> dict[str, AttentionSite]:
    """Return those of `sites` that --attention-scope covers.

    A scope that covers none, or that has no effect, is refused.
    """
    scope = options.attention_scope
    covered = {site: shape for site, shape in sites.items() if options.covers(site)}
    if not covered:
        useful = [name for name, some in SCOPES.items() if not sites.keys().isdisjoint(some)]
        raise OptionError(
            f"--attention-scope {scope}: the model has no such attention; must be one of "
            f"{', '.join(useful)}"
        )
    if scope == "all":
        return covered
    for name in OPTION_NAMES:
        if name != "attention_scope" and getattr(options, name) != getattr(AttentionOptions, name):
            return covered
    raise OptionError(
        f"--attention-scope {scope}: has no effect without another flag of the plugin; must be "
        "all, or left out"
    )


def numbers_of_heads(
    options: AttentionOptions, site: str, shape: AttentionSite
) -> list[tuple[int, int]]:
    """Return the numbers of source and mixed heads of the layers at a site.

    There is one entry if they are all equal.
    """
    equal = [(shape.num_heads, shape.num_heads)]
    return parse_heads_per_layer(options.heads_per_layer).get(site, equal)


def _check_scope_name(options: AttentionOptions) -> None:
    # A tuple, because a YAML file may hold a list here, which no dictionary looks up.
    if options.attention_scope not in CHOICES["attention_scope"]:
        raise OptionError(
            f"--attention-scope {options.attention_scope}: must be one of "
            f"{', '.join(CHOICES['attention_scope'])}"
        )


def _check_scale(name: str, value: Any) -> None:
    """Refuse a factor that is no positive, finite number."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise OptionError(f"{option_name(name)} {value}: must be a number greater than 0")


def _check_division(args: Any, site: str, shape: AttentionSite, own_size: bool) -> None:
    """Refuse a number of heads that does not divide the embedding.

    Where --head-dim sets their size, which is `own_size`, every number is accepted.
    """
    divides = shape.num_heads >= 1 and shape.embed_dim % shape.num_heads == 0
    if divides or (shape.num_heads >= 1 and own_size):
        return
    if site in SCOPES[args.attention_scope]:
        remedy = ", or set --head-dim"
    else:
        remedy = f" ({site}, outside --attention-scope {args.attention_scope})"
    raise OptionError(
        f"{shape.heads_flag} {shape.num_heads}: must divide {shape.embed_flag} "
        f"{shape.embed_dim}{remedy}"
    )


def _check_scale_heads(args: Any, variant: Variant, shape: AttentionSite, covered: Sites) -> None:
    """Refuse --scale-heads where heads have another size than fairseq's code takes for granted."""
    if not getattr(args, "scale_heads", False):
        return
    if "decoder-self" not in covered or variant.head_dim is None:
        return
    if variant.head_dim * shape.num_heads != shape.embed_dim:
        raise OptionError(
            f"--scale-heads: needs --head-dim {shape.embed_dim / shape.num_heads:g}, not "
            f"{variant.head_dim}"
        )


def _check_parts(options: AttentionOptions, covered: Sites) -> None:
    """Refuse parts that do not fit the number of heads or their size.

    In a pruned model, also refuse parts that cannot be pruned.
    """
    for site, shape in covered.items():
        variant = options.variant(site)
        for name, kind in variant.parts().items():
            if kind.uncut and options.heads_per_layer:
                raise OptionError(
                    f"--heads-per-layer {options.heads_per_layer}: must be left out with "
                    f"{option_name(name)} {getattr(variant, name)}, {kind.uncut}"
                )
        with in_words_of_flags(shape.heads_flag):
            example_call(variant, shape, shape.num_heads)


def example_call(
    variant: Variant, shape: AttentionSite, num_heads: int, mixed_heads: int | None = None
) -> AttentionInputs:
    """Return a call of an attention with its dtypes and shapes, but without numbers.

    Args:
        variant: what is asked of the attention
        shape: of the attentions at its site
        num_heads: of source heads
        mixed_heads: of heads after mixing; None for the usual number

    Raises:
        PartError: parts that do not fit these numbers
    """
    # Parts that draw numbers would change those of the model that is built next.
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        head_dim = variant.head_dim or shape.embed_dim // shape.num_heads
        sizes = variant.sizes(num_heads, shape.embed_dim, mixed_heads=mixed_heads)
        assembly = Assembly()
        assembly.add_parts(variant, sizes)

        query = torch.empty(1, num_heads, 1, head_dim)
        value = torch.empty(1, sizes.mixed_heads, 1, sizes.value_dim)
        x = torch.empty(1, 1, shape.embed_dim)
        relative = RelativeScores(query, query[0]) if shape.relative else None
        return assembly.inputs_of(query, query, value, query, x, relative=relative)


def _check_heads_per_layer(args: Any, options: AttentionOptions, covered: Sites) -> None:
    """Refuse numbers of heads of layers that the model does not have, or not in this way."""
    per_layer = parse_heads_per_layer(options.heads_per_layer)
    flag = f"--heads-per-layer {options.heads_per_layer}"
    if per_layer and options.head_dim is None:
        raise OptionError(f"{flag}: needs --head-dim, the size of one head")
    for site, heads in per_layer.items():
        side = site.split("-")[0]
        if getattr(args, f"{side}_layers_to_keep", None):
            raise OptionError(f"{flag}: must be left out with --{side}-layers-to-keep")
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
        if options.head_mixing == "none" and any(source != mixed for source, mixed in heads):
            raise OptionError(
                f"{flag}: must have as many source as mixed heads with --head-mixing none"
            )
    if "decoder-self" in per_layer and getattr(args, "scale_heads", False):
        raise OptionError(
            "--scale-heads: must be left out with --heads-per-layer, it needs equal numbers of "
            "heads"
        )


def _check_learning_rate(args: Any, options: AttentionOptions, variant: Variant) -> None:
    """Refuse --mixing-lr-scale where it would have no effect.

    There is no trained mixing, or the optimizer cannot tell its parameters from the others.
    """
    if options.mixing_lr_scale == 1:
        return
    flag = f"--mixing-lr-scale {options.mixing_lr_scale}"
    parts = variant.parts()
    if not any(parts[name].trained for name in MIXINGS):
        mixings = ", ".join(f"{option_name(name)} {getattr(variant, name)}" for name in MIXINGS)
        raise OptionError(f"{flag}: has no effect with {mixings}; must be 1")
    if getattr(args, "fp16", False) and not getattr(args, "fp16_no_flatten_grads", False):
        raise OptionError(
            f"{flag}: with --fp16 needs --fp16-no-flatten-grads, which keeps the parameters apart"
        )

    # These two round small steps to 0.
    for name in ("memory_efficient_fp16", "memory_efficient_bf16"):
        if getattr(args, name, None) is True:
            raise OptionError(f"{flag}: must be 1 with {option_name(name)}")
    # These rearrange the parameters.
    for name, value in (
        ("ddp_backend", "fully_sharded"),
        ("zero_sharding", "os"),
        ("optimizer", "composite"),
    ):
        if getattr(args, name, None) == value:
            raise OptionError(f"{flag}: must be 1 with {option_name(name)} {value}")


def _check_quantisation(args: Any, options: AttentionOptions, covered: Sites) -> None:
    """Refuse a block size of quantisation noise that does not divide the inputs of out_proj."""
    if not getattr(args, "quant_noise_pq", 0):
        return
    name = "head_dim" if options.value_head_dim is None else "value_head_dim"
    size = getattr(options, name)
    if size is None:
        return  # as many inputs as the embedding has
    block = getattr(args, "quant_noise_pq_block_size", 8)
    for site, shape in covered.items():
        for _, mixed in numbers_of_heads(options, site, shape):
            if mixed * size % block != 0:
                raise OptionError(
                    f"{option_name(name)} {size}: times {mixed} heads must be a multiple of "
                    f"--quant-noise-pq-block-size {block}"
                )


def _check_implementation(args: Any, options: AttentionOptions, covered: Sites) -> None:
    """Refuse an implementation that could not compute the first batch."""
    flag = f"--attention-impl {options.attention_impl}"
    problem = implementation_problem(options.attention_impl)
    if problem:
        usable = [impl for impl in CHOICES["attention_impl"] if not implementation_problem(impl)]
        raise OptionError(
            f"{flag}: {problem}; usable here: {', '.join(usable)} (also by --model-overrides)"
        )
    if options.attention_impl == "triton":
        problem = _triton_problem(args, options, covered)
        if problem:
            raise OptionError(f"{flag}: {problem}; must be auto, blockwise or reference")


def _triton_problem(args: Any, options: AttentionOptions, covered: Sites) -> str:
    """Return why the kernels cannot compute the model's attentions; empty if they can."""
    if getattr(args, "cpu", False):
        return "needs a GPU, which --cpu excludes"
    for site, shape in covered.items():
        variant = options.variant(site)
        for source, mixed in numbers_of_heads(options, site, shape):
            # The usual number of mixed heads may be another one than that of source heads.
            pruned = None if source == mixed else mixed
            problem = triton.kernel_problem(example_call(variant, shape, source, pruned))
            if problem:
                return problem
    return ""


def _check_xformers(args: Any) -> None:
    for side in ("encoder", "decoder"):
        if getattr(args, f"{side}_xformers_att_config", None) is not None:
            raise OptionError(
                f"--{side}-xformers-att-config: must be left out, the plugin computes the attention"
            )
