"""BERT for fairseq with the attention of mixhead_plugin, as `--user-dir examples/bert`.

A program that uses fairseq's API calls `bert.register()`.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("mixhead_plugin") is None:
    # behind all others, because fairseq loads this package into a user's program
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import mixhead_plugin


def register() -> None:
    """Register the plugin, BERT's architectures, tasks and criteria; repair fairseq."""
    mixhead_plugin.register()
    from bert import criterions, model, pretraining_task, squad_task  # noqa: F401 (each registers its names)


__path__ = mixhead_plugin.UserDir(__path__, register)
__path__.register_if_asked()
