"""Factors on heads: 0 silences a head, and the derivative by a 1 weighs it."""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mixhead_plugin.heads.attention import Attention, HeadsError
from mixhead_plugin.heads.uncompiled import uncompiled


class Gate:
    """A factor on each head of one stage of an attention; it counts the calls that pass it.

    It acts in the thread that made it. Other threads call the same modules, and their calls are not
    meant. But a backward pass may run in a thread of its own, as it does on a GPU, and activation
    checkpointing computes heads again in it. So the gate acts in every backward pass.
    """

    def __init__(self, attention: Attention, stage: str):
        self.attention = attention
        self.name = attention.name
        self.stage = stage
        self.calls = 0
        self.thread = threading.get_ident()

    def factors(self, heads: Tensor) -> Tensor:
        """Return factors on what heads give, [..., heads, n]."""
        raise NotImplementedError

    def open(self) -> RemovableHandle:
        """Let the gate act on the calls of its attention, until the handle is removed."""
        return self.attention.gate(self.stage, self)

    def __call__(self, heads: Tensor) -> Tensor:
        in_backward = torch._C._current_graph_task_id() != -1
        if threading.get_ident() != self.thread and not in_backward:
            return heads
        self.calls += 1
        return heads * self.factors(heads)


class Silence(Gate):
    """Make some heads 0."""

    def __init__(self, attention: Attention, stage: str, silent: Iterable[int]):
        super().__init__(attention, stage)
        self.kept = torch.ones(attention.heads[stage])
        self.kept[list(silent)] = 0

    def factors(self, heads: Tensor) -> Tensor:
        return self.kept.to(heads)[:, None]


class Weight(Gate):
    """A 1 for each head of each sentence, by which the loss can be derived.

        what heads give                                              factors
        outputs, or matrices M of each query    [B, Nq, heads, n]    [B, 1, heads, 1]
        outputs without positions               [B, heads, n]        [B, heads, 1]
        one matrix M for all, [H, H']           [heads, n]           [B, 1, heads, 1]

    One matrix becomes one for each sentence by its factors, [B, 1, H, H'].
    """

    def __init__(self, attention: Attention, stage: str, sentences: int):
        super().__init__(attention, stage)
        self.sentences = sentences
        self.ones: Tensor | None = None

    def factors(self, heads: Tensor) -> Tensor:
        one_matrix = heads.dim() == 2  # M [H, H'] of all sentences and positions
        if not one_matrix and heads.size(0) != self.sentences:
            raise HeadsError(
                f"{self.name}: was called with {heads.size(0)} sentences, the first tensor of "
                f"the batch has {self.sentences}; importance must see them apart"
            )
        if self.ones is None:  # only here it is known where offloaded weights compute
            shape = [self.sentences, 1, heads.size(-2), 1]
            if heads.dim() == 3:
                shape = [self.sentences, heads.size(-2), 1]
            dtype = torch.promote_types(heads.dtype, torch.float32)
            self.ones = torch.ones(shape, dtype=dtype, device=heads.device, requires_grad=True)
        return self.ones.to(heads.dtype)


@contextlib.contextmanager
def opened(handles: Iterator[RemovableHandle]) -> Iterator[None]:
    """Let compiled models run as they are written, and remove all handles at the end.

    Args:
        handles: an iterator that makes them, so that those before one that is refused are removed
    """
    with uncompiled(), contextlib.ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


def missed_gates(gates: Sequence[Gate]) -> list[str]:
    """Return the names of the attentions whose gates no call has passed, each once, in their order.

    The model did not use them, was not called in this thread, or its graph does not know the gates.
    """
    passed = {gate.name for gate in gates if gate.calls}
    asked = dict.fromkeys(gate.name for gate in gates)
    return [name for name in asked if name not in passed]


def none_passed(what: str, missed: Sequence[str]) -> RuntimeError:
    """Return the error for calls that passed no gate at all.

    Args:
        what: the function that the user has called
        missed: what `missed_gates` returned
    """
    return RuntimeError(
        f"{what}: had no effect, no call in this thread passed {missed[0]} or another chosen layer"
    )


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; each of its modules returns to its own mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
