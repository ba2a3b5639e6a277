"""Better attention heads for any fairseq recipe: Mixhead, Fixhead, Sigsoftmax and L2-normalised attention.

As fairseq's `--user-dir` (`python -m mixhead_plugin path` prints the folder) the package registers its architectures
and criteria, and applies the repairs of fairseq. In a process without fairseq, importing it changes nothing:
`mixhead_plugin.ops` needs torch alone. A program that uses fairseq's API calls `mixhead_plugin.register()`.
"""

import os
import sys

__version__ = "0.1.0"


def register() -> None:
    """Register the architectures and criteria with fairseq, and apply the repairs that MIXHEAD_REPAIRS names."""
    from mixhead_plugin import repairs

    repairs.apply()
    _register_names()


def _register_names() -> None:
    from mixhead_plugin import criterions, models  # noqa: F401 (each registers its names when imported)


def _is_this_folder(path: object) -> bool:
    return isinstance(path, str) and os.path.realpath(path) == os.path.realpath(os.path.dirname(__file__))


def _is_user_dir() -> bool:
    """Return True if fairseq was given this folder as --user-dir; it notes the path before it imports the folder."""
    import_user_module = getattr(sys.modules.get("fairseq.utils"), "import_user_module", None)
    return any(map(_is_this_folder, getattr(import_user_module, "memo", ())))


class _SearchPath(list):
    """The package's `__path__`, which also registers.

    fairseq does not import a --user-dir that Python has imported before. It only asks whether the path is in
    `__path__`. Without this class, a program that imports the package early would get no repairs.
    """

    def __contains__(self, path: object) -> bool:
        if not _is_this_folder(path):
            return super().__contains__(path)
        if _is_user_dir():
            register()
        return True


__path__ = _SearchPath(__path__)

if _is_user_dir():
    register()
elif sys.modules.get("fairseq") is not None:  # a program that uses fairseq's API: patch no function of fairseq unasked
    from mixhead_plugin import repairs

    repairs.apply(["required"])
    _register_names()
