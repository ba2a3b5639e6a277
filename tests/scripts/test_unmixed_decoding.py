"""Small table 4 compares with the published code's decoding, which does not mix step by step."""

import importlib.util
from argparse import Namespace

import pytest
import torch
from recipes import ROOT

from tests.fairseq.models.cases import step_by_step
from tests.helpers import build, shake, tokens

FOLDER = ROOT / "examples" / "multi30k_de_en" / "unmixed_decoding"


@pytest.fixture
def unmixed_decoding():
    spec = importlib.util.spec_from_file_location("unmixed_decoding", FOLDER / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("mixing", ["position-independent", "position-wise"])
def test_step_by_step_the_decoders_self_attention_does_not_mix(
    mixing, unmixed_decoding, monkeypatch
):
    model = build("mixhead_transformer", head_mixing=mixing)
    shake(model).eval()
    source = tokens(padded=True)
    prefix = tokens(length=5)
    encoder_out = model.encoder(source)
    mixed = model.decoder(prefix, encoder_out=encoder_out)[0]

    task = unmixed_decoding.UnmixedTranslation.__new__(unmixed_decoding.UnmixedTranslation)
    monkeypatch.setattr(
        unmixed_decoding.TranslationTask, "build_generator", lambda self, models, args: models
    )
    assert task.build_generator([model], Namespace()) == [model]
    steps, _ = step_by_step(model.decoder, prefix, encoder_out)
    torch.testing.assert_close(
        model.decoder(prefix, encoder_out=encoder_out)[0], mixed, rtol=0, atol=0
    )
    torch.testing.assert_close(
        model.encoder(source)["encoder_out"], encoder_out["encoder_out"], rtol=0, atol=0
    )
    assert (steps - mixed).abs().max() > 1e-2

    for layer in model.decoder.layers:  # the identity mixes nothing
        layer.self_attn.head_mixing.load_state_dict(layer.self_attn.head_mixing.identity())
    unmixed = model.decoder(prefix, encoder_out=encoder_out)[0]
    torch.testing.assert_close(steps, unmixed, rtol=1e-4, atol=1e-4)
