"""Say in one line which architecture, dictionary or set does not exist.

fairseq answers an unknown --arch with all names that it knows, and a missing dictionary or set with a traceback.
"""

import difflib
from collections.abc import Iterable, Iterator

from fairseq import options
from fairseq.distributed import utils

from mixhead_plugin.errors import OptionError
from mixhead_plugin.repairs.replace import replaces


@replaces(options, "add_model_args")
def _add_model_args(original, parser):
    group = original(parser)
    arch = next(action for action in group._group_actions if action.dest == "arch")
    arch.choices = _Known(arch.choices)
    return group


class _Known:
    def __init__(self, names: Iterable[str]):
        self.names = names  # of fairseq's registry: a --user-dir that is imported later adds to them

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        if name not in self.names:
            near = " or ".join(difflib.get_close_matches(str(name), self)) or "mixhead_transformer"
            raise OptionError(f"--arch {name}: unknown; did you mean {near}?")
        return True


@replaces(utils, "call_main")
def _call_main(original, cfg, main, **kwargs) -> None:
    try:
        original(cfg, main, **kwargs)
    except FileNotFoundError as error:
        if "Dataset not found" not in str(error) and not str(error.filename).endswith(".txt"):
            raise
        raise OptionError(f"{error.filename or error}: no such file; must be as fairseq-preprocess wrote it") from error
