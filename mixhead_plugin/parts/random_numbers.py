"""Let parts draw random numbers beside those of the projections."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def forked_rng() -> Iterator[None]:
    """Let parts draw random numbers that leave those of all other weights as they are.

    With a seed, the projections of a model with the part then start as those of the model without
    it, because the generator is put back afterwards:

        generator of the CPU    q k v | seed, put back | q k v of the next attention
        part                          seed, a b c

    Two attentions that are built one after the other draw different numbers, because their
    projections have moved the generator in between.

    Parts must draw on the CPU. The generators of other devices are not touched.
    """
    with torch.random.fork_rng(devices=[]):
        seed = int(torch.randint(2**62, (), device="cpu"))
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed the GPUs, too
        yield
