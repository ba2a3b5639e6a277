"""What is decoded is the model that was trained: for every normalizer, mixing and scope."""

import pytest
import torch
from fairseq.search import Sampling
from fairseq.sequence_generator import SequenceGenerator

from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.ops import NORMALIZERS
from mixhead_plugin.options import SCOPES
from tests.helpers import build, dictionary, shake, tokens

every_variant = [
    pytest.param(normalizer, mixing, scope, id=f"{normalizer}-{mixing}-{scope}")
    for normalizer in NORMALIZERS
    for mixing in HEAD_MIXINGS
    for scope in SCOPES
    if scope == "all" or normalizer != "softmax" or mixing != "none"  # the rest is stock and refused
]


def step_by_step(decoder, prefix, encoder_out=None, reorder=None):
    """Logits [B, T, V] of one step after another; `reorder(t)` may permute the hypotheses before step t."""
    state, logits = {}, []
    for t in range(prefix.shape[1]):
        logits.append(decoder(prefix[:, : t + 1], encoder_out=encoder_out, incremental_state=state)[0])
    return torch.cat(logits, 1), state


@pytest.mark.parametrize("normalizer, mixing, scope", every_variant)
def test_translation_step_by_step_is_the_full_pass(normalizer, mixing, scope):
    model = build("mixhead_transformer", attention_normalizer=normalizer, head_mixing=mixing, attention_scope=scope)
    shake(model).eval()
    source, prefix = tokens(padded=True), tokens(length=5)
    encoder_out = model.encoder(source)
    full = model.decoder(prefix, encoder_out=encoder_out)[0]
    torch.testing.assert_close(step_by_step(model.decoder, prefix, encoder_out)[0], full, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mixing", HEAD_MIXINGS)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_a_language_model_step_by_step_is_the_full_pass(normalizer, mixing):
    model = build("mixhead_transformer_lm", attention_normalizer=normalizer, head_mixing=mixing)
    shake(model).eval()
    prefix = tokens(length=6)
    torch.testing.assert_close(step_by_step(model.decoder, prefix)[0], model.decoder(prefix)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("normalizer, mixing, scope", [v for v in every_variant if v.values[2] in ("all", "cross")])
def test_reordered_hypotheses_go_on_as_if_they_had_always_been_there(normalizer, mixing, scope):
    model = build("mixhead_transformer", attention_normalizer=normalizer, head_mixing=mixing, attention_scope=scope)
    shake(model).eval()
    source, prefix = tokens(padded=True), tokens(length=4)
    encoder_out = model.encoder(source)
    _, state = step_by_step(model.decoder, prefix, encoder_out)
    order = torch.tensor([2, 0, 0])
    model.decoder.reorder_incremental_state_scripting(state, order)
    encoder_out = model.encoder.reorder_encoder_out(encoder_out, order)
    longer = torch.cat([prefix[order], tokens(length=1)], 1)
    step = model.decoder(longer, encoder_out=encoder_out, incremental_state=state)[0]
    full = model.decoder(longer, encoder_out=encoder_out)[0]
    torch.testing.assert_close(step, full[:, -1:], rtol=1e-4, atol=1e-4)


SEARCHES = [
    # what an ensemble does to its models' states depends on no normalizer
    pytest.param(name, ensemble, id=f"{name}{'-ensemble' * ensemble}", marks=[pytest.mark.slow] * (ensemble and i > 0))
    for ensemble in (False, True)
    for i, name in enumerate(NORMALIZERS)
]


@pytest.mark.parametrize("mixing", HEAD_MIXINGS)
@pytest.mark.parametrize(
    "flags", [{}, {"no_cross_attention": True, "cross_self_attention": True}], ids=["", "cross+self"]
)
@pytest.mark.parametrize("normalizer, ensemble", SEARCHES)
def test_beam_search_scores_its_hypotheses_as_the_full_pass_does(normalizer, mixing, flags, ensemble):
    model = build("mixhead_transformer", attention_normalizer=normalizer, head_mixing=mixing, **flags)
    shake(model).eval()
    words = dictionary()
    models = [model, shake(build("sigsoftmax_transformer", seed=2)).eval()][: 2 if ensemble else 1]
    source = tokens(padded=True).flip(1)  # translation pads its sources on the left
    source[:, -1] = words.eos()
    lengths = source.ne(words.pad()).sum(1)
    generator = SequenceGenerator(models, words, beam_size=4, max_len_b=8, normalize_scores=False)
    sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}
    for i, hypotheses in enumerate(generator.generate(models, sample)):
        for hypothesis in hypotheses:
            target = hypothesis["tokens"][None]
            prefix = torch.cat([torch.tensor([[words.eos()]]), target[:, :-1]], 1)
            sentence = source[i : i + 1, -lengths[i] :]
            logits = [m(sentence, lengths[i : i + 1], prefix)[0].log_softmax(-1) for m in models]
            scores = torch.stack(logits).logsumexp(0) - torch.tensor(len(models)).log()
            expected = scores.gather(2, target[..., None])[0, :, 0]
            torch.testing.assert_close(hypothesis["positional_scores"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scope", ["all", "self"])
def test_a_search_leaves_training_as_it_was(scope):
    model = shake(build("mixhead_transformer", attention_scope=scope)).eval()
    source, prefix = tokens(batch=4), tokens(batch=4, length=5)
    before = model(source, None, prefix)[0]
    generator = SequenceGenerator([model], dictionary(), beam_size=4, max_len_b=3)
    generator.generate([model], {"net_input": {"src_tokens": source, "src_lengths": torch.full((4,), 7)}})
    torch.testing.assert_close(model(source, None, prefix)[0], before)


def test_equal_sentences_are_no_beams():
    """A beam size from before, and as many equal sentences, which then part: sampling ends them one by one."""
    model = shake(build("mixhead_transformer")).eval()
    source = tokens(batch=1).repeat(4, 1)
    sample = {"net_input": {"src_tokens": source, "src_lengths": torch.full((4,), 7)}}
    SequenceGenerator([model], dictionary(), beam_size=4, max_len_b=3).generate([model], sample)
    search = Sampling(dictionary())
    generators = [SequenceGenerator([model], dictionary(), beam_size=1, max_len_b=20, search_strategy=search)]
    fresh = shake(build("mixhead_transformer")).eval()
    generators.append(SequenceGenerator([fresh], dictionary(), beam_size=1, max_len_b=20, search_strategy=search))
    found = []
    for generator, own in zip(generators, (model, fresh)):
        torch.manual_seed(2)
        found.append([best["tokens"].tolist() for best, *_ in generator.generate([own], sample)])
    assert len({len(hypothesis) for hypothesis in found[0]}) > 1
    assert found[0] == found[1]


def test_mixing_matters_to_these_tests():
    """Unmixed decoding of the same parameters, which the published code does, is far away."""
    model = shake(build("mixhead_transformer")).eval()
    source, prefix = tokens(), tokens(length=5)
    full = model(source, None, prefix)[0]
    for module in model.modules():
        if hasattr(module, "head_mixing"):
            module.head_mixing = None
    assert (model(source, None, prefix)[0] - full).abs().max() > 0.05
