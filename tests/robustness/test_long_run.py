"""Train long: memory, open files, threads and tensors do not grow after the warm-up."""

import gc
import os
import sys
from pathlib import Path

import pytest
import torch
from fairseq.trainer import Trainer
from fairseq_cli.train import cli_main

from tests.commands import LM_SIZES, PLUGIN
from tests.own_process import in_own_process
from tests.transformer_xl import XL_SIZES

UPDATES = 96
# Twelve validations that --max-valid-steps cuts short, as many checkpoints, and many epochs.
FLAGS = [
    "--cpu",
    "--seed=1",
    "--optimizer=adam",
    "--lr=0.01",
    f"--max-update={UPDATES}",
    "--num-workers=1",
    "--data-buffer-size=1",
    "--log-interval=50",
    "--validate-interval-updates=8",
    "--max-valid-steps=1",
    "--save-interval-updates=8",
    "--keep-interval-updates=1",
]
MODELS = {
    "mixhead_transformer_lm": [
        *LM_SIZES,
        "--task=language_modeling",
        "--sample-break-mode=eos",
        "--batch-size=8",
        "--tokens-per-sample=32",
        "--batch-size-valid=1",
    ],
    "mixhead_transformer_xl": [
        *XL_SIZES,
        "--task=truncated_bptt_lm",
        "--mem-len=8",
        "--batch-size=2",
        "--criterion=adaptive_loss",
        "--ddp-backend=legacy_ddp",
        "--tokens-per-sample=4",
    ],
}


def held() -> dict[str, int]:
    """Return what this process holds: tensors, threads, open files and bytes of memory."""
    gc.collect()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    numbers = {name: len(list(Path(f"/proc/self/{name}").iterdir())) for name in ("task", "fd")}
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {**numbers, "tensors": tensors, "resident": resident}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("arch", MODELS)
@in_own_process
def test_updates_validations_and_checkpoints_leave_nothing_behind(arch, text_data, tmp_path):
    found = []
    train_step = Trainer.train_step

    def counted(trainer, *args, **settings):
        output = train_step(trainer, *args, **settings)
        if trainer.get_num_updates() % 8 == 7:  # far from the last validation
            found.append(held())
        return output

    Trainer.train_step = counted
    own = [f"--user-dir={PLUGIN}", f"--arch={arch}", f"--save-dir={tmp_path}"]
    sys.argv = ["fairseq-train", str(text_data), *own, *FLAGS, *MODELS[arch]]
    cli_main()
    assert len(found) == UPDATES // 8
    quarter = len(found) // 4
    # The first quarter is warm-up. A new epoch adds a worker for a moment, so the minimum counts.
    early = found[quarter : 2 * quarter]
    late = found[-quarter:]

    def least(some, name):
        return min(each[name] for each in some)

    for name in ("task", "fd", "tensors"):
        assert least(late, name) <= least(early, name), (name, found)
    assert least(late, "resident") < 1.02 * least(early, "resident"), found
