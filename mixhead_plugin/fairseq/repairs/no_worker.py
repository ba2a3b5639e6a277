"""Refuse workers without a GPU that fairseq would not start; take those of torchrun.

fairseq starts one worker per GPU. Without GPUs it starts none and ends with status 0. Under
torchrun it divides by 0.
"""

import os
from typing import Any

import torch
from fairseq.distributed import utils

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.replace import replaces

TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")  # torchrun sets all of them


@replaces(utils, "call_main")
def _call_main(original, cfg, main, **kwargs) -> None:
    workers = cfg.distributed_training
    if not cfg.common.tpu and torch.cuda.device_count() == 0:
        if workers.distributed_world_size > 1:
            _check_workers(cfg)
        elif workers.distributed_init_method is not None and not workers.distributed_no_spawn:
            raise OptionError(
                f"--distributed-init-method {workers.distributed_init_method}: no GPU to start a "
                "worker for; must be left out with --distributed-world-size 1"
            )
    original(cfg, main, **kwargs)


def _check_workers(cfg: Any) -> None:
    """Take the number and the rank of workers from torchrun; refuse if nothing starts them."""
    workers = cfg.distributed_training
    by_torchrun = all(name in os.environ for name in TORCHRUN)
    if workers.distributed_init_method is None and by_torchrun:
        workers.distributed_init_method = "env://"
        workers.distributed_no_spawn = True
        workers.distributed_world_size = int(os.environ["WORLD_SIZE"])
        workers.distributed_rank = int(os.environ["RANK"])
    if workers.distributed_init_method is None or not workers.distributed_no_spawn:
        raise OptionError(
            f"--distributed-world-size {workers.distributed_world_size}: no GPU to start a worker "
            "for; without GPUs start each by torchrun, or by --distributed-no-spawn "
            "--distributed-rank --distributed-init-method tcp://HOST:PORT (with "
            "--distributed-backend gloo)"
        )
    trains = cfg.common_eval.path is None
    if trains and workers.ddp_backend == "pytorch_ddp":
        raise OptionError(
            "--ddp-backend pytorch_ddp: needs GPUs in fairseq; without them must be legacy_ddp"
        )
