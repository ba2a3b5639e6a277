"""Refuse flags that cannot work, or that have no effect, before a model is built.

Every message is one line that begins with the flag and its value, and says what would be valid.
"""

import math
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from numbers import Real
from typing import Any

import torch

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.fairseq.heads_per_layer import parse_heads_per_layer
from mixhead_plugin.fairseq.options import CHOICES, FLAGS, SCOPES, AttentionOptions
from mixhead_plugin.fairseq.relative import refuse_relative
from mixhead_plugin.fairseq.sites import SiteSizes, side_of
from mixhead_plugin.ops import RelativeScores, implementation_problem
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.triton import support
from mixhead_plugin.parts import MIXINGS, OPTIONS, Assembly, PartError, Variant
from mixhead_plugin.parts.variant import whole_number

Sites = Mapping[str, SiteSizes]


def check_flags(args: Any, sites: Sites) -> None:
    """Refuse flags that cannot work, or have no effect.

    Args:
        args: the complete flags of a model
        sites: the attentions of the model, by one of SITES

    Raises:
        OptionError: the first flag that is wrong
    """
    options = AttentionOptions.from_namespace(args)

    # First each flag for itself. From here on all values are in their tables, so the later checks
    # can look them up.
    _check_scope_name(options)
    _check_scale("value_init_scale", options.value_init_scale)
    _check_scale("mixing_lr_scale", options.mixing_lr_scale)
    with part_errors_as_option_errors():
        variant = Variant.of_flags(options)

    # Then where the attentions are, and their sizes. From here on there is an attention that the
    # flags change, and no size is below 1, so the later checks can divide by it.
    _check_scope(options, sites)
    covered = covered_sites(options, sites)
    for site, sizes in sites.items():
        _check_at_least_one(sizes)
        _check_division(options, site, sizes)

    # Then the flags against the sizes. The parts are built only here, because that needs both.
    _check_scale_heads(args, variant, covered)
    _check_parts(options, covered)
    _check_heads_per_layer(args, options, covered)
    _check_distances(options, covered)

    # Last what the rest of the training does with them. These checks count the heads of each layer,
    # which --heads-per-layer may have set.
    _check_mixing_lr_scale(options, variant)
    _check_quantisation(args, options, covered)
    _check_implementation(args, options, covered)
    _check_xformers(args)


