"""Test that workers under torch's DistributedDataParallel share penalties as they share losses.

As a program: one worker, `python -m tests.fairseq.criterions.test_data_parallel RANK PORT FILE`.
"""

import os
import sys
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.commands import free_port, start
from tests.fairseq.criterions.cases import CASES, criterion, model
from tests.fairseq.models.test_fairseq_features import LOW_RANK

FLAGS = {
    "plain": ({}, {}),
    # Which layers are dropped differs between the workers.
    "LayerDrop": ({"decoder_layerdrop": 0.5}, {"find_unused_parameters": True}),
    "checkpointed activations": ({"checkpoint_activations": True}, {}),
    "every part": (LOW_RANK, {}),
}


class Wrapped(torch.nn.Module):
    """Wrap a model as fairseq does.

    The criterion calls the wrapper and reads attributes of the inner model.
    """

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
    criterion("orthogonal_cross_entropy", orthogonal_weight=0.3, rank_weight=0.01)(made, sample)[
        0
    ].backward()


def gradients(made: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in made.named_parameters()
    }


def work(rank: int, port: str, file: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=2
    )
    results = {}
    for which, (_, options) in FLAGS.items():
        made, sample = made_and_sample(which, rank)
        wrapped = Wrapped(made, **options)
        # a parameter that is reported twice, or never, is noticed in the next pass at the latest
        for _ in range(2):
            made.zero_grad()
            backward(wrapped, sample, rank)
        results[which] = gradients(made)
    torch.save(results, file)
    torch.distributed.barrier()
    # Without destructors: that of gloo's group waits for a thread which, once in a while, waits for
    # the GIL.
    os._exit(0)


@pytest.fixture(scope="module")
def of_two_workers(tmp_path_factory):
    port = free_port()
    files = [tmp_path_factory.mktemp("gradients") / f"{rank}.pt" for rank in (0, 1)]
    module = "-m tests.fairseq.criterions.test_data_parallel"
    path = f"import sys; sys.path[:] = {sys.path}"
    workers = [start(module, rank, port, file, before=path) for rank, file in enumerate(files)]
    ended = [worker.wait() for worker in workers]
    assert [worker.returncode for worker in ended] == [0, 0], [
        worker.stderr[-3000:] for worker in ended
    ]
    return [torch.load(file) for file in files]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("which", FLAGS)
def test_two_workers_have_the_mean_gradients_of_both(which, of_two_workers):
    alone = []
    for rank in (0, 1):
        made, sample = made_and_sample(which, rank)
        backward(made, sample, rank)
        alone.append(gradients(made))
    for rank in (0, 1):
        for name, gradient in of_two_workers[rank][which].items():
            expected = (alone[0][name] + alone[1][name]) / 2
            torch.testing.assert_close(gradient, expected, msg=f"{name} of worker {rank}")


if __name__ == "__main__":
    work(int(sys.argv[1]), *sys.argv[2:])
