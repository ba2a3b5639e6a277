"""Workers under torch's DistributedDataParallel share penalties as they share losses."""

import socket
from typing import Any, Dict

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.criterions.cases import CASES, criterion, model

FLAGS = {
    "plain": ({}, {}),
    # Which layers are dropped differs between the workers.
    "LayerDrop": ({"decoder_layerdrop": 0.5}, {"find_unused_parameters": True}),
    "checkpointed activations": ({"checkpoint_activations": True}, {}),
}


class Wrapped(torch.nn.Module):
    """fairseq hands the wrapped model to the criterion, which calls it and asks the inner one for the rest."""

    def __init__(self, inner: torch.nn.Module, **options: Any):
        super().__init__()
        self.module = DistributedDataParallel(inner, **options)

    def forward(self, **net_input: Any) -> Any:
        return self.module(**net_input)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module.module, name)


def made_and_sample(which: str, rank: int):
    made = model("cross_entropy", **FLAGS[which][0])
    torch.manual_seed(20 + rank)
    return made, CASES["cross_entropy"].batch()


def backward(made: torch.nn.Module, sample: Any, rank: int) -> None:
    torch.manual_seed(40 + rank)
    criterion("orthogonal_cross_entropy", orthogonal_weight=0.3, rank_weight=0.01)(made, sample)[0].backward()


def gradients(made: torch.nn.Module) -> Dict[str, torch.Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in made.named_parameters()}


def _train(rank: int, port: int, results: Any) -> None:
    address = f"tcp://localhost:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    for which, (_, options) in FLAGS.items():
        made, sample = made_and_sample(which, rank)
        wrapped = Wrapped(made, **options)
        for _ in range(2):  # a parameter that is reported twice, or never, is noticed in the next pass at the latest
            made.zero_grad()
            backward(wrapped, sample, rank)
        results[which, rank] = {name: gradient.tolist() for name, gradient in gradients(made).items()}
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def of_two_workers():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(_train, (port, results), nprocs=2)
        return dict(results)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("which", FLAGS)
def test_two_workers_have_the_mean_gradients_of_both(which, of_two_workers):
    alone = []
    for rank in (0, 1):
        made, sample = made_and_sample(which, rank)
        backward(made, sample, rank)
        alone.append(gradients(made))
    for rank in (0, 1):
        for name, gradient in of_two_workers[which, rank].items():
            expected = (alone[0][name] + alone[1][name]) / 2
            torch.testing.assert_close(torch.tensor(gradient), expected, msg=f"{name} of worker {rank}")
