"""Configs and trainers, as fairseq's functions for checkpoints take them, and data for epochs."""

from pathlib import Path
from unittest.mock import MagicMock

import torch
from fairseq.data import FairseqDataset
from omegaconf import OmegaConf

# What fairseq reads when it saves: here checkpoint_best.pt, and its copy checkpoint_last.pt.
SAVES_EACH_EPOCH = {
    "best_checkpoint_metric": "loss",
    "maximize_best_checkpoint_metric": False,
    "no_save": False,
    "no_epoch_checkpoints": True,
    "no_last_checkpoints": False,
    "write_checkpoints_asynchronously": False,
    "save_interval_updates": 0,
    "keep_best_checkpoints": 0,
    "keep_interval_updates": -1,
    "keep_last_epochs": -1,
}


def config(folder, **flags):
    resets = {
        f"reset_{name}": False for name in ("dataloader", "meters", "optimizer", "lr_scheduler")
    }
    cfg = {
        "save_dir": str(folder),
        "restore_file": "checkpoint_last.pt",
        "finetune_from_model": None,
        **flags,
    }
    return OmegaConf.create({**cfg, "optimizer_overrides": "{}", **resets})


def trainer_that_saves(saved):
    """Return a trainer that appends the names of its checkpoints to `saved`."""
    trainer = MagicMock(
        is_fsdp=False, model=torch.nn.Linear(1, 1), checkpoint_suffix="", data_parallel_rank=0
    )
    trainer.save_checkpoint.side_effect = lambda path, _: saved.append(Path(path).name)
    trainer.load_checkpoint.return_value = None
    return trainer


class SaysTheEpoch(FairseqDataset):
    """Data that depend on the epoch, like the masks of masked_lm."""

    can_reuse_epoch_itr_across_epochs = True
    epoch = 1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return self.epoch

    def __len__(self):
        return 3

    def collater(self, items):
        return items
