"""What all models of the plugin share: the check of flags and checkpoints, and their names in fairseq."""

import os
import re
import sys
from dataclasses import field, fields, make_dataclass
from importlib.util import find_spec
from typing import Any, Callable, ClassVar, Dict, Mapping, Optional, Type

from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_INV_REGISTRY,
    MODEL_REGISTRY,
    BaseFairseqModel,
    register_model,
    register_model_architecture,
)

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.models.stock_flags import check_stock_flags, check_training_flags
from mixhead_plugin.modules.checkpoint import check_checkpoint
from mixhead_plugin.options import FAMILIES, AttentionOptions, AttentionShape, check, complete, parse_heads_per_layer


class FamilyModel(BaseFairseqModel):
    """Mixin before a stock model class."""

    family: ClassVar[str]  # a key of FAMILIES; set by `register_families`
    # What the stock model calls the size of its states and the number of its heads; {side} is encoder or decoder.
    embed_flag: ClassVar[str] = "--{side}-embed-dim"
    heads_flag: ClassVar[str] = "--{side}-attention-heads"

    @classmethod
    def shape(cls, side: str, embed_dim: int, num_heads: int, layers: Optional[int] = None) -> AttentionShape:
        embed_flag, heads_flag = (flag.format(side=side) for flag in (cls.embed_flag, cls.heads_flag))
        return AttentionShape(embed_flag, embed_dim, heads_flag, num_heads, layers)

    @classmethod
    def options_of(cls, args: Any) -> AttentionOptions:
        """The model's config, which is an AttentionOptions, from flat `args`; values that `args` lack are defaults."""
        raise NotImplementedError

    @classmethod
    def attention_shapes(cls, args: Any) -> Dict[str, AttentionShape]:
        """The attentions that the model built from the completed `args` would have, by place."""
        raise NotImplementedError

    @classmethod
    def check_args(cls, args: Any) -> None:
        """Complete `args` with the family's presets and refuse what cannot work; see `options.check`."""
        complete(args, cls.family)
        check_stock_flags(args)
        shapes = cls.attention_shapes(args)
        options = cls.options_of(args)
        check(options, cls.family, shapes, scale_heads=bool(getattr(args, "scale_heads", False)))
        if args.mixing_lr_scale != 1 and (obstacle := _obstacle_to_own_learning_rate(args)):
            raise OptionError(f"--mixing-lr-scale {args.mixing_lr_scale}: {obstacle}")
        _check_quantisation(args, {site: shape for site, shape in shapes.items() if options.covers(site)})
        if args.attention_impl == "triton" and getattr(args, "cpu", False):
            raise OptionError("--attention-impl triton: needs a GPU, --cpu takes none; must be auto, or --cpu left out")
        for side in ("encoder", "decoder"):
            if getattr(args, f"{side}_xformers_att_config", None) is not None:
                raise OptionError(
                    f"--{side}-xformers-att-config {getattr(args, f'{side}_xformers_att_config')}: "
                    "must be left out, the plugin computes the attention itself"
                )

    def load_state_dict(
        self, state_dict: Dict[str, Any], strict: bool = True, model_cfg: Any = None, args: Any = None
    ) -> Any:
        check_checkpoint(self, state_dict)
        prune_each_side_once(model_cfg if args is None else args, state_dict, self.state_dict())
        return super().load_state_dict(state_dict, strict, model_cfg, args)


