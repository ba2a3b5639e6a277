"""Mixed heads, fixed head sizes, sigsoftmax and L2-normalised attention for any fairseq recipe.

As fairseq's `--user-dir` (`python -m mixhead_plugin path` prints the folder) the package registers
its architectures and criteria, and repairs fairseq. A program that uses fairseq's API calls
`mixhead_plugin.register()`. Importing it alone changes nothing: `mixhead_plugin.ops` needs torch
alone.
"""

import os
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn

__version__ = "0.2.0"

if sys.version_info < (3, 11):  # noqa: UP036 (a --user-dir is imported without pip)
    raise ImportError(
        f"mixhead_plugin needs Python 3.11 or newer, this is {sys.version.split()[0]}"
    )


def register() -> None:
    """Register with fairseq, and repair it: all that `--user-dir mixhead_plugin` does.

    Architectures and criteria get their names, fairseq's trainer calls the hooks of the plugin's
    flags, and the repairs that MIXHEAD_REPAIRS chooses are applied. A second call changes nothing.
    """
    if __name__ != "mixhead_plugin":
        _refuse_other_name()
    # Not above: importing the package alone needs neither torch nor fairseq.
    from mixhead_plugin import errors
    from mixhead_plugin.fairseq import hooks, repairs

    if _user_dirs():  # a command
        errors.end_in_one_line()
    hooks.install()
    repairs.apply()
    register_names()


def register_names() -> None:
    """Register the architectures and criteria alone."""
    # Each registers its names when it is imported.
    from mixhead_plugin.fairseq import criterions, models  # noqa: F401


def _refuse_other_name() -> NoReturn:
    """Refuse a --user-dir that links to this folder, or copies it, under another name.

    fairseq imports the folder by its name. But the modules of the package import each other as
    `mixhead_plugin`, which would be a second package beside this one.
    """
    from . import errors  # relative, because `mixhead_plugin` may not be there

    errors.end_in_one_line()
    given = __name__
    for path in _user_dirs():
        if os.path.basename(path) == __name__:
            given = path
            break
    folder = os.path.dirname(os.path.realpath(__file__))
    if os.path.basename(folder) == "mixhead_plugin":  # a link of another name leads here
        remedy = f"must be {folder}"
    else:
        remedy = "must have this name"
    raise errors.OptionError(
        f"--user-dir {given}: is a folder of another name than mixhead_plugin; {remedy}"
    )


def _user_dirs() -> Iterable[str]:
    """Return the folders that fairseq was given as --user-dir in this process."""
    # fairseq keeps them in an attribute of its function, from the first --user-dir on.
    import_user_module = getattr(sys.modules.get("fairseq.utils"), "import_user_module", None)
    return getattr(import_user_module, "memo", ())


class UserDir(list):
    """The `__path__` of a package that registers itself when fairseq gets its folder as --user-dir.

    fairseq does not import a --user-dir again that the program has imported before. It only asks
    whether the folder is in `__path__`: nothing else of the package can notice.

    Args:
        path: what Python has given as `__path__`
        register: called when fairseq asks for the folder
    """

    def __init__(self, path: Iterable[str], register: Callable[[], None]):
        super().__init__(path)
        self.register = register

    def register_if_asked(self) -> None:
        """Register if fairseq was given this folder: it notes the path before the import."""
        for path in _user_dirs():
            if self._is_this_folder(path):
                self.register()
                return

    def __contains__(self, path: object) -> bool:
        if not self._is_this_folder(path):
            return super().__contains__(path)
        self.register_if_asked()
        return True

    def _is_this_folder(self, path: object) -> bool:
        return isinstance(path, str) and os.path.realpath(path) == os.path.realpath(self[0])


__path__ = UserDir(__path__, register)
__path__.register_if_asked()
