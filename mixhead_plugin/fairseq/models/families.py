"""What all models of the plugin share: flags, checks, loading and names in every family.

Flags come to a model in several ways. Who calls which function, and when:

| when | what is called |
|---|---|
| a command reads its command line | `add_args`, then `_complete_and_check_command` |
| the same, with an architecture of the user's own | `add_args`, then `complete_own_architecture` |
| a YAML file has a model with a dataclass | `dataclass_for_yaml`, which has its defaults |
| a model is built from a YAML file whose name has no dataclass | `_complete_and_check_command` |
| a command or a program builds a model | `build_model` of its class, which calls `prepared` |
| a checkpoint is loaded | `load_state_dict`, which calls `check_checkpoint` |

Both `_complete_and_check_command` and `prepared` fill in what is missing, then check the flags. The
first changes its argument in place, as fairseq expects of it. `prepared` returns a flat copy.

So the flags of a command are checked twice. The first check is early: it refuses a command before
the data is read, and before fairseq starts a worker for each GPU. It sees all flags of the command,
and a check of one model may read the task among them. The second check also sees what a file or a
program gives, and what --model-overrides changes. What depends on the optimizer or the criterion is
checked when the trainer is made, see `check_training` in `fairseq/hooks.py`.
"""

from argparse import Namespace
from dataclasses import field, fields, make_dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    BaseFairseqModel,
    register_model,
    register_model_architecture,
)

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.checkpoint import check_checkpoint, pruned
from mixhead_plugin.fairseq.checks import check_flags
from mixhead_plugin.fairseq.config import fill_in, flat_copy, model_name
from mixhead_plugin.fairseq.options import FAMILIES, AttentionOptions
from mixhead_plugin.fairseq.plugin_model import PluginModel, Preset
from mixhead_plugin.fairseq.sites import SiteSizes

# The family of each registered model, by its name; a model that a user has registered has none.
FAMILY_OF_MODEL: dict[str, str] = {}


