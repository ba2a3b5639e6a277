"""Checkpoints that version 0.1.0 wrote still load and give the outputs that they gave then.

`tests/checkpoints/<model>` holds a checkpoint of four updates, its dictionaries, and the outputs for one sentence.
"""

import importlib
import json
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils

import mixhead_plugin

mixhead_plugin.register()

FOLDER = Path(__file__).parent / "checkpoints"
LANGUAGES = {"source_lang": "de", "target_lang": "en"}


@pytest.mark.parametrize("name", ["translation", "language_model", "bert"])
def test_a_checkpoint_of_the_version_before_gives_its_outputs(name):
    if name == "bert":
        importlib.import_module("bert").register()
    folder = FOLDER / name
    overrides = {"data": str(folder), **(LANGUAGES if name == "translation" else {})}
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(folder / "checkpoint.pt")], overrides)
    expected = json.loads((folder / "expected.json").read_text())
    tokens = torch.tensor(expected["tokens"])
    inputs = (tokens, torch.tensor([4, 6]), tokens) if name == "translation" else (tokens,)
    outputs = model.eval()(*inputs)[0][1]
    torch.testing.assert_close(outputs, torch.tensor(expected["outputs"]), atol=2e-5, rtol=0)
