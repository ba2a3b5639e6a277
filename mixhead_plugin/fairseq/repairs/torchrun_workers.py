"""Refuse workers of torchrun or srun that would each train alone.

fairseq ignores torchrun and srun if --distributed-world-size is 1, the default with one GPU or
none. Every worker trains alone, and all write into the same --save-dir.
"""

import os

from fairseq.distributed import utils

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.repairs.no_worker import TORCHRUN
from mixhead_plugin.fairseq.replace import replaces


@replaces(utils, "call_main")
def _call_main(original, cfg, main, **kwargs) -> None:
    workers = cfg.distributed_training
    is_alone = workers.distributed_world_size == 1 and workers.distributed_init_method is None
    is_training = cfg.common_eval.path is None  # several processes may evaluate one model
    variable = "SLURM_STEP_NUM_TASKS"  # of srun
    if all(name in os.environ for name in TORCHRUN):
        variable = "WORLD_SIZE"
    number = os.environ.get(variable, "1")
    if is_alone and is_training and number != "1":
        raise OptionError(
            f"--distributed-world-size 1: {variable} says that {number} workers were started, each "
            f"of which would train alone into --save-dir {cfg.checkpoint.save_dir}; must be "
            f"{number}, or {variable} must be unset"
        )
    original(cfg, main, **kwargs)
