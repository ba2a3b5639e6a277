"""Workers train together, or are refused."""

from types import SimpleNamespace

import pytest
import torch
from fairseq import distributed_utils
from fairseq.dataclass.configs import DistributedTrainingConfig

from mixhead_plugin.errors import OptionError

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def started(monkeypatch, variables, **flags):
    """Return how many times fairseq calls `main`, and the config that it does it with."""
    for name in (*TORCHRUN, "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(
        distributed_utils, "distributed_init", lambda cfg: cfg.distributed_training.distributed_rank
    )
    cfg = SimpleNamespace(
        common=SimpleNamespace(tpu=False, cpu=True), common_eval=SimpleNamespace(path=None)
    )
    cfg.distributed_training = DistributedTrainingConfig(tpu=False, **flags)
    cfg.checkpoint = SimpleNamespace(save_dir="save")
    calls = []
    distributed_utils.call_main(cfg, calls.append)
    return len(calls), cfg.distributed_training


@pytest.mark.parametrize(
    "flags, variables",
    [
        ({}, {}),
        ({"distributed_init_method": "tcp://localhost:1"}, {}),
        ({"distributed_init_method": "tcp://localhost:1"}, TORCHRUN),
        ({"distributed_no_spawn": True}, {}),
        ({}, {"RANK": "0"}),
    ],
)
def test_workers_without_gpus_are_refused_not_forgotten(flags, variables, monkeypatch):
    with pytest.raises(
        OptionError, match=r"^--distributed-world-size 2: no GPU to start a worker for"
    ):
        started(monkeypatch, variables, distributed_world_size=2, **flags)


def test_a_single_worker_without_a_gpu_is_refused_where_fairseq_would_start_it(monkeypatch):
    method = {"distributed_world_size": 1, "distributed_init_method": "tcp://localhost:1"}
    with pytest.raises(OptionError) as refused:
        started(monkeypatch, {}, **method)
    assert str(refused.value) == (
        "--distributed-init-method tcp://localhost:1: no GPU to start a worker for; must be left "
        "out with --distributed-world-size 1"
    )
    calls, _ = started(monkeypatch, {}, **method, distributed_no_spawn=True)
    assert calls == 1


def test_workers_of_torchrun_train_together_without_gpus(monkeypatch):
    with pytest.raises(OptionError, match=r"^--ddp-backend pytorch_ddp: needs GPUs"):
        started(monkeypatch, TORCHRUN, distributed_world_size=2)
    number, workers = started(
        monkeypatch, TORCHRUN, distributed_world_size=2, ddp_backend="legacy_ddp"
    )
    assert (number, workers.distributed_rank, workers.distributed_world_size) == (1, 1, 2)


@pytest.mark.parametrize(
    "variables", [TORCHRUN, {"SLURM_STEP_NUM_TASKS": "2"}], ids=["torchrun", "srun"]
)
def test_workers_of_torchrun_or_srun_do_not_train_apart(variables, monkeypatch):
    with pytest.raises(
        OptionError, match=r"^--distributed-world-size 1: \w+ says that 2 workers were started"
    ):
        started(monkeypatch, variables, distributed_world_size=1)


@pytest.mark.parametrize(
    "variables", [{}, {**TORCHRUN, "WORLD_SIZE": "1"}], ids=["no launcher", "torchrun"]
)
def test_one_worker_trains_alone(variables, monkeypatch):
    calls, _ = started(monkeypatch, variables, distributed_world_size=1)
    assert calls == 1
