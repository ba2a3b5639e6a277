"""Test that two processes under DistributedDataParallel have the mean gradients of both."""

import socket

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.modules.synthesizer import SYNTHESIZERS
from tests.modules import definition

N, B = 6, 2
VARIANTS = [(kind, mixing) for kind in ("blockwise", *SYNTHESIZERS) for mixing in HEAD_MIXINGS]


def build(kind, mixing):
    if kind == "blockwise":
        return definition.build("self", mixing, impl="blockwise")
    return definition.build_synthesizer(kind, mixing)


def gradients(module, rank):
    torch.manual_seed(20 + rank)
    x = torch.randn(N, B, getattr(module, "module", module).embed_dim)
    for _ in range(2):  # torch notices in the next pass that a parameter had no gradient
        module.zero_grad()
        module(x, x, x, attn_mask=definition.future(N), need_weights=False)[0].square().sum().backward()
    return {name.removeprefix("module."): p.grad for name, p in module.named_parameters()}


def _train(rank, port, results):
    torch.set_num_threads(2)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=2)
    for variant in VARIANTS:
        found = gradients(DistributedDataParallel(build(*variant)), rank)
        results[*variant, rank] = {name: gradient.tolist() for name, gradient in found.items()}
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_workers_have_the_mean_gradients_of_both():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(_train, (port, results), nprocs=2)
        found = dict(results)
    for variant in VARIANTS:
        alone = [gradients(build(*variant), rank) for rank in (0, 1)]
        for rank in (0, 1):
            for name, gradient in found[*variant, rank].items():
                expected = (alone[0][name] + alone[1][name]) / 2
                torch.testing.assert_close(torch.tensor(gradient), expected, msg=f"{variant} {name}, worker {rank}")
