"""Checkpoints that version 0.1.0 wrote still load and give the outputs that they gave then.

So do fairseq 0.9's.

`tests/checkpoints/<model>` holds a checkpoint of four updates, its dictionaries, and the outputs
for one sentence.
"""

import importlib
import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils, models, tasks
from fairseq.models.transformer import base_architecture

import mixhead_plugin
from tests.helpers import TINY

mixhead_plugin.register()

FOLDER = Path(__file__).parent / "checkpoints"
LANGUAGES = {"source_lang": "de", "target_lang": "en"}


@pytest.mark.parametrize("name", ["translation", "language_model", "bert"])
def test_a_checkpoint_of_the_version_before_gives_its_outputs(name):
    if name == "bert":
        importlib.import_module("bert").register()
    folder = FOLDER / name
    overrides = {"data": str(folder), **(LANGUAGES if name == "translation" else {})}
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(folder / "checkpoint.pt")], overrides
    )
    expected = json.loads((folder / "expected.json").read_text())
    tokens = torch.tensor(expected["tokens"])
    inputs = (tokens, torch.tensor([4, 6]), tokens) if name == "translation" else (tokens,)
    outputs = model.eval()(*inputs)[0][1]
    torch.testing.assert_close(outputs, torch.tensor(expected["outputs"]), atol=2e-5, rtol=0)


@pytest.mark.parametrize("arch", ["transformer", "mixhead_transformer"])
def test_a_file_laid_out_as_fairseq_0_9_wrote_it_gives_its_outputs(arch, tmp_path):
    """It was made by hand from fairseq's loader of old files.

    No file of that version was at hand.
    """
    flags = Namespace(
        arch="transformer",
        task="translation",
        data=str(FOLDER / "translation"),
        source_lang="de",
        target_lang="en",
        left_pad_source="True",  # text, as all flags were
        left_pad_target="False",
        raw_text=False,
        lazy_load=False,
        max_positions=64,  # of both sides
        ddp_backend="c10d",
        criterion="cross_entropy",
        optimizer="adam",
        adam_betas="(0.9, 0.98)",
        lr=[0.01],
        lr_scheduler="fixed",
        max_sentences=8,
        **TINY["transformer"],
    )
    known = Namespace(**vars(flags), max_source_positions=64, max_target_positions=64)
    base_architecture(known)
    model = models.build_model(known, tasks.setup_task(known)).eval()
    old = {
        "args": Namespace(**{**vars(flags), "arch": arch}),
        "model": {**model.state_dict(), "encoder.embed_positions._float_tensor": torch.zeros(1)},
        # without num_updates and lr_scheduler_state, which came later
        "optimizer_history": [{"criterion_name": "CrossEntropyCriterion", "best_loss": 3.0}],
        "last_optimizer_state": {},
        "extra_state": {"epoch": 1, "batch_offset": 0, "val_loss": 3.0},
    }
    torch.save(old, tmp_path / "old.pt")

    (loaded,), _, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(tmp_path / "old.pt")], {"dropout": 0.3}
    )
    inputs = (
        torch.tensor([[5, 6, 2], [1, 7, 2]]),
        torch.tensor([3, 2]),
        torch.tensor([[2, 6], [2, 5]]),
    )
    assert loaded.encoder.dropout_module.p == 0.3
    torch.testing.assert_close(loaded.eval()(*inputs)[0], model(*inputs)[0])
