"""BERT for fairseq with the attention of mixhead_plugin, as `--user-dir examples/bert`.

Importing this in a process that has imported fairseq registers everything. Otherwise call `register`.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("mixhead_plugin") is None:
    sys.path.append(str(Path(__file__).resolve().parents[2]))


def register() -> None:
    """Register the plugin, BERT's architectures, tasks and criteria with fairseq."""
    import mixhead_plugin

    mixhead_plugin.register()
    from bert import criterions, model, pretraining_task, squad_task  # noqa: F401


class _SearchPath(list):
    """The package's `__path__`, which also registers.

    fairseq does not import a --user-dir that was imported before; it only asks if the folder is in `__path__`.
    """

    def __contains__(self, path: object) -> bool:
        if "fairseq" in sys.modules:
            register()
        return super().__contains__(path)


__path__ = _SearchPath(__path__)

if "fairseq" in sys.modules:
    register()
