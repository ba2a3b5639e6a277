"""What the tests of the recipes share: scripts run as users run them, and fairseq's own parsers."""

import argparse
import fcntl
import os
import shlex
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import hydra
from fairseq import checkpoint_utils, options
from fairseq.dataclass.initialize import add_defaults, hydra_init
from fairseq.dataclass.utils import convert_namespace_to_omegaconf, merge_with_parent
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq_cli.train import cli_main as fairseq_train
from omegaconf import OmegaConf

import mixhead_plugin

mixhead_plugin.register()

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PLUGIN = ROOT / "mixhead_plugin"
PARSERS = {
    "fairseq-train": options.get_training_parser,
    "fairseq-eval-lm": options.get_eval_lm_parser,
    "fairseq-generate": options.get_generation_parser,
    "fairseq-interactive": lambda: options.get_generation_parser(interactive=True),
    "fairseq-validate": options.get_validation_parser,
}


def script(line, check=True, cwd=ROOT, timeout=300, **environment):
    """Run a line of shell with more variables in its environment; the finished process, its output as text."""
    environment = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    result = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, cwd=cwd, env=environment, timeout=timeout
    )
    assert not check or result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result


def wait_until_unlocked(path, timeout=20):
    """Until nobody holds the lock on a file; what was killed does so for a moment after its pipes have ended."""
    deadline = time.monotonic() + timeout
    with path.open() as file:
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                assert time.monotonic() < deadline, path
                time.sleep(0.02)


def dry_run(line, **environment):
    """fairseq's commands, each a list of words, that a line of shell would run."""
    output = script(line, DRY_RUN=1, **environment).stdout
    commands = [shlex.split(command) for command in output.splitlines() if command.startswith("fairseq-")]
    assert commands, line
    return commands


def train_here(command, monkeypatch):
    """Run train.sh's command in this process, which has imported everything."""
    # fairseq remembers the best checkpoint of a process, and would write none that is worse than another training's
    monkeypatch.delattr(checkpoint_utils.save_checkpoint, "best", raising=False)
    monkeypatch.setattr(sys, "argv", command)
    fairseq_train()


def parse(command):
    """The namespace that fairseq makes of a command; a flag or value that it does not know ends in SystemExit."""
    parser = PARSERS[Path(command[0]).name]()
    return options.parse_args_and_arch(parser, input_args=command[1:])


def from_yaml(path, *overrides):
    """What fairseq-hydra-train makes of a file."""
    hydra_init(path.stem)
    with hydra.initialize_config_dir(config_dir=str(path.parent), version_base="1.1"):
        cfg = hydra.compose(path.stem, overrides=[f"common.user_dir={PLUGIN}", *overrides])
    add_defaults(cfg)
    return cfg


GROUPS = ("common", "task", "criterion", "optimizer", "lr_scheduler", "optimization", "dataset", "checkpoint")


def differences(command, path, *overrides):
    """Every value that fairseq takes otherwise from a file than from a command, {name: (file's, command's)}.

    Of distributed training, what does not depend on how the processes are started. White space says nothing.
    """
    typed, written = convert_namespace_to_omegaconf(parse(command)), from_yaml(path, *overrides)
    found = {}
    for group in GROUPS:
        values = [OmegaConf.to_container(cfg[group], resolve=True, enum_to_str=True) for cfg in (written, typed)]
        for name in values[0].keys() | values[1].keys():
            # the file also has the fields of the group's dataclass that are no flags, such as a schedule's lr
            if name in values[1] or group not in ("optimizer", "lr_scheduler"):
                found[f"{group}.{name}"] = tuple(value.get(name) for value in values)
    for name in ("ddp_backend", "distributed_world_size"):
        found[name] = tuple(cfg.distributed_training[name] for cfg in (written, typed))
    models = [_model(cfg) for cfg in (written, typed)]
    for name in models[0].keys() | models[1].keys():
        found[f"model.{name}"] = tuple(model.get(name) for model in models)
    return {name: pair for name, pair in found.items() if len({str(value).replace(" ", "") for value in pair}) > 1}


def _model(cfg):
    """Its flags and their values, those that the architecture sets included, as fairseq's build_model makes them."""
    values = dict(cfg.model if OmegaConf.is_config(cfg.model) else vars(cfg.model))
    name = values.get("_name") or values["arch"]
    if name in MODEL_DATACLASS_REGISTRY:
        model = MODEL_DATACLASS_REGISTRY[name]()
        if OmegaConf.is_config(cfg.model):
            cfg.model = merge_with_parent(model, cfg.model)  # in its place, or it could not look into other groups
            values = cfg.model
        args = argparse.Namespace(**{field.name: values[field.name] for field in fields(model)})
        ARCH_MODEL_REGISTRY[name].check_args(args)  # on the command line it is done already; completes --head-dim
        return vars(args)
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    ARCH_MODEL_REGISTRY[name].add_args(parser)
    flags = {action.dest for action in parser._actions} - {"help"}
    namespace = argparse.Namespace(**values)
    ARCH_CONFIG_REGISTRY[name](namespace)
    return {"_name": name, **{flag: value for flag, value in vars(namespace).items() if flag in flags}}


def refusal(result):
    """The one line in which a script refused what the user wants."""
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    (line,) = (line for line in result.stderr.splitlines() if ": error: " in line)
    return line
