"""Mixed heads and other attentions for any fairseq recipe: Mixhead, Fixhead, Sigsoftmax and
L2-normalised attention.

As fairseq's `--user-dir` (`python -m mixhead_plugin path` prints the folder) the package registers
its architectures and criteria, and repairs fairseq. A program that uses fairseq's API calls
`mixhead_plugin.register()`. Importing it alone changes nothing: `mixhead_plugin.ops` needs torch
alone.
"""

import os
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn

__version__ = "0.2.0.dev0"

if sys.version_info < (3, 11):  # noqa: UP036 (a --user-dir is imported without pip)
    raise ImportError(
        f"mixhead_plugin needs Python 3.11 or newer, this is {sys.version.split()[0]}"
    )


def register() -> None:
    """Register the architectures and criteria with fairseq, and apply the repairs that
    MIXHEAD_REPAIRS names.
    """
    if __name__ != "mixhead_plugin":
        _refuse_other_name()
    from mixhead_plugin import errors
    from mixhead_plugin.fairseq import repairs

    if _user_dirs():  # a command
        errors.end_in_one_line()
    repairs.apply()
    register_names()


def register_names() -> None:
    """Register the architectures and criteria alone."""
    # Each registers its names when it is imported.
    from mixhead_plugin.fairseq import criterions, models  # noqa: F401


def _refuse_other_name() -> NoReturn:
    """Refuse a --user-dir that links to this folder, or copies it, under another name: modules
    import by this one.
    """
    from . import errors

    errors.end_in_one_line()
    given = next((path for path in _user_dirs() if os.path.basename(path) == __name__), __name__)
    folder = os.path.dirname(os.path.realpath(__file__))
    remedy = (
        f"must be {folder}"
        if os.path.basename(folder) == "mixhead_plugin"
        else "must have this name"
    )
    raise errors.OptionError(
        f"--user-dir {given}: is a folder of another name than mixhead_plugin; {remedy}"
    )


def _user_dirs() -> Iterable[str]:
    """Return the folders that fairseq was given as --user-dir in this process."""
    import_user_module = getattr(sys.modules.get("fairseq.utils"), "import_user_module", None)
    return getattr(import_user_module, "memo", ())


class UserDir(list):
    """The `__path__` of a package that registers itself when fairseq gets its folder as --user-dir.

    fairseq does not import a --user-dir again that the program has imported before. It only asks
    whether the folder is in `__path__`: nothing else of the package can notice. `path` is what
    Python has given as `__path__`.
    """

    def __init__(self, path: Iterable[str], register: Callable[[], None]):
        super().__init__(path)
        self.register = register

    def register_if_asked(self) -> None:
        """Register if fairseq was given this folder; it notes the path before it imports the
        folder.
        """
        if any(map(self._is_this_folder, _user_dirs())):
            self.register()

    def __contains__(self, path: object) -> bool:
        if not self._is_this_folder(path):
            return super().__contains__(path)
        self.register_if_asked()
        return True

    def _is_this_folder(self, path: object) -> bool:
        return isinstance(path, str) and os.path.realpath(path) == os.path.realpath(self[0])


__path__ = UserDir(__path__, register)
__path__.register_if_asked()