@contextmanager
def part_errors_as_option_errors(flags: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turn a PartError, which names a field of `Variant` or an argument, into an OptionError.

    Its value is written as a shell takes it: the quotes of `--head-mixing ''` show an empty text.

    Args:
        flags: the flags of other arguments that may be the fault, by their names, such as
            num_heads; None where only a field of `Variant` may be
    """
    try:
        yield
    except PartError as error:
        if error.option in OPTIONS:
            flag = option_name(OPTIONS[error.option].flag)
        else:
            assert flags is not None
            flag = flags[error.option]
        raise OptionError(f"{flag} {shlex.quote(str(error.value))}: {error.problem}") from None


def check_whole_number(option: str, value: Any, least: int) -> None:
    """Refuse the value of a flag that is no whole number, or is too small.

    Args:
        option: the flag, as in Python
        value: its value
        least: the smallest value that it may have
    """
    with part_errors_as_option_errors({option: option_name(option)}):
        whole_number(option, value, least)


def covered_sites(options: AttentionOptions, sites: Sites) -> dict[str, SiteSizes]:
    """Return those of `sites` that --attention-scope covers."""
    return {site: sizes for site, sizes in sites.items() if options.covers(site)}


def numbers_of_heads(
    options: AttentionOptions, site: str, sizes: SiteSizes
) -> list[tuple[int, int | None]]:
    """Return the numbers of source and mixed heads of the layers at a site.

    There is one pair for each layer that --heads-per-layer names, and a single one where it does
    not name the site. Its number of mixed heads is None: the usual one, see `Variant.sizes`.
    """
    by_site = parse_heads_per_layer(options.heads_per_layer)
    if site in by_site:
        return list(by_site[site])
    return [(sizes.num_heads, None)]


def _check_scope_name(options: AttentionOptions) -> None:
    # A tuple, because a YAML file may hold a list here, which no dictionary looks up.
    if options.attention_scope not in CHOICES["attention_scope"]:
        raise OptionError(
            f"--attention-scope {shlex.quote(str(options.attention_scope))}: must be one of "
            f"{', '.join(CHOICES['attention_scope'])}"
        )


def _check_scope(options: AttentionOptions, sites: Sites) -> None:
    """Refuse a scope that covers no attention of the model, or that has no effect."""
    scope = options.attention_scope
    if not covered_sites(options, sites):
        useful = [name for name, some in SCOPES.items() if not sites.keys().isdisjoint(some)]
        raise OptionError(
            f"--attention-scope {scope}: the model has no such attention; must be one of "
            f"{', '.join(useful)}"
        )
    changed = [name for name in FLAGS if getattr(options, name) != getattr(AttentionOptions, name)]
    if changed == ["attention_scope"]:
        raise OptionError(
            f"--attention-scope {scope}: has no effect without another flag of the plugin; must be "
            "all, or left out"
        )


def _check_scale(name: str, value: Any) -> None:
    """Refuse a factor that is no positive, finite number."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise OptionError(f"{option_name(name)} {value}: must be a number greater than 0")


def _check_at_least_one(sizes: SiteSizes) -> None:
    with part_errors_as_option_errors(_size_flags(sizes)):
        whole_number("embed_dim", sizes.embed_dim, least=1)
        whole_number("num_heads", sizes.num_heads, least=1)


def _size_flags(sizes: SiteSizes) -> dict[str, str]:
    """Return the flags of the sizes of an attention, by their names in Python."""
    return {"num_heads": sizes.heads_flag, "embed_dim": sizes.embed_flag}


def _check_division(options: AttentionOptions, site: str, sizes: SiteSizes) -> None:
    """Refuse a number of heads that does not divide the embedding, where --head-dim is not given.

    Outside --attention-scope, --head-dim has no effect.
    """
    if not options.covers(site):
        ending = f" ({site}, outside --attention-scope {options.attention_scope})"
    elif options.head_dim is None and sizes.head_dim is None:
        ending = ", or set --head-dim"
    else:
        return
    if sizes.embed_dim % sizes.num_heads != 0:
        raise OptionError(
            f"{sizes.heads_flag} {sizes.num_heads}: must divide {sizes.embed_flag} "
            f"{sizes.embed_dim}{ending}"
        )


def _check_scale_heads(args: Any, variant: Variant, covered: Sites) -> None:
    """Refuse --scale-heads where heads have another size than fairseq's code takes for granted."""
    if not getattr(args, "scale_heads", False) or variant.head_dim is None:
        return
    sizes = covered.get("decoder-self")  # no other attention has these scales
    if sizes is None:
        return
    if sizes.embed_dim % sizes.num_heads != 0:
        raise OptionError(
            f"--scale-heads: needs {sizes.heads_flag} that divide {sizes.embed_flag} "
            f"{sizes.embed_dim}, not {sizes.num_heads}"
        )
    needed = sizes.embed_dim // sizes.num_heads
    if variant.head_dim != needed:
        raise OptionError(f"--scale-heads: needs --head-dim {needed}, not {variant.head_dim}")


def _check_parts(options: AttentionOptions, covered: Sites) -> None:
    """Refuse parts that do not fit the number of heads or their size.

    In a pruned model, also refuse parts that cannot be pruned.
    """
    for site, sizes in covered.items():
        variant = options.variant(site)
        for name, row in variant.part_kinds().items():
            if row.why_not_cut and options.heads_per_layer:
                raise OptionError(
                    f"--heads-per-layer {options.heads_per_layer}: must be left out with "
                    f"{option_name(name)} {getattr(variant, name)}, {row.why_not_cut}"
                )
        with part_errors_as_option_errors(_size_flags(sizes)):
            example_call(variant, sizes, sizes.num_heads)  # raises where parts do not fit


def example_call(
    variant: Variant, site_sizes: SiteSizes, num_heads: int, mixed_heads: int | None = None
) -> AttentionInputs:
    """Return a call of an attention with its dtypes and shapes, but without numbers.

    Args:
        variant: what is asked of the attention
        site_sizes: the sizes of the attentions at its site
        num_heads: H, the number of source heads
        mixed_heads: H', the number of heads after mixing; None for the usual number

    Raises:
        PartError: parts that do not fit these numbers
    """
    embed_dim = site_sizes.embed_dim
    if variant.head_dim is None:
        variant = replace(variant, head_dim=site_sizes.head_dim)
    sizes = variant.sizes(num_heads, embed_dim, mixed_heads=mixed_heads)
    with torch.device("meta"):
        assembly = Assembly()
        assembly.add_parts(variant, sizes)

        query = torch.empty(1, num_heads, 1, sizes.head_dim)
        value = torch.empty(1, sizes.mixed_heads, 1, sizes.value_dim)
        x = torch.empty(1, 1, embed_dim)
        relative = None
        if site_sizes.relative:
            # Of keys [H, P, D] at P distances. With one query and one key, there is one distance.
            relative = RelativeScores(query, query[0])
        return assembly.inputs_of(query, query, value, query, x, relative=relative)


def _check_heads_per_layer(args: Any, options: AttentionOptions, covered: Sites) -> None:
    """Refuse numbers of heads of layers that the model does not have, or not in this way."""
    per_layer = parse_heads_per_layer(options.heads_per_layer)
    flag = f"--heads-per-layer {options.heads_per_layer}"
    if per_layer and options.head_dim is None:
        raise OptionError(f"{flag}: needs --head-dim, the size of one head")
    for site, heads in per_layer.items():
        side = side_of(site)
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


def _check_distances(options: AttentionOptions, covered: Sites) -> None:
    """Refuse relative positions where no attention that the flags change is a self-attention."""
    if list(covered) == ["cross"]:
        scope = options.attention_scope
        with part_errors_as_option_errors():
            refuse_relative(
                options, f" with --attention-scope {scope}, which has no self-attention"
            )


def _check_mixing_lr_scale(options: AttentionOptions, variant: Variant) -> None:
    """Refuse --mixing-lr-scale where nothing is trained that it could scale.

    `learning_rate.check_optimizer` compares it with the flags of the training.
    """
    if options.mixing_lr_scale == 1:
        return
    rows = variant.part_kinds()
    if not any(rows[name].trained for name in MIXINGS):
        flags = " or ".join(option_name(name) for name in MIXINGS)
        raise OptionError(
            f"--mixing-lr-scale {options.mixing_lr_scale}: has no effect without a trained "
            f"{flags}; must be 1"
        )


def _check_quantisation(args: Any, options: AttentionOptions, covered: Sites) -> None:
    """Refuse a block size of quantisation noise that does not divide the inputs of out_proj."""
    if not getattr(args, "quant_noise_pq", 0):
        return
    name = "head_dim" if options.value_head_dim is None else "value_head_dim"
    size = getattr(options, name)
    if size is None:
        return  # then out_proj has as many inputs as the embedding, which fairseq checks
    block = getattr(args, "quant_noise_pq_block_size", 8)
    for site, sizes in covered.items():
        for source, mixed in numbers_of_heads(options, site, sizes):
            # A pair of heads that mix to one has values of twice the size: the product is the same.
            heads = source if mixed is None else mixed
            if heads * size % block != 0:
                raise OptionError(
                    f"{option_name(name)} {size}: times {heads} heads must be a multiple of "
                    f"--quant-noise-pq-block-size {block}"
                )


def _check_implementation(args: Any, options: AttentionOptions, covered: Sites) -> None:
    """Refuse an implementation that could not compute the first batch."""
    flag = f"--attention-impl {options.attention_impl}"
    problem = implementation_problem(options.attention_impl)
    if problem:
        usable = [impl for impl in CHOICES["attention_impl"] if not implementation_problem(impl)]
        raise OptionError(
            f"{flag}: {problem}; usable here: {', '.join(usable)} (for a trained model: "
            "--model-overrides \"{'attention_impl': 'auto'}\")"
        )
    if options.attention_impl == "triton":
        problem = _triton_problem(args, options, covered)
        if problem:
            raise OptionError(f"{flag}: {problem}; must be auto, blockwise or reference")


def _triton_problem(args: Any, options: AttentionOptions, covered: Sites) -> str:
    """Return why the kernels cannot compute the model's attentions; empty if they can."""
    if getattr(args, "cpu", False):
        return "needs a GPU, which --cpu excludes"
    for site, sizes in covered.items():
        variant = options.variant(site)
        for source, mixed in numbers_of_heads(options, site, sizes):
            problem = support.kind_problem(example_call(variant, sizes, source, mixed))
            if problem:
                return problem
    return ""


def _check_xformers(args: Any) -> None:
    for side in ("encoder", "decoder"):
        if getattr(args, f"{side}_xformers_att_config", None) is not None:
            raise OptionError(
                f"--{side}-xformers-att-config: must be left out, the plugin computes the attention"
            )
