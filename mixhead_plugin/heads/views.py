"""See what the heads of a model do in a call."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from mixhead_plugin.heads.attention import Attention, Heads, LayerHeads, mixed_weights
from mixhead_plugin.heads.gates import opened


@contextlib.contextmanager
def watched(
    attentions: Sequence[Attention], see: Callable[[Attention, Heads], None]
) -> Iterator[None]:
    """Call `see(attention, heads)` in each call of each attention in this thread.

    The calls run without gradients.
    """
    thread = threading.get_ident()

    def watcher(attention: Attention) -> Callable[[Heads], None]:
        def seen_here(heads: Heads) -> None:
            if threading.get_ident() == thread:
                see(attention, heads)

        return seen_here

    with torch.no_grad(), opened(each.view(watcher(each)) for each in attentions):
        yield


def heads_in_call(
    attentions: Sequence[Attention], call: Callable[[], object]
) -> dict[int, LayerHeads]:
    """Return what the heads of every attention do, by layer.

    It is what they do when they are first used in a call of the model. The layer is the number of
    the attention in the order of the model.
    """
    layers = {attention.name: layer for layer, attention in enumerate(attentions)}
    by_layer: dict[int, LayerHeads] = {}

    def keep(attention: Attention, heads: Heads) -> None:
        layer = layers[attention.name]
        if layer not in by_layer:
            source = heads.weights()
            mixing = heads.mixing
            if mixing is not None:
                # It may be a parameter, which training changes.
                mixing = mixing.detach().clone()
            mixed = mixed_weights(source, mixing)
            by_layer[layer] = LayerHeads(attention.name, source, mixing, mixed)

    with watched(attentions, keep):
        call()
    return dict(sorted(by_layer.items()))