class FamilyModel(PluginModel, BaseFairseqModel):
    """A mixin before fairseq's model class.

    A model has one class for all families and architectures. It says where its attentions are; the
    checks of flags need no more of it.
    """

    config: ClassVar[type[AttentionOptions]]  # all flags of the model
    # Keys of FAMILIES. The family "" puts no prefix before a name and presets nothing; only models
    # that fairseq lacks have it, because fairseq's own names are taken.
    families: ClassVar[tuple[str, ...]] = tuple(FAMILIES)
    # True if fairseq configures the model by `config`, not by a Namespace.
    by_dataclass: ClassVar[bool] = False
    # The flags of the model's sizes; {side} is encoder or decoder.
    embed_flag: ClassVar[str] = "--{side}-embed-dim"
    heads_flag: ClassVar[str] = "--{side}-attention-heads"

    @classmethod
    def add_args(cls, parser: Any) -> None:
        # A flag that is not given must be missing, or its default would hide that of the family.
        gen_parser_from_dataclass(parser, cls.config(), delete_default=True, with_prefix="")

    @classmethod
    def site_sizes(
        cls, side: str, embed_dim: int, num_heads: int, layers: int | None = None
    ) -> SiteSizes:
        """Return the sizes of the attentions at one site.

        Args:
            side: "encoder" or "decoder"
            embed_dim: the size of the attentions' query input
            num_heads: H, the number of source heads
            layers: how many layers there are; None for a model without --heads-per-layer
        """
        return SiteSizes(
            embed_flag=cls.embed_flag.format(side=side),
            embed_dim=embed_dim,
            heads_flag=cls.heads_flag.format(side=side),
            num_heads=num_heads,
            layers=layers,
        )

    @classmethod
    def attention_sites(cls, args: Any) -> dict[str, SiteSizes]:
        """Return the attentions of the model that the complete `args` describe, by site."""
        raise NotImplementedError

    @classmethod
    def check_args(cls, args: Any) -> None:
        """Refuse complete `args` that cannot work; see `check_flags`."""
        check_flags(args, cls.attention_sites(args))

    @classmethod
    def complete_own_architecture(cls, args: Any) -> None:
        """Give an architecture of the user's own the family of its model; see `fairseq/hooks.py`.

        Args:
            args: the flags of a command, changed in place
        """
        if args.arch in cls.presets:
            return  # the function of an architecture of the plugin has done it
        _leave_tpu_out(args)
        if cls.by_dataclass and ARCH_MODEL_NAME_REGISTRY[args.arch] not in cls.presets:
            return  # the user's own model, too: the defaults of its own dataclass count
        fill_in(args, _family_of(args.arch))

    @classmethod
    def dataclass_for_yaml(
        cls, dataclass: type[AttentionOptions], name: str
    ) -> type[AttentionOptions]:
        """Return the dataclass with the defaults of an architecture; see `fairseq/hooks.py`.

        Args:
            dataclass: that of the architecture's model, which an architecture of the user's own
                keeps
            name: the name of the architecture
        """
        if name not in cls.presets:
            return dataclass
        family = _family_of(name)
        return _dataclass_with_defaults(cls, name, family, cls.presets[name], base=dataclass)

    @classmethod
    def prepared(cls, args: Any) -> Any:
        """Return a copy of the flags of `build_model` that is flat, filled in and checked."""
        args = flat_copy(args)
        fill_in(args, _family_of(model_name(args)))
        cls.check_args(args)
        return args

    def check_training(self, cfg: Any, criterion: Any) -> None:
        """Refuse what cannot train the model, before a training; see `fairseq/hooks.py`.

        Args:
            cfg: the whole config of the training
            criterion: what will read the outputs of the model
        """
        # With it, the trainer calls the `load_state_dict` of fairscale in place of this class's. A
        # checkpoint with other flags would load in silence, and that of fairseq's own model would
        # not load, because nothing adds the parts that it lacks.
        if cfg.distributed_training.ddp_backend == "fully_sharded":
            raise OptionError(
                "--ddp-backend fully_sharded: must be another, as pytorch_ddp, because it loads "
                "checkpoints without the checks of the plugin"
            )

    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        strict: bool = True,
        model_cfg: Any = None,
        args: Any = None,
    ) -> Any:
        state_dict = pruned(state_dict, model_cfg)
        self.check_checkpoint(state_dict)
        return super().load_state_dict(state_dict, strict, model_cfg, args)

    def check_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Refuse the tensors of a model with other flags; see `checkpoint.check_checkpoint`."""
        check_checkpoint(self, state_dict)


def _family_of(name: str | None) -> str:
    """Return the family of an architecture or a model, "" for one without a family."""
    if name is None:
        return ""
    # An architecture of one's own may have any name, but its model has that of a family.
    model = ARCH_MODEL_NAME_REGISTRY.get(name, name)
    return FAMILY_OF_MODEL.get(model, "")


def register_families(
    model: type[FamilyModel], name: str, architectures: dict[str, Preset]
) -> None:
    """Register a model and its architectures in every family, as `<family>_<name>`.

    Args:
        model: the class
        name: the model's name without the family
        architectures: a preset for each name without the family. For a model that is configured by
            dataclass, `name` is one of them: fairseq takes it for an architecture, too.
    """
    for family in model.families:
        prefix = f"{family}_" if family else ""
        full_name = f"{prefix}{name}"
        _register_model(model, full_name, family, architectures.get(name))
        for arch, architecture in architectures.items():
            _register_architecture(model, full_name, f"{prefix}{arch}", family, architecture)
    _restore_config(model)


def _register_model(
    model: type[FamilyModel], full_name: str, family: str, architecture: Preset | None
) -> None:
    """Register a model in one family.

    Args:
        model: the class
        full_name: the model's name with the family
        family: a key of FAMILIES, or ""
        architecture: sets the defaults of the dataclass, for a model that is configured by one
    """
    FAMILY_OF_MODEL[full_name] = family
    if not model.by_dataclass:
        register_model(full_name)(model)
        return
    assert architecture is not None
    dataclass = _dataclass_with_defaults(model, full_name, family, architecture, base=model.config)
    register_model(full_name, dataclass=dataclass)(model)


def _register_architecture(
    model: type[FamilyModel], model_name: str, full_name: str, family: str, architecture: Preset
) -> None:
    """Register an architecture in one family.

    Args:
        model: the class
        model_name: the model's name with the family
        full_name: the architecture's name with the family
        family: a key of FAMILIES, or ""
        architecture: sets the missing sizes
    """
    model.presets[full_name] = architecture
    prepare = partial(_complete_and_check_command, model, family, architecture)
    if model.by_dataclass and full_name == model_name:
        # With a dataclass, `register_model` has registered an architecture of this name, which does
        # nothing. A second one of the same name would be refused.
        ARCH_CONFIG_REGISTRY[full_name] = prepare
    else:
        register_model_architecture(model_name, full_name)(prepare)


def _restore_config(model: type[FamilyModel]) -> None:
    """Give a model its own config back.

    `register_model` stored the config of the last family here; fairseq reads a command's defaults
    from it.
    """
    setattr(model, "__dataclass", model.config if model.by_dataclass else None)


def _complete_and_check_command(
    model: type[FamilyModel], family: str, architecture: Preset, args: Any
) -> None:
    """Fill in and check the flags of an architecture, which are changed in place.

    fairseq calls this for the flags of a command, and for YAML without a dataclass.

    Args:
        model: the class of the architecture's models
        family: a key of FAMILIES, or ""
        architecture: sets the missing sizes
        args: the flags of the command
    """
    architecture(args)
    fill_in(args, family)
    model.check_args(args)
    _leave_tpu_out(args)


def _leave_tpu_out(args: Any) -> None:
    """Take back that --bf16 asks for a TPU, where torch has no support for one.

    fairseq sets `tpu` for every --bf16. This is no repair, because it is for the plugin's models
    alone: the flags of others stay as fairseq sets them.
    """
    if getattr(args, "bf16", False) and find_spec("torch_xla") is None:
        args.tpu = False


def _dataclass_with_defaults(
    model: type[FamilyModel],
    name: str,
    family: str,
    architecture: Preset,
    *,
    base: type[AttentionOptions],
) -> type[AttentionOptions]:
    """Return a dataclass with the defaults of an architecture.

    Args:
        model: the class, whose `config` has all its flags
        name: the name of the new dataclass
        family: a key of FAMILIES, or ""
        architecture: sets the defaults of the dataclass
        base: its base class, the model's `config` or a subclass of it
    """
    values = Namespace()
    architecture(values)
    defaults = {**FAMILIES.get(family, {}), **vars(values)}
    changed = []
    for each in fields(model.config):
        if each.name not in defaults:
            continue
        # A reference such as ${task.add_bos_token}: the task fills these.
        if str(each.default).startswith("${"):
            continue
        value = defaults[each.name]
        # --base-shuffle is an int, its preset is False.
        if value is False and type(each.default) is int:
            value = 0
        changed.append((each.name, each.type, field(default=value, metadata=each.metadata)))
    # A class of its own, because fairseq reads the defaults of the class.
    return make_dataclass(name, changed, bases=(base,))
