"""What all models of the plugin share: flags, checks, loading and names in every family.

Flags come to a model in several ways. Who calls which function, and when:

| when | what is called |
|---|---|
| a command reads its command line | `add_args`, then `_prepare_command` |
| a YAML file has a model with a dataclass | its defaults come from `_config` |
| a YAML file has a model without one | `_prepare_command`, when the model is built |
| a command or a program builds a model | `build_model` of its class, which calls `prepared` |
| a checkpoint is loaded | `load_state_dict`, which calls `check_checkpoint` |

| function | flat | filled in | checked | changes its argument |
|---|---|---|---|---|
| `_prepare_command` | is flat already | yes | yes | yes |
| `prepared` | yes | yes | yes | a Namespace, not a DictConfig |

The flags of a command are checked twice, because each check is the only one that some flags get.
`_prepare_command` alone sees those of the task and of the optimizer beside the model's. It also
refuses a command at once: before the data is read, and before fairseq starts a worker for each GPU.
`prepared` alone sees what a file or a program gives, and what --model-overrides changes.
"""

from argparse import Namespace
from collections.abc import Callable
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

from mixhead_plugin.fairseq.checkpoint import check_checkpoint
from mixhead_plugin.fairseq.checks import check_flags
from mixhead_plugin.fairseq.config import as_namespace, fill_in, model_name
from mixhead_plugin.fairseq.options import FAMILIES, AttentionOptions
from mixhead_plugin.fairseq.sites import SiteSizes

# Sets the missing values of its argument, a Namespace or DictConfig, to those of an architecture.
Preset = Callable[[Any], None]


class FamilyModel(BaseFairseqModel):
    """A mixin before fairseq's model class.

    A model has one class for all families and architectures. It says where its attentions are; the
    checks of flags need no more of it.
    """

    config: ClassVar[type[AttentionOptions]]  # all flags of the model
    # Keys of FAMILIES. The family "" puts no prefix before a name and presets nothing; only models
    # that fairseq lacks have it, because fairseq's own names are taken.
    families: ClassVar[tuple[str, ...]] = tuple(FAMILIES)
    # Those of all models, in one dict for all subclasses, by names with the family.
    presets: ClassVar[dict[str, Preset]] = {}
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
            embed_dim: size of its query input
            num_heads: of source heads
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
    def prepared(cls, args: Any) -> Any:
        """Return the flags that fairseq gives to `build_model`, flat, filled in and checked."""
        args = as_namespace(args)
        fill_in(args, _family_of(model_name(args)))
        cls.check_args(args)
        return args

    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        strict: bool = True,
        model_cfg: Any = None,
        args: Any = None,
    ) -> Any:
        self.check_checkpoint(state_dict)
        return super().load_state_dict(state_dict, strict, model_cfg, args)

    def check_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Refuse the tensors of a model with other flags; see `checkpoint.check_checkpoint`."""
        check_checkpoint(self, state_dict)


def _family_of(name: str | None) -> str:
    """Return the family of an architecture or a model, an empty string for one without a family."""
    if name is None:
        return ""
    # An architecture of one's own may have any name, but its model has that of a family.
    registered = ARCH_MODEL_NAME_REGISTRY.get(name, name)
    for family in FAMILIES:
        if registered.startswith(f"{family}_"):
            return family
    return ""


def register_families(
    model: type[FamilyModel], name: str, architectures: dict[str, Preset]
) -> None:
    """Register a model and its architectures in every family, as `<family>_<name>`.

    Args:
        model: the class
        name: its name without the family
        architectures: their presets, by names without the family. For a model that is configured by
            dataclass, `name` is one of them.
    """
    for family in model.families:
        prefix = f"{family}_" if family else ""
        full_name = f"{prefix}{name}"
        config = None
        if model.by_dataclass:
            config = _config(model, full_name, family, architectures[name])
        register_model(full_name, dataclass=config)(model)

        for arch, architecture in architectures.items():
            full_arch = f"{prefix}{arch}"
            model.presets[full_arch] = architecture
            prepare = partial(_prepare_command, model, family, architecture)
            if model.by_dataclass and arch == name:
                # With a dataclass, `register_model` has registered one that does nothing.
                ARCH_CONFIG_REGISTRY[full_arch] = prepare
            else:
                register_model_architecture(full_name, full_arch)(prepare)

    # fairseq takes a command's defaults from this attribute, where register_model left the config
    # of the last family.
    setattr(model, "__dataclass", model.config if model.by_dataclass else None)


def _prepare_command(
    model: type[FamilyModel], family: str, architecture: Preset, args: Any
) -> None:
    """Fill in and check the flags of an architecture, which are changed in place.

    fairseq calls this for the flags of a command, and for YAML without a dataclass.

    Args:
        model: the class that the architecture is of
        family: a key of FAMILIES, or ""
        architecture: sets the missing sizes
        args: the flags of the command
    """
    architecture(args)
    fill_in(args, family)
    model.check_args(args)
    if getattr(args, "bf16", False) and find_spec("torch_xla") is None:
        # fairseq treats --bf16 as a request for a TPU; this undoes it for the plugin's models alone
        args.tpu = False


def _config(
    model: type[FamilyModel], name: str, family: str, architecture: Preset
) -> type[AttentionOptions]:
    """Return the dataclass for YAML files: the model's, with the defaults of an architecture.

    Args:
        model: the class, whose `config` is the base
        name: of the new dataclass
        family: a key of FAMILIES, or ""
        architecture: sets its defaults
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
    return make_dataclass(name, changed, bases=(model.config,))
