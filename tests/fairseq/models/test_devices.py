"""Run models, criteria, beam search and analysis on a device that is not the CPU.

Nothing may stay behind.
"""

import dataclasses

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator

from mixhead_plugin.fairseq.analysis import loading
from mixhead_plugin.fairseq.analysis.command import main
from mixhead_plugin.ops import NORMALIZERS
from mixhead_plugin.parts.head_mixing import HEAD_MIXINGS
from tests.covering import each_once
from tests.fairseq.criterions.cases import CASES, criterion, model, translation_batch
from tests.helpers import build, dictionary, shake, tokens
from tests.second_device import DEVICE, Elsewhere, Far, move
from tests.transformer_xl import build_xl, text

EXTRAS = [{}, {"relative_position": "rotary"}, {"relative_position": "t5", "relative_gain": 4}]
EXTRAS += [{"score_mixing": "position-wise", "attention_gate": "element"}]
IMPLS = ["reference", "blockwise"]
# all end at once: fairseq then resizes no tensor in place
BEAM = dict(beam_size=3, min_len=8, max_len_b=8)


def test_tensors_of_both_devices_do_not_meet():
    with Elsewhere(), pytest.raises(RuntimeError, match="tensors on meta and on the CPU"):
        move(torch.ones(2)) + torch.ones(2)


@each_once(name=CASES, mixing=HEAD_MIXINGS, normalizer=NORMALIZERS, impl=IMPLS, extra=EXTRAS)
def test_models_and_criteria_stay_on_their_device(name, mixing, normalizer, impl, extra):
    flags = dict(head_mixing=mixing, attention_normalizer=normalizer, attention_impl=impl, **extra)
    made = model(name, **flags, dropout=0.1, attention_dropout=0.1)
    sample = CASES[name].batch()
    weight = 0.1 if HEAD_MIXINGS[mixing].orthogonal else 0.0
    loss_of = criterion(f"orthogonal_{name}", orthogonal_weight=weight, rank_weight=0.1)
    with Elsewhere():
        loss = move(loss_of)(move(made), move(sample))[0]
        loss.sum().backward()
    gradients = [parameter.grad for parameter in made.parameters() if parameter.grad is not None]
    assert (
        isinstance(loss, Far)
        and gradients
        and all(isinstance(gradient, Far) for gradient in gradients)
    )


@pytest.mark.parametrize("arch", ["mixhead_transformer_xl", "mixhead_synthesizer_lm"])
def test_models_that_fairseq_lacks_stay_on_their_device(arch):
    if arch == "mixhead_transformer_xl":
        made = build_xl()
        source = text(12)
        options = {"window": 0}
    else:
        made = shake(build(arch))
        source = tokens()
        options = {}
    right = made.eval()(source, **options)[0]
    with Elsewhere():
        found = move(made)(move(source), **options)[0]
        found.sum().backward()
    assert isinstance(found, Far)
    torch.testing.assert_close(found.numbers, right)


@pytest.mark.parametrize("extra", EXTRAS)  # mixings and normalizers are those of the test above
def test_beam_search_stays_on_its_device(extra):
    made = shake(build("mixhead_transformer", **extra)).eval()
    sample = translation_batch()
    right = SequenceGenerator([made], dictionary(), **BEAM).generate([made], sample)
    with Elsewhere():
        generator = move(SequenceGenerator([made], dictionary(), **BEAM))
        found = generator.generate([made], move(sample))
    for one, other in zip(found, right, strict=True):
        assert [hypothesis["tokens"].tolist() for hypothesis in one] == [
            h["tokens"].tolist() for h in other
        ]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["mixing", "importance", "spectrum", "ablate"])
def test_analysis_stays_on_its_device(
    command, translation_checkpoint, translation_data, tmp_path, monkeypatch
):
    load = loading.load
    batches = loading.batches

    def load_elsewhere(*arguments):
        loaded = load(*arguments)
        return dataclasses.replace(loaded, model=move(loaded.model), device=DEVICE)

    monkeypatch.setattr(loading, "load", load_elsewhere)
    monkeypatch.setattr(
        loading, "batches", lambda *args, **options: map(move, batches(*args, **options))
    )
    with Elsewhere():
        main(
            [
                command,
                str(translation_checkpoint),
                f"--data={translation_data}",
                f"--out={tmp_path}",
                "--cpu",
            ]
        )
    assert any(tmp_path.iterdir())
