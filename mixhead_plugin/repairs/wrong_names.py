"""Answer an unknown --arch in one line, with names that are near.

fairseq answers an unknown --arch with all names that it knows, in 23,000 characters.
"""

import difflib
from collections.abc import KeysView

from fairseq import options
from fairseq.models import ARCH_MODEL_REGISTRY

from mixhead_plugin.errors import OptionError
from mixhead_plugin.repairs.replace import replaces


@replaces(options, "add_model_args")
def _add_model_args(original, parser):
    group = original(parser)
    arch = next(action for action in group._group_actions if action.dest == "arch")
    arch.choices = _Known(ARCH_MODEL_REGISTRY)  # a --user-dir that is imported later adds to it
    return group


class _Known(KeysView):
    def __contains__(self, name: object) -> bool:
        if name not in self._mapping:
            near = " or ".join(difflib.get_close_matches(str(name), self)) or "mixhead_transformer"
            raise OptionError(f"--arch {name}: unknown; did you mean {near}?")
        return True
