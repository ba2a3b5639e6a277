"""Weigh the heads of any model, silence them, and see what they do; needs torch alone.

A model gives a list of `Attention`, one adapter for each of its attentions; hf/adapter.py has those
of `transformers`.
"""

import contextlib
import operator
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


class LayerHeads(NamedTuple):
    """The heads of one attention in one call."""

    name: str  # of the attention in the model
    source: Tensor  # P [B, H, Nq, Nk]
    mixing: Tensor | None  # M [H, H'] or [B, Nq, H, H']; None where heads do not mix
    mixed: Tensor  # [B, H', Nq, Nk]; P where heads do not mix


class Attention(Protocol):
    """What importance, ablation and pruning need to know of one attention."""

    @property
    def name(self) -> str:
        """Its name in the model."""
        ...

    @property
    def heads(self) -> int:
        """The number of heads whose outputs go to the output projection; where heads mix, of mixed
        heads.
        """
        ...

    def gate(self, change: Callable[[Tensor], Tensor]) -> RemovableHandle:
        """Let `change` replace the outputs of the heads [..., H', Dv] in each call, until the
        handle is removed.
        """
        ...

    def view(self, see: Callable[[LayerHeads], None]) -> RemovableHandle:
        """Let `see` have the heads of each call, until the handle is removed."""
        ...

    def cut(self, heads: Sequence[int]) -> None:
        """Remove heads for good; raise ValueError, before any change, where this is impossible."""
        ...


class Gate:
    """Factors on the outputs of heads, 1 at first; it acts in the thread that made it, and counts
    how often.

    Other threads call the same modules, and their calls are not meant.
    """

    def __init__(self, attention: Attention):
        self.name, self.calls = attention.name, 0
        self.thread = threading.get_ident()

    def factors(self, outputs: Tensor) -> Tensor:
        """Return factors that can be multiplied with outputs [..., H', 1]."""
        raise NotImplementedError

    def __call__(self, outputs: Tensor) -> Tensor:
        if threading.get_ident() != self.thread:
            return outputs
        self.calls += 1
        return outputs * self.factors(outputs)


class Silence(Gate):
    """Make the outputs of some heads 0."""

    def __init__(self, attention: Attention, heads: Sequence[int]):
        super().__init__(attention)
        self.kept = torch.ones(attention.heads)
        self.kept[list(heads)] = 0

    def factors(self, outputs: Tensor) -> Tensor:
        return self.kept.to(outputs)[:, None]


class Weight(Gate):
    """A 1 for each head of each sentence, by which the loss can be derived."""

    def __init__(self, attention: Attention, sentences: int):
        super().__init__(attention)
        self.sentences = sentences
        self.ones: Tensor | None = None

    def factors(self, outputs: Tensor) -> Tensor:
        if outputs.size(0) != self.sentences:
            raise ValueError(
                f"{self.name}: was called with {outputs.size(0)} sentences, the first tensor of "
                "the batch has "
                f"{self.sentences}; importance must see them apart"
            )
        if self.ones is None:  # only here it is known where offloaded weights compute
            dtype = torch.promote_types(outputs.dtype, torch.float32)
            shape = self.sentences, *(1,) * (outputs.dim() - 3), outputs.size(-2), 1
            self.ones = torch.ones(shape, dtype=dtype, device=outputs.device, requires_grad=True)
        return self.ones.to(outputs.dtype)


_eager_lock = threading.Lock()
# the stance that the first of several blocks has changed, and one entry for each other
_eager_blocks: list[Any] = []


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Let compiled modules run as they are written: a compiled graph does not see hooks that come
    later.

    What is compiled inside would keep the hooks afterwards, so this holds for all models. The
    stance of torch is the same for all threads: the last block restores it.
    """
    with _eager_lock:
        if not _eager_blocks:
            stance = torch.compiler.set_stance("force_eager")
            stance.__enter__()
            _eager_blocks.append(stance)
        else:
            _eager_blocks.append(None)
    try:
        yield
    finally:
        with _eager_lock:
            if len(_eager_blocks) == 1:
                _eager_blocks[0].__exit__(None, None, None)
                _eager_blocks.clear()
            else:
                _eager_blocks.pop()


def choose(
    attentions: Sequence[Attention], heads: Mapping[int | str, Iterable[int]]
) -> dict[int, list[int]]:
    """Return the chosen heads by the number of their layer; raise ValueError if a layer or a head
    does not exist.
    """
    found: dict[int, list[int]] = {}
    numbers: dict[int | str, int] = {
        attention.name: number for number, attention in enumerate(attentions)
    }
    for layer, some in heads.items():
        number = numbers.get(layer, layer)
        if not isinstance(number, int) or not 0 <= number < len(attentions):
            names = f"from 0 to {len(attentions) - 1}, or a name such as {attentions[0].name}"
            raise ValueError(f"layer {layer!r}: must be {names}")
        total = attentions[number].heads
        found[number] = sorted({*map(operator.index, some), *found.get(number, ())})
        for head in found[number]:
            if head not in range(total):
                raise ValueError(f"head {head} of layer {layer}: must be from 0 to {total - 1}")
    return found


def ablate(
    attentions: Sequence[Attention], heads: Mapping[int | str, Iterable[int]]
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the outputs of some heads are 0, for calls of the model in this
    thread.

    Raise ValueError at once for a layer or a head that does not exist, and RuntimeError at the end
    of the context if no call passed through any of the gates.
    """
    chosen = choose(attentions, heads)
    return _ablated(attentions, {layer: some for layer, some in chosen.items() if some})


