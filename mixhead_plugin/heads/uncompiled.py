"""Switches of torch that hold for the whole process, turned off while some blocks last."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch


class SharedSwitch:
    """A setting of the whole process that blocks of several threads change at the same time.

    The first block changes it, and the last one restores it, in whichever order they end. If each
    block restored what it has found, the last one would restore the change of another one:

        thread A    [ default -> off            restores default ]
        thread B            [ off -> off                restores off, for good ]

    Args:
        change: returns a context that changes the setting and restores it
    """

    def __init__(self, change: Callable[[], contextlib.AbstractContextManager[None]]):
        self.change = change
        self.lock = threading.Lock()
        self.blocks = 0
        self.changed = contextlib.ExitStack()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self.lock:
            if self.blocks == 0:
                self.changed.enter_context(self.change())
            self.blocks += 1
        try:
            yield
        finally:
            with self.lock:
                self.blocks -= 1
                if self.blocks == 0:
                    self.changed.close()


def _eager() -> contextlib.AbstractContextManager[None]:
    return torch.compiler.set_stance("force_eager")


@contextlib.contextmanager
def _no_fast_path() -> Iterator[None]:
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


# Lets compiled modules run as they are written, because a compiled graph does not see hooks that
# come later. It holds for all models: one that is compiled inside of a block would keep the hooks
# afterwards.
uncompiled = SharedSwitch(_eager)

# Lets torch's modules call their parts, in place of one function that computes a whole layer.
without_fast_path = SharedSwitch(_no_fast_path)
