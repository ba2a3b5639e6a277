"""Fold a model of the plugin into one of fairseq's own architecture: `mixhead fold`."""

from argparse import Namespace
from collections import OrderedDict
from typing import Any, NoReturn

from fairseq import models as known
from fairseq.criterions import CRITERION_REGISTRY
from torch import Tensor

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.fairseq import rewriting
from mixhead_plugin.fairseq.criterions.penalties import PENALTIES
from mixhead_plugin.fairseq.models.architectures import MODELS
from mixhead_plugin.fairseq.options import FAMILIES, OPTION_NAMES, AttentionOptions, model_name
from mixhead_plugin.parts import PARTS, Assembly, Variant, effective

PLUGIN_FLAGS = {*OPTION_NAMES, *(f"{name}_weight" for name in PENALTIES)}


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
    flags = cfg["model"] if isinstance(cfg["model"], Namespace) else Namespace(**cfg["model"])
    arch = str(model_name(flags))
    names = {f"orthogonal_{name}": name for name in CRITERION_REGISTRY}
    names[arch] = _fairseqs_name(file, arch)
    if arch in known.ARCH_CONFIG_REGISTRY and arch not in known.MODEL_DATACLASS_REGISTRY:
        # the config from a YAML file has only the values that differ
        known.ARCH_CONFIG_REGISTRY[arch](flags)
        cfg["model"] = flags
    flags = Namespace(**{**vars(AttentionOptions()), **vars(flags)})
    try:
        tensors = _folded(file, flags, dict(state["model"]))
    except OptionError:
        raise
    except Exception as error:  # a file that was made by hand fails in many ways
        text = " ".join(str(error).split())[:200]
        raise OptionError(
            f"{file}: its tensors are not those of --arch {arch} with its flags: {text}"
        ) from error
    cfg = _without_plugin(cfg, names)
    criterion = CRITERION_REGISTRY.get((cfg.get("criterion") or {}).get("_name"))
    for update in state["optimizer_history"]:
        if criterion is not None:  # one of another plugin keeps its name
            update["criterion_name"] = criterion.__name__
    rewriting.write(state, cfg, tensors, out)


def _fairseqs_name(file: str, arch: str) -> str:
    """Return fairseq's name of an architecture of the plugin.

    Or that of its model, for which the config has all values.
    """
    model = known.ARCH_MODEL_REGISTRY.get(arch, known.MODEL_REGISTRY.get(arch))
    name = ""
    for each, own in MODELS.items():
        if own is model:
            name = each
    fairseqs = known.MODEL_REGISTRY.get(name, ())
    # A model that fairseq lacks may be registered by this name, too.
    if fairseqs is model or not issubclass(model or object, fairseqs):
        raise OptionError(
            f"{file}: --arch {arch} cannot be folded, must be the plugin's of a model that fairseq "
            "has"
        )
    for family in FAMILIES:
        plain = arch.removeprefix(f"{family}_")
        if plain != arch and plain in known.ARCH_MODEL_REGISTRY:
            return plain
    return name


def _folded(file: str, flags: Namespace, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of fairseq's model.

    A part without which the outputs would change is refused.

    Args:
        file: the checkpoint, for messages
        flags: of the model, those of the plugin included
        state: the tensors of the model, which are changed
    """
    options = ["attention_normalizer", "relative_gain", "heads_per_layer"]
    for option, table in PARTS.items():
        if not table[getattr(flags, option)].parameters:  # nothing in `state` would show it
            options.append(option)
    for option in options:
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

    for name, parts in _parts_of(flags, state).items():
        _fold_attention(file, flags, state, name, parts)
    return state


def _parts_of(flags: Namespace, state: dict[str, Tensor]) -> dict[str, dict[str, str]]:
    """Return for each attention with parts in `state` their values, by option."""
    found: dict[str, dict[str, str]] = {}
    for option in PARTS:
        for key in state:
            name, dot, _ = key.partition(f".{option}.")
            if dot:
                found.setdefault(name, {})[option] = getattr(flags, option)
    return found


def _fold_attention(
    file: str, flags: Namespace, state: dict[str, Tensor], name: str, parts: dict[str, str]
) -> None:
    """Take the parts of one attention out of `state`, and multiply them into its projections."""
    side = "decoder" if "decoder" in name.split(".") else "encoder"
    heads = getattr(flags, f"{side}_attention_heads")
    embed_dim = state[f"{name}.q_proj.weight"].size(1)
    for option, value in list(parts.items()):
        for field in PARTS[option][value].options:
            parts[field] = getattr(flags, field)
    variant = Variant.of(parts)
    assembly = Assembly()
    assembly.add_parts(variant, variant.sizes(heads, embed_dim))
    own = {key: state.pop(f"{name}.{key}") for key in assembly.state_dict()}
    assembly.load_state_dict(own)

    if assembly.feature_mixing is not None:
        tensors = {"output": [state[f"{name}.out_proj.weight"]]}
        for part in ("query", "key", "value"):
            projection = f"{name}.{part[0]}_proj"
            tensors[part] = [state[f"{projection}.weight"]]
            if f"{projection}.bias" in state:
                tensors[part].append(state[f"{projection}.bias"])
        assembly.feature_mixing.fold(tensors)

    # What is left has to be without effect.
    option = effective({option: getattr(assembly, option) for option in PARTS})
    if option:
        _refuse(file, flags, option, f" of {name}")


def _refuse(file: str, flags: Namespace, option: str, where: str = "") -> NoReturn:
    flag = f"{option_name(option)} {getattr(flags, option)}"
    raise OptionError(
        f"{file}: {flag}{where} cannot be folded, fairseq's attention has nothing that equals it"
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
    plain = {}
    for name, entry in value.items():
        if name not in PLUGIN_FLAGS:
            plain[name] = _without_plugin(entry, names)
    for name in ("arch", "_name", "criterion"):
        if name in plain and not isinstance(plain[name], dict):
            plain[name] = names.get(plain[name], plain[name])
    if "user_dir" in plain:
        plain["user_dir"] = None
    return plain
