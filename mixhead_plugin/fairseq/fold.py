"""Fold a model of the plugin into one of fairseq's own architecture: `mixhead fold`."""

from argparse import Namespace
from collections import OrderedDict
from typing import Any, NoReturn

from fairseq import models as registries
from fairseq.criterions import CRITERION_REGISTRY
from torch import Tensor

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.fairseq import rewriting
from mixhead_plugin.fairseq.config import model_name
from mixhead_plugin.fairseq.criterions.penalties import PENALTIES
from mixhead_plugin.fairseq.models.architectures import MODELS
from mixhead_plugin.fairseq.options import FAMILIES, FLAGS, AttentionOptions
from mixhead_plugin.fairseq.sites import side_of_attention
from mixhead_plugin.parts import PARTS, Assembly, PartError, Variant, first_part_with_effect

PLUGIN_FLAGS = {*FLAGS, *(f"{name}_weight" for name in PENALTIES)}


def fold(file: str, out: str) -> None:
    """Write a model of the plugin in fairseq's architecture, with equal outputs.

    Neither data nor dictionaries are read, and the state of the optimizer is left out. Products are
    in float64; tensors that need none stay as they are.

    Args:
        file: a checkpoint of the plugin
        out: a new file

    Raises:
        OptionError: a part that cannot fold, a model that fairseq does not have, no `file`, or an
            `out` that exists
    """
    state = rewriting.read(file, out)
    cfg = rewriting.plain(state["cfg"])
    flags = cfg["model"]
    if not isinstance(flags, Namespace):
        flags = Namespace(**flags)
    arch = str(model_name(flags))
    fairseqs_arch = _fairseqs_name(file, arch)

    # The config from a YAML file has only the values that differ from those of the architecture,
    # unless a dataclass has filled it in.
    model = registries.ARCH_MODEL_REGISTRY.get(arch)
    if model is not None and not model.by_dataclass:
        registries.ARCH_CONFIG_REGISTRY[arch](flags)
        cfg["model"] = flags
    # A checkpoint from before a flag has its default.
    flags = Namespace(**{**vars(AttentionOptions()), **vars(flags)})

    try:
        tensors = _folded(file, flags, dict(state["model"]))
    # Tensors that were made by hand: one is missing, has fewer dimensions, has a size that the
    # heads do not divide, or has a shape or a layout that torch cannot use here.
    except (KeyError, IndexError, PartError, RuntimeError) as error:
        text = " ".join(str(error).split())[:200]
        raise OptionError(
            f"{file}: its tensors are not those of --arch {arch} with its flags: {text}"
        ) from error

    # Of all criterions, because examples register further `orthogonal_*`.
    names = {f"orthogonal_{name}": name for name in CRITERION_REGISTRY}
    names[arch] = fairseqs_arch
    cfg = _without_plugin(cfg, names)
    criterion_flags = cfg.get("criterion") or {}
    criterion = CRITERION_REGISTRY.get(criterion_flags.get("_name"))
    if criterion is not None:  # one of another plugin keeps its name
        for update in state["optimizer_history"]:
            update["criterion_name"] = criterion.__name__

    rewriting.write(state, cfg, tensors, out)


def _fairseqs_name(file: str, arch: str) -> str:
    """Return fairseq's name of an architecture of the plugin.

    For an architecture that fairseq lacks, it is the name of the model, because the config has all
    values.
    """
    refusal = OptionError(
        f"{file}: --arch {arch} cannot be folded, must be the plugin's of a model that fairseq has"
    )
    model = registries.ARCH_MODEL_REGISTRY.get(arch, registries.MODEL_REGISTRY.get(arch))
    if model is None:
        raise refusal
    names = [name for name, model_class in MODELS.items() if model_class is model]
    if not names:
        raise refusal
    fairseqs = registries.MODEL_REGISTRY.get(names[0])
    # A model that fairseq lacks has no entry, or one of the plugin's, such as gau_lm.
    if fairseqs is None or fairseqs is model or not issubclass(model, fairseqs):
        raise refusal

    for family in FAMILIES:
        without_family = arch.removeprefix(f"{family}_")
        if without_family != arch and without_family in registries.ARCH_MODEL_REGISTRY:
            return without_family
    return names[0]