@contextlib.contextmanager
def _ablated(
    attentions: Sequence[Attention], chosen: Mapping[int, Sequence[int]]
) -> Iterator[None]:
    gates = [Silence(attentions[layer], some) for layer, some in chosen.items()]
    with _uncompiled(), _open(attentions[layer].gate(gate) for layer, gate in zip(chosen, gates)):
        yield
    _notice("ablate", gates)


@contextlib.contextmanager
def _open(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove all handles at the end."""
    with contextlib.ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


def _notice(what: str, gates: Sequence[Gate]) -> None:
    """Say which gates no call passed: the model was not called in this thread, or its graph does
    not know them.
    """
    missed = [gate.name for gate in gates if not gate.calls]
    if missed and len(missed) == len(gates):
        raise RuntimeError(
            f"{what}: had no effect, no call in this thread passed {missed[0]} or another chosen "
            "layer"
        )
    if missed:
        warnings.warn(
            f"{what}: had no effect on {', '.join(missed)}, which no call passed", stacklevel=4
        )


def importance(
    attentions: Sequence[Attention],
    batches: Iterable[Mapping[str, Any]],
    loss: Callable[[Mapping[str, Any]], Tensor],
) -> dict[int, Tensor]:
    """Return the importance of every head by layer, each [H'] in float64.

    The importance of head h is I_h, the mean over the sentences of |dL/d xi_h|, for a gate xi_h = 1
    on its output (Michel et al. 2019, section 4.1; sixteen-heads essay). The model must be in
    evaluation mode.

    Args:
        batches: the first dimension of the first tensor of each counts sentences
        loss: takes a batch, and returns the sum of the losses of its sentences

    Raises:
        ValueError: no batch, a loss without a gradient, or an importance that is not finite
        RuntimeError: no call passed the gates
    """
    sums = [torch.zeros(attention.heads, dtype=torch.float64) for attention in attentions]
    passed = [0] * len(attentions)
    sentences = 0
    for batch in batches:
        rows = next(x.size(0) for x in batch.values() if isinstance(x, Tensor))
        gates = [Weight(attention, rows) for attention in attentions]
        handles = (attention.gate(gate) for attention, gate in zip(attentions, gates))
        with torch.enable_grad(), _uncompiled(), _open(handles):
            value = loss(batch)
            if all(gate.ones is None for gate in gates):
                _notice("importance", gates)
            reached = {
                layer: gate.ones for layer, gate in enumerate(gates) if gate.ones is not None
            }
            if not value.requires_grad:
                raise ValueError(
                    "importance: the loss has no gradient, it must not be detached or under no_grad"
                )
            gradients = torch.autograd.grad(value, list(reached.values()), allow_unused=True)
        if all(gradient is None for gradient in gradients):
            raise ValueError("importance: the loss does not depend on any head")
        for layer, gradient in zip(reached, gradients):
            if gradient is not None:
                passed[layer] += 1
                sums[layer] += gradient.double().abs().reshape(rows, -1).sum(0).cpu()
        sentences += rows
    if not sentences or not all(total.isfinite().all() for total in sums):
        raise ValueError(
            f"importance: must have a batch and be finite; {sentences} sentences were seen"
        )
    missed = [attention.name for attention, times in zip(attentions, passed) if not times]
    if missed:
        warnings.warn(
            f"importance: is 0 for {', '.join(missed)}, on which no loss depends", stacklevel=3
        )
    return {layer: total / sentences for layer, total in enumerate(sums)}


def seen(attentions: Sequence[Attention], call: Callable[[], object]) -> dict[int, LayerHeads]:
    """Return what the heads of every attention do when it is first used in a call of the model, by
    layer.
    """
    found: dict[int, LayerHeads] = {}
    thread = threading.get_ident()

    def see(layer: int) -> Callable[[LayerHeads], None]:
        def keep(heads: LayerHeads) -> None:
            if threading.get_ident() == thread:
                found.setdefault(layer, heads)

        return keep

    with (
        torch.no_grad(),
        _uncompiled(),
        _open(each.view(see(layer)) for layer, each in enumerate(attentions)),
    ):
        call()
    return dict(sorted(found.items()))
