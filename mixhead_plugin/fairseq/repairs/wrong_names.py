"""Answer an unknown architecture, task, criterion, ... or field in one line, with near names.

fairseq answers an unknown --arch with all names that it knows, in 23,000 characters, and so it does
in a YAML file and for a checkpoint of another --user-dir. A field of a YAML file that its part does
not have ends in a traceback. This repair acts once the --user-dir is imported. Before that,
fairseq-hydra-train checks the parts that are fairseq's own, such as `task: {_name: translation}`: a
wrong field of those still ends in fairseq's traceback.
"""

import difflib
from collections.abc import Callable, Collection, KeysView
from typing import Any

from fairseq import checkpoint_utils, criterions, models, optim, options, tasks
from fairseq.dataclass import utils as dataclass_utils
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.optim import lr_scheduler
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from mixhead_plugin.errors import OptionError, option_name, unknown_field
from mixhead_plugin.fairseq.fairseq_examples import TruncatedBPTTLMTask
from mixhead_plugin.fairseq.options import FAMILIES
from mixhead_plugin.fairseq.replace import replaces


@replaces(options, "add_model_args")
def _add_model_args(original, parser):
    group = original(parser)
    for action in group._group_actions:
        if action.dest == "arch":
            action.choices = _Known(ARCH_MODEL_REGISTRY)
    return group


class _Known(KeysView):
    """The choices of --arch, which answer an unknown name in our words when argparse looks it up.

    A view, because a --user-dir that is imported later adds names.
    """

    def __contains__(self, name: object) -> bool:
        if name not in ARCH_MODEL_REGISTRY:
            _refuse_missing_examples("arch", str(name))
            near = " or ".join(_near_architectures(str(name), ARCH_MODEL_REGISTRY))
            near = near or "mixhead_transformer"
            raise OptionError(f"--arch {name}: unknown; did you mean {near}?")
        return True


def _near_architectures(name: str, known: Collection[str]) -> list[str]:
    """Return the names of `known` that somebody may have meant by another name, at most three.

    A model may have other families than the one that was asked for: there is no mixhead_gau_lm. By
    its letters this name is nearer to other models of the family than to gau_lm in those that it
    has.
    """
    for family in FAMILIES:
        own_name = name.removeprefix(f"{family}_")
        in_families = [f"{other}_{own_name}" for other in FAMILIES]
        same_model = [each for each in in_families if each in known]
        if own_name != name and same_model:
            return [own_name, *same_model][:3]
    return difflib.get_close_matches(name, known)


def _refuse_missing_examples(option: str, name: str) -> None:
    """Refuse an unknown name that exists where fairseq has its examples."""
    is_there = TruncatedBPTTLMTask is not None
    if not is_there and ("transformer_xl" in name or name == "truncated_bptt_lm"):
        raise OptionError(f"{option_name(option)} {name}: needs a fairseq with its examples")


# By flag, the names that are registered; another --user-dir may add to them.
REGISTERED: dict[str, Callable[[], Collection[str]]] = {
    "arch": lambda: {**ARCH_MODEL_REGISTRY, **MODEL_REGISTRY},
    "task": lambda: tasks.TASK_REGISTRY,
    "criterion": lambda: criterions.CRITERION_REGISTRY,
    "optimizer": lambda: optim.OPTIMIZER_REGISTRY,
    "lr_scheduler": lambda: lr_scheduler.LR_SCHEDULER_REGISTRY,
}


def _refuse_unknown(option: str, name: Any) -> None:
    """Refuse a name in a config, of a YAML file or a checkpoint, that nobody has registered."""
    known = REGISTERED[option]()
    if isinstance(name, str) and name not in known:
        _refuse_missing_examples(option, name)
        if option == "arch":
            near = _near_architectures(name, known)
        else:
            near = difflib.get_close_matches(name, known, 2)
        question = f"did you mean {' or '.join(near)}, or " if near else "must be a known name; "
        raise OptionError(
            f"{option_name(option)} {name}: unknown; {question}does it need another --user-dir?"
        )


def _name(cfg: Any, option: str) -> Any:
    """Return the name in a part of the config.

    It is `_name` in YAML, and the value of the flag `option` in the flags of a command. fairseq's
    registries also take the name alone.
    """
    if isinstance(cfg, str):
        return cfg
    return getattr(cfg, "_name", None) or getattr(cfg, option, None)


@replaces(models, "build_model")
def _build_model(original, cfg: Any, *args: Any, **kwargs: Any) -> Any:
    name = _name(cfg, "arch")
    # A config of one field may have the architecture's name as that of the field.
    if name is None and OmegaConf.is_config(cfg) and len(cfg) > 1:
        raise OptionError("model._name: missing; must be an architecture like mixhead_transformer")
    _refuse_unknown("arch", name)
    return original(cfg, *args, **kwargs)


@replaces(tasks, "setup_task")
def _setup_task(original, cfg: Any, **kwargs: Any) -> Any:
    _refuse_unknown("task", getattr(cfg, "task", None) or getattr(cfg, "_name", None))
    return original(cfg, **kwargs)


@replaces(criterions, "build_criterion")
def _build_criterion(original, cfg: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse_unknown("criterion", _name(cfg, "criterion"))
    return original(cfg, *args, **kwargs)


@replaces(optim, "build_optimizer")
def _build_optimizer(original, cfg: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse_unknown("optimizer", _name(cfg, "optimizer"))
    return original(cfg, *args, **kwargs)


@replaces(lr_scheduler, "build_lr_scheduler")
def _build_lr_scheduler(original, cfg: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse_unknown("lr_scheduler", _name(cfg, "lr_scheduler"))
    return original(cfg, *args, **kwargs)


# For checkpoints that have flags instead of a config.
@replaces(checkpoint_utils, "convert_namespace_to_omegaconf")
def _convert(original, args: Any) -> Any:
    for option in REGISTERED:
        _refuse_unknown(option, getattr(args, option, None))
    return original(args)


# A training calls it for each part of its config.
@replaces(dataclass_utils, "merge_with_parent")
def _merge(original, dc: Any, cfg: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(dc, cfg, *args, **kwargs)
    except (ConfigKeyError, ConfigAttributeError) as error:
        part = cfg._key() or ""
        names = OmegaConf.structured(dc).keys()
        raise OptionError(unknown_field(part, error.full_key or str(error.key), names)) from error
    except OmegaConfBaseException as error:
        part = cfg._key() or ""
        raise OptionError(f"{part}.{error.full_key}: {str(error).splitlines()[0]}") from error
