"""The published code's decoding, which reproduce.py compares with: unmixed where it goes step by step, nowhere else."""

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq.tasks import TASK_REGISTRY

from tests.helpers import build, shake, tokens

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "reproduction" / "unmixed_decoding"


@pytest.fixture(scope="module")
def unmixed_decoding():
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("unmixed_decoding", FOLDER / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["unmixed_decoding"] = module
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def generator(unmixed_decoding, monkeypatch, model):
    """What fairseq-generate asks the task for."""
    task = unmixed_decoding.UnmixedTranslation.__new__(unmixed_decoding.UnmixedTranslation)
    monkeypatch.setattr(unmixed_decoding.TranslationTask, "build_generator", lambda self, models, args: models)
    assert task.build_generator([model], Namespace()) == [model]


def step_by_step(decoder, prefix, encoder_out):
    """Logits [B, T, V] of one step after another"""
    state, logits = {}, []
    for t in range(prefix.shape[1]):
        logits.append(decoder(prefix[:, : t + 1], encoder_out=encoder_out, incremental_state=state)[0])
    return torch.cat(logits, 1)


@pytest.mark.parametrize("scope", ["self", "all"])
@pytest.mark.parametrize("mixing", ["position-independent", "position-wise"])
def test_step_by_step_the_decoders_self_attention_does_not_mix(mixing, scope, unmixed_decoding, monkeypatch):
    model = build("mixhead_transformer", head_mixing=mixing, attention_scope=scope)
    shake(model).eval()
    source, prefix = tokens(padded=True), tokens(length=5)
    encoder_out = model.encoder(source)
    mixed = model.decoder(prefix, encoder_out=encoder_out)[0]
    torch.testing.assert_close(step_by_step(model.decoder, prefix, encoder_out), mixed, rtol=1e-4, atol=1e-4)

    generator(unmixed_decoding, monkeypatch, model)
    steps = step_by_step(model.decoder, prefix, encoder_out)
    torch.testing.assert_close(model.decoder(prefix, encoder_out=encoder_out)[0], mixed, rtol=0, atol=0)
    torch.testing.assert_close(model.encoder(source)["encoder_out"], encoder_out["encoder_out"], rtol=0, atol=0)
    assert (steps - mixed).abs().max() > 1e-2

    # its decoder with the identity: that of a model which was never mixed there
    for layer in model.decoder.layers:
        state = layer.self_attn.head_mixing.identity()
        layer.self_attn.head_mixing.load_state_dict(state)
    unmixed = model.decoder(prefix, encoder_out=encoder_out)[0]
    torch.testing.assert_close(steps, unmixed, rtol=1e-4, atol=1e-4)


def test_another_model_of_the_process_still_mixes(unmixed_decoding, monkeypatch):
    models = [shake(build("mixhead_transformer", head_mixing="position-wise")).eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    generator(unmixed_decoding, monkeypatch, models[0])
    source, prefix = tokens(padded=True), tokens(length=4)
    encoder_out = models[1].encoder(source)
    full = models[1].decoder(prefix, encoder_out=encoder_out)[0]
    torch.testing.assert_close(step_by_step(models[1].decoder, prefix, encoder_out), full, rtol=1e-4, atol=1e-4)


def test_the_plugin_does_not_know_it(unmixed_decoding):
    assert TASK_REGISTRY["unmixed_translation"] is unmixed_decoding.UnmixedTranslation
    for path in (ROOT / "mixhead_plugin").rglob("*.py"):
        assert "unmixed" not in path.read_text(), path
