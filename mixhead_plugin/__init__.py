"""Better attention heads for any fairseq recipe: Mixhead, Fixhead, Sigsoftmax and L2-normalised attention.

Given to fairseq as `--user-dir` (`python -m mixhead_plugin` prints the folder), this package registers its
architectures and criteria. Without fairseq installed, `mixhead_plugin.ops` is there for use with torch alone.
"""

from functools import cache
from importlib.util import find_spec

__version__ = "0.1.0"


@cache
def register() -> None:
    """Register the architectures and criteria with fairseq, and apply the repairs."""
    from mixhead_plugin import compat, criterions, models  # noqa: F401

    compat.apply()


if find_spec("fairseq") is not None:
    register()