def _folded(file: str, flags: Namespace, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of fairseq's model.

    A part without which the outputs would change is refused.

    Args:
        file: the checkpoint, for messages
        flags: all flags of the model, those of the plugin included
        state: the tensors of the model, which are changed
    """
    without_tensors = ["attention_normalizer", "relative_gain", "heads_per_layer"]
    for option, table in PARTS.items():
        if table[getattr(flags, option)].leaves_no_trace:  # nothing in `state` would show it
            without_tensors.append(option)
    for option in without_tensors:
        if getattr(flags, option) != getattr(AttentionOptions, option):
            _refuse(file, flags, option)

    for key, weight in state.items():
        if not key.endswith(".q_proj.weight"):
            continue
        # In fairseq both are square.
        if len(weight) != weight.size(1):
            _refuse(file, flags, "head_dim")
        output = state[key.replace(".q_proj.", ".out_proj.")]
        if len(output) != output.size(1):
            _refuse(file, flags, "value_head_dim")

    for name, options in _parts_by_attention(state).items():
        _fold_attention(file, flags, state, name, options)
    return state


def _parts_by_attention(state: dict[str, Tensor]) -> dict[str, list[str]]:
    """Return the options of the parts that have tensors in `state`, by the attention's name."""
    parts: dict[str, list[str]] = {}
    for option in PARTS:
        for key in state:
            name, dot, _ = key.partition(f".{option}.")
            if not dot:
                continue
            options = parts.setdefault(name, [])
            if option not in options:  # a part may have several tensors
                options.append(option)
    return parts


def _fold_attention(
    file: str, flags: Namespace, state: dict[str, Tensor], name: str, options: list[str]
) -> None:
    """Take the parts of one attention out of `state`, and multiply them into its projections.

    Args:
        file: the checkpoint, for messages
        flags: all flags of the model, those of the plugin included
        state: the tensors of the model, which are changed
        name: the attention's name in the model, such as decoder.layers.0.self_attn
        options: the options of the attention's parts, such as head_mixing
    """
    fields = {}
    for option in options:
        value = getattr(flags, option)
        fields[option] = value
        for field in PARTS[option][value].options:
            fields[field] = getattr(flags, field)
    variant = Variant.of(fields)
    num_heads = getattr(flags, f"{side_of_attention(name)}_attention_heads")
    embed_dim = state[f"{name}.q_proj.weight"].size(1)

    assembly = Assembly()
    assembly.add_parts(variant, variant.sizes(num_heads, embed_dim))
    own = {key: state.pop(f"{name}.{key}") for key in assembly.state_dict()}
    assembly.load_state_dict(own)

    if assembly.feature_mixing is not None:
        tensors = {"output": [state[f"{name}.out_proj.weight"]]}
        for features, projection in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
            tensors[features] = [state[f"{name}.{projection}.weight"]]
            if f"{name}.{projection}.bias" in state:
                tensors[features].append(state[f"{name}.{projection}.bias"])
        assembly.feature_mixing.fold(tensors)

    # What feature mixing did is now in the projections. Any other part must do nothing.
    left_over = first_part_with_effect({option: getattr(assembly, option) for option in PARTS})
    if left_over:
        _refuse(file, flags, left_over, f" of {name}")


def _refuse(file: str, flags: Namespace, option: str, of_attention: str = "") -> NoReturn:
    flag = f"{option_name(option)} {getattr(flags, option)}"
    raise OptionError(
        f"{file}: {flag}{of_attention} cannot be folded, fairseq's attention has nothing that "
        "equals it"
    )


def _without_plugin(value: Any, names: dict[str, str]) -> Any:
    """Return a config without the plugin's flags and folder, and with fairseq's own names.

    Without the plugin torch refuses to load a Namespace. It loads an OrderedDict with attributes,
    which fairseq and CTranslate2 read as they read a Namespace.

    Args:
        value: the config, or a value in it
        names: fairseq's names of the architecture and of criterions, by those of the plugin
    """
    if isinstance(value, Namespace):
        flags = OrderedDict(_without_plugin(vars(value), names))
        vars(flags).update(flags)
        return flags
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, entry in value.items():
        if name not in PLUGIN_FLAGS:
            kept[name] = _without_plugin(entry, names)
    for name in ("arch", "_name", "criterion"):
        if name in kept and not isinstance(kept[name], dict):
            kept[name] = names.get(kept[name], kept[name])
    if "user_dir" in kept:
        kept["user_dir"] = None
    return kept
