"""Mixed heads and other attentions for any fairseq recipe: Mixhead, Fixhead, Sigsoftmax and L2-normalised attention.

As fairseq's `--user-dir` (`python -m mixhead_plugin path` prints the folder) the package registers its architectures
and criteria, and applies the repairs of fairseq. In a process without fairseq, importing it changes nothing:
`mixhead_plugin.ops` needs torch alone. A program that uses fairseq's API calls `mixhead_plugin.register()`.
"""

import os
import sys
from collections.abc import Callable, Iterable

__version__ = "0.1.0"

if sys.version_info < (3, 11):  # noqa: UP036 (a --user-dir is imported without pip)
    raise ImportError(f"mixhead_plugin needs Python 3.11 or newer, this is {sys.version.split()[0]}")


def register() -> None:
    """Register the architectures and criteria with fairseq, and apply the repairs that MIXHEAD_REPAIRS names."""
    from mixhead_plugin import repairs

    repairs.apply()
    register_names()


def register_names() -> None:
    """Register the architectures and criteria alone."""
    from mixhead_plugin import criterions, models  # noqa: F401 (each registers its names when imported)


class UserDir(list):
    """The `__path__` of a package that registers itself when fairseq gets its folder as --user-dir.

    fairseq does not import a --user-dir that Python has imported before. It only asks whether the path is in
    `__path__`. Without this class, a program that imports the package early would get no repairs.

    Args:
        path: the `__path__` that Python has given the package
        register_names: registers what the package adds to fairseq
    """

    def __init__(self, path: Iterable[str], register_names: Callable[[], None]):
        super().__init__(path)
        self.register_names = register_names

    def imported(self) -> None:
        """Register in a process that has imported fairseq; outside --user-dir, patch no function of fairseq."""
        from mixhead_plugin import repairs

        repairs.apply(repairs.GROUPS if self._is_user_dir() else ["required"])
        self.register_names()

    def __contains__(self, path: object) -> bool:
        if not self._is_this_folder(path):
            return super().__contains__(path)
        if self._is_user_dir():
            self.imported()
        return True

    def _is_this_folder(self, path: object) -> bool:
        return isinstance(path, str) and os.path.realpath(path) == os.path.realpath(self[0])

    def _is_user_dir(self) -> bool:
        """Return True if fairseq was given this folder; it notes the path before it imports the folder."""
        import_user_module = getattr(sys.modules.get("fairseq.utils"), "import_user_module", None)
        return any(map(self._is_this_folder, getattr(import_user_module, "memo", ())))


__path__ = UserDir(__path__, register_names)
if sys.modules.get("fairseq") is not None:
    __path__.imported()
