"""Test which memory the interpreted kernels read and write.

It is never outside of a tensor, and never in a race.
"""

import numpy as np
import pytest
import torch

from tests.covering import each_once
from tests.ops.triton_cases import (
    MIXINGS,
    NK,
    NQ,
    ON_GPU,
    H,
    Tile,
    by_kernels,
    future,
    holes,
    inputs,
    padding,
    programs,
    use_tiles,
    with_gradients,
)

pytestmark = [
    pytest.mark.usefixtures("kernels"),
    pytest.mark.skipif(ON_GPU, reason="needs triton's interpreter"),
]
OPTIONS = {
    "causal": lambda: {"causal": True},
    "masked": lambda: {"attn_mask": future(), "key_padding_mask": padding()},
    "sigmoid": lambda: {"normalizer": "sigmoid", "key_padding_mask": padding()},
    "sink": lambda: {"causal": True},
    "bias for each head": lambda: {"attn_mask": holes(1, H, NQ, NK)},
}


def addresses_of(arguments):
    """Return the address of every number of the tensors in nested tuples."""
    found = [np.empty(0, np.int64)]
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and argument.numel():
            last = sum(
                (size - 1) * stride for size, stride in zip(argument.shape, argument.stride())
            )
            numbers = torch.arange(last + 1).as_strided(argument.shape, argument.stride())
            found.append(argument.data_ptr() + argument.element_size() * numbers.flatten().numpy())
        elif isinstance(argument, tuple):
            found.append(addresses_of(argument))
    return np.concatenate(found)


@each_once(mixed=MIXINGS, options=OPTIONS, dropout_p=[0.0, 0.25])
def test_programs_stay_inside_their_tensors_and_out_of_each_other(
    mixed, options, dropout_p, monkeypatch
):
    from triton.runtime.interpreter import InterpreterBuilder

    use_tiles(monkeypatch, Tile(32, 64, 4, 1), Tile(32, 64, 4, 1))
    read = []
    written = []
    launches = []

    def noting(name, notes):
        function = getattr(InterpreterBuilder, name)

        def access(self, pointers, *arguments):
            mask = arguments[1 if name.endswith("store") else 0].data
            addresses = np.unique(pointers.data[np.broadcast_to(mask, pointers.data.shape)])
            notes.append(np.stack([addresses, np.full_like(addresses, self.grid_idx[0])]))
            return function(self, pointers, *arguments)

        monkeypatch.setattr(InterpreterBuilder, name, access)

    noting("create_masked_load", read)
    noting("create_masked_store", written)
    launch = programs.start

    def start(kernel, n_programs, arguments, tile):
        read.clear()
        written.clear()
        launch(kernel, n_programs, arguments, tile)
        inside = addresses_of(arguments.values())
        places_read, readers = np.concatenate(read, 1)
        places_written, writers = np.concatenate(written, 1)
        assert np.isin(places_read, inside).all()
        assert np.isin(places_written, inside).all()

        order = np.argsort(places_written)
        places_written = places_written[order]
        writers = writers[order]
        assert (np.diff(places_written) > 0).all(), "a number is written twice"
        found = np.searchsorted(places_written, places_read)
        found = np.minimum(found, len(places_written) - 1)
        races = (places_written[found] == places_read) & (writers[found] != readers)
        assert not races.any(), "a read races a write"
        launches.append(kernel.fn.__name__)

    monkeypatch.setattr(programs, "start", start)
    tensors = inputs(mixed, sink=options == "sink")
    with_gradients(by_kernels, tensors, **OPTIONS[options](), dropout_p=dropout_p)
    assert len(launches) >= 4
