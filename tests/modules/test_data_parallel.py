"""Two processes under torch's DistributedDataParallel train as one does."""

import socket
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from mixhead_plugin.modules.attention import MixheadAttention
from tests.helpers import shake

E, H, N, B = 16, 2, 20, 4


def module_and_inputs():
    torch.manual_seed(1)
    module = shake(MixheadAttention(E, H, self_attention=True, head_mixing="position-wise", impl="blockwise"))
    return module, torch.randn(N, B, E)


def gradients(module: torch.nn.Module, x: torch.Tensor) -> "dict[str, torch.Tensor]":
    future = torch.full((N, N), float("-inf")).triu(1)
    module(x, x, x, attn_mask=future, need_weights=False)[0].square().mean().backward()
    return {name.removeprefix("module."): p.grad for name, p in module.named_parameters()}


def _train(rank: int, port: int, results: Any) -> None:
    torch.set_num_threads(2)
    address = f"tcp://localhost:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    module, x = module_and_inputs()
    found = gradients(DistributedDataParallel(module), x.chunk(2, 1)[rank])
    results[rank] = {name: gradient.tolist() for name, gradient in found.items()}
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_workers_have_the_gradients_of_one():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(_train, (port, results), nprocs=2)
        both = dict(results)
    expected = gradients(*module_and_inputs())
    for rank in (0, 1):
        for name, gradient in expected.items():
            torch.testing.assert_close(torch.tensor(both[rank][name]), gradient, msg=f"{name} of worker {rank}")
