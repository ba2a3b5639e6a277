"""Which calls of mixed attentions, and of the models around them, each thread is in."""

import inspect
import threading
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn


class Call:
    """The state of one call of an attention: what its hooks have seen so far.

    Args:
        host: the attention
        projections: the modules that give its queries, keys and values in this call
        outer: the call in which this one began, as in a hook of a projection that calls another
            mixed model; None for none
    """

    def __init__(self, host: nn.Module, projections: dict[str, nn.Module], outer: "Call | None"):
        self.host = host
        self.projections = projections
        self.outer = outer
        self.x: Tensor | None = None  # the input of the queries [B, Nq, C]
        # all that the projection of the queries gave [B, Nq, H * D or more]
        self.projected: Any = None
        self.waits = False  # whether these queries have not attended yet
        self.attended = False

    def queries(self, heads: int, head_dim: int) -> Tensor:
        """Return the projected queries by head [B, H, Nq, D], as mixings read them."""
        queries = self.projected[..., : heads * head_dim]  # without keys and values beside them
        return queries.unflatten(2, (heads, head_dim)).transpose(1, 2)


class ThreadState:
    """The call of an attention and the calls of models that this thread is in.

    Attributes:
        call: the innermost call of an attention
        wishes: the id of each model that runs, and whether it was asked for weights. The outermost
            is first, because a model may call others

    Ctrl-C leaves both as they are, because torch calls no hook after it. The next call drops what
    is left of attentions, and that of a model what is left of this model. What is left of another
    model has no effect, and keeps no memory, because it is an id.
    """

    def __init__(self) -> None:
        self.call: Call | None = None
        self.wishes: tuple[tuple[int, bool], ...] = ()

    def wants_weights(self) -> bool:
        """Return whether the innermost model was asked for weights."""
        return self.wishes[-1][1] if self.wishes else False

    def drop_interrupted(self) -> None:
        """Forget calls of attentions that have not ended as usual."""
        while self.call is not None and not _runs(self.call.host):
            self.call = self.call.outer

    def note_wish(self, model: nn.Module, for_weights: bool) -> None:
        """Begin a call of a model, which was asked for weights or not."""
        self.drop_interrupted()
        wishes = self.wishes
        running = [number for number, _ in wishes]
        if id(model) in running:  # no model calls itself: this call has not ended as usual
            wishes = wishes[: running.index(id(model))]
        self.wishes = (*wishes, (id(model), for_weights))

    def forget_wish(self, model: nn.Module) -> None:
        """End a call of a model."""
        # Another hook may have refused the call before the wish was noted.
        if self.wishes and self.wishes[-1][0] == id(model):
            self.wishes = self.wishes[:-1]


@torch.compiler.disable  # which does not follow frames; between two calls there is nothing to drop
def _runs(module: nn.Module) -> bool:
    """Return whether this thread is in a call of a module."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        is_call = frame.f_code is nn.Module._call_impl.__code__
        if is_call and frame.f_locals["self"] is module:
            return True
        frame = frame.f_back
    return False


class _Threads(threading.local):
    # torch.compile loses what is set on the local itself where a graph breaks, but not what is set
    # on an object in it.
    def __init__(self) -> None:
        self.own = ThreadState()


THREADS = _Threads()