def prune_each_side_once(cfg: Any, state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Let fairseq prune a checkpoint by --*-layers-to-keep where that is still to be done; changes `cfg` in place.

    The flags also stand in checkpoints of models that were trained with fewer layers from the start, of which fairseq
    would take layers away again. And where one side alone is to be pruned, it would drop all layers of the other.

    Args:
        cfg: flags of the model; None or without those, nothing happens
        state: the checkpoint
        own: the state of the model that it is for
    """
    sides = [side for side in ("encoder", "decoder") if getattr(cfg, f"{side}_layers_to_keep", None)]
    layers = {side: [_layers(tensors, side) for tensors in (state, own)] for side in ("encoder", "decoder")}
    unpruned = [side for side in sides if layers[side][0] > layers[side][1]]
    for side, (found, _) in layers.items():
        if side in sides and not unpruned:
            setattr(cfg, f"{side}_layers_to_keep", None)
        elif unpruned and side not in unpruned and found:
            setattr(cfg, f"{side}_layers_to_keep", ",".join(map(str, range(found))))


def _layers(state: Mapping[str, Any], side: str) -> int:
    """The number of layers of the encoder or the decoder, by the names of their tensors."""
    return len({found[1] for name in state if (found := re.match(rf"{side}.*?\.layers\.(\d+)\.", name))})


def _check_quantisation(args: Any, shapes: Dict[str, AttentionShape]) -> None:
    """Quantisation noise needs whole blocks of input features; out_proj has heads * head size of them."""
    block = getattr(args, "quant_noise_pq_block_size", 8)
    if not getattr(args, "quant_noise_pq", 0) or args.head_dim is None:
        return
    per_layer = parse_heads_per_layer(args.heads_per_layer)
    for site, shape in shapes.items():
        for _, heads in per_layer.get(site, [(shape.num_heads, shape.num_heads)]):
            if heads * args.head_dim % block != 0:
                raise OptionError(
                    f"--head-dim {args.head_dim}: {heads} heads of it are no multiple of --quant-noise-pq-block-size "
                    f"{block}"
                )


def _obstacle_to_own_learning_rate(args: Any) -> str:
    """Why the mixing could not have a learning rate of its own; empty if it can."""
    for precision in ("fp16", "bf16"):
        if getattr(args, f"memory_efficient_{precision}", False):
            flags = f"--{precision} --fp16-no-flatten-grads" if precision == "fp16" else f"--{precision}"
            return f"needs {flags} instead of --memory-efficient-{precision}, which rounds small steps away"
    if getattr(args, "fp16", False) and not getattr(args, "fp16_no_flatten_grads", False):
        return "with --fp16 needs --fp16-no-flatten-grads, otherwise all parameters are one to the optimizer"
    for name, value in (("ddp_backend", "fully_sharded"), ("zero_sharding", "os"), ("optimizer", "composite")):
        if getattr(args, name, None) == value:
            return f"needs another {option_name(name)} than {value}, which arranges the parameters in its own way"
    return ""


def is_training_command() -> bool:
    """Whether this is fairseq-train. Elsewhere the flags of a training are those of another day and machine."""
    folder, program = os.path.abspath(sys.argv[0]).split(os.sep)[-2:]
    return program.startswith("fairseq-train") or (folder, program) == ("fairseq_cli", "train.py")


def check_data(args: Any) -> None:
    """Refuse a data folder that is not there or was not prepared, where fairseq would fail later and vaguely.

    Only for what was typed on the line of a command of fairseq's: a checkpoint names the data of another day and
    machine.
    """
    data = getattr(args, "data", None)
    command = os.path.abspath(sys.argv[0]).split(os.sep)[-2:]
    if not any(part.startswith("fairseq") for part in command) or data not in sys.argv or "://" in data:
        return
    subsets = [args.train_subset] if getattr(args, "train_subset", None) else []
    valid = "" if getattr(args, "disable_validation", False) else getattr(args, "valid_subset", None) or ""
    # the first folder has the dictionary and all sets, the others are further shards of the training set
    prefixes = ["dict", *subsets, *filter(None, valid.split(","))]
    for path in data.split(os.pathsep):
        if not os.path.isdir(path):
            raise OptionError(f"data {path}: no such folder")
        # tasks of several inputs, such as sentence_prediction, keep each in a folder of its own
        folders = [path, *(entry.path for entry in os.scandir(path) if entry.is_dir())]
        names = [name for folder in folders for name in os.listdir(folder)]
        for prefix in prefixes:
            if not any(name.startswith(f"{prefix}.") for name in names):
                raise OptionError(f"data {path}: has no {prefix}.* file; run fairseq-preprocess first")
        prefixes = subsets


def family_config(base: type, family: str) -> type:
    """The config `base` with the presets of the family as defaults, for `model._name` in YAML files."""
    presets = [
        (f.name, f.type, field(default=FAMILIES[family][f.name], metadata=f.metadata))
        for f in fields(AttentionOptions)
        if f.name in FAMILIES[family]
    ]
    name = f"{family.capitalize()}{base.__name__}"
    config = make_dataclass(name, presets, bases=(base,), namespace={"__module__": base.__module__})
    setattr(sys.modules[base.__module__], name, config)  # where pickle looks for it
    return config


def register_families(
    base: Type[FamilyModel],
    stock: str,
    config: Optional[Callable[[str], type]] = None,
    architectures: Optional[Dict[str, Callable[[Any], None]]] = None,
) -> Dict[str, Type[FamilyModel]]:
    """Register `base` and every architecture of the stock model `stock` once per family, as `<family>_<stock name>`.

    Args:
        base: the model
        stock: the name of fairseq's model
        config: makes the dataclass of a family, for a model that fairseq configures by dataclass
        architectures: by name, where fairseq has no model `stock` that has them

    Returns:
        the registered classes by family
    """
    if architectures is None:
        architectures = {arch: ARCH_CONFIG_REGISTRY[arch] for arch in ARCH_MODEL_INV_REGISTRY[stock]}
    models = {}
    for family in FAMILIES:
        name = f"{family}_{stock}"
        model = _derive(f"{family.capitalize()}{base.__name__}", base, family=family)
        register_model(name, dataclass=config(family) if config else None)(model)
        for stock_arch, architecture in architectures.items():
            _register(model, name, f"{family}_{stock_arch}", architecture)
        models[family] = model
    return models


def register_architecture(
    name: str, stock: str, architecture: Callable[[Any], None], config: Optional[Callable[[str], type]] = None
) -> None:
    """Register an architecture that fairseq lacks once per family, as `<family>_<name>`.

    Args:
        name: what follows the family
        stock: the name of fairseq's model, known to `register_families`
        architecture: gives the flags that its argument, a Namespace or DictConfig, lacks their values
        config: makes the dataclass of a family, for a model that fairseq configures by dataclass: a YAML file then gets
            its defaults, where fairseq takes those of the model for every architecture
    """
    for family in FAMILIES:
        arch, model_name = f"{family}_{name}", f"{family}_{stock}"
        model = MODEL_REGISTRY[model_name]
        if config:
            model_name = arch
            model = _derive("".join(part.capitalize() for part in arch.split("_")), model)
            register_model(model_name, dataclass=config(family))(model)
        _register(model, model_name, arch, architecture)


def _derive(name: str, base: Type[FamilyModel], **attributes: Any) -> Type[FamilyModel]:
    """A subclass in the module of `base`."""
    model = type(name, (base,), {**attributes, "__module__": base.__module__})
    setattr(sys.modules[base.__module__], name, model)  # where pickle looks for it
    return model


def _register(model: Type[FamilyModel], name: str, arch: str, architecture: Callable[[Any], None]) -> None:
    """Register `arch` of the `model` that is called `name`."""
    function = _architecture(model, architecture)
    if arch in ARCH_CONFIG_REGISTRY:
        # fairseq registered a no-op for a dataclass model's own name; ours also checks, on the command line
        ARCH_CONFIG_REGISTRY[arch] = function
    else:
        register_model_architecture(name, arch)(function)


def _architecture(model: Type[FamilyModel], stock_architecture: Callable[[Any], None]) -> Callable[[Any], None]:
    def architecture(args: Any) -> None:
        stock_architecture(args)
        model.check_args(args)
        if is_training_command():
            check_training_flags(args, model.options_of(args))
        check_data(args)
        # fairseq takes --bf16 for a request to train on a TPU
        if getattr(args, "bf16", False) and find_spec("torch_xla") is None:
            args.tpu = False

    return architecture
