"""Decoding computes the trained model for every entry of the tables.

It does so by steps, reordered, and by beam search.
"""

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator

from mixhead_plugin.fairseq.options import SCOPES
from tests.fairseq.models.cases import ENTRIES, POSITIONS, SCOPED, attentions, shown, step_by_step
from tests.helpers import build, dictionary, shake, tokens

# tests/fairseq/test_attention.py has every entry of the tables, a module at a time.
CHOSEN = [*SCOPED, *POSITIONS, {"head_mixing": "position-wise"}]
CHOSEN.append({"attention_sink": "learned", "attention_gate": "head", "feature_mixing": "shared"})
OTHERS = [pytest.param(flags, marks=pytest.mark.slow) for flags in ENTRIES if flags not in CHOSEN]


@pytest.mark.parametrize("flags", [*CHOSEN, *OTHERS], ids=shown)
def test_translation_by_steps_is_the_full_pass_also_with_reordered_hypotheses(flags):
    model = shake(build("mixhead_transformer", **{"head_dim": 4, **flags})).double().eval()
    source = tokens(padded=True)
    prefix = tokens(length=4)
    encoder_out = model.encoder(source)
    steps, state = step_by_step(model.decoder, prefix, encoder_out)
    torch.testing.assert_close(steps, model.decoder(prefix, encoder_out=encoder_out)[0])
    if "cross" not in SCOPES[flags.get("attention_scope", "all")]:
        return  # fairseq's own cross-attention reorders only the hypotheses of a beam
    order = torch.tensor([2, 0, 0])
    model.decoder.reorder_incremental_state_scripting(state, order)
    encoder_out = model.encoder.reorder_encoder_out(encoder_out, order)
    longer = torch.cat([prefix[order], tokens(length=1)], 1)
    step = model.decoder(longer, encoder_out=encoder_out, incremental_state=state)[0]
    torch.testing.assert_close(step, model.decoder(longer, encoder_out=encoder_out)[0][:, -1:])


def test_a_language_model_by_steps_is_the_full_pass():
    model = shake(build("mixhead_transformer_lm")).double().eval()
    prefix = tokens(length=6)
    torch.testing.assert_close(step_by_step(model.decoder, prefix)[0], model.decoder(prefix)[0])


def assert_scores_are_those_of_the_full_pass(models):
    """Search with `models` as an ensemble; compare the scores of every hypothesis."""
    words = dictionary()
    source = tokens(padded=True).flip(1)  # translation pads its sources on the left
    source[:, -1] = words.eos()
    lengths = source.ne(words.pad()).sum(1)
    generator = SequenceGenerator(models, words, beam_size=4, max_len_b=8, normalize_scores=False)
    sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}
    found = generator.generate(models, sample)
    assert len(found) == len(source) and all(len(hypotheses) == 4 for hypotheses in found)
    for i, hypotheses in enumerate(found):
        for hypothesis in hypotheses:
            target = hypothesis["tokens"][None]
            prefix = torch.cat([torch.tensor([[words.eos()]]), target[:, :-1]], 1)
            sentence = source[i : i + 1, -lengths[i] :]
            logits = [m(sentence, lengths[i : i + 1], prefix)[0].log_softmax(-1) for m in models]
            scores = torch.stack(logits).logsumexp(0) - torch.tensor(len(models)).log()
            expected = scores.gather(2, target[..., None])[0, :, 0]
            torch.testing.assert_close(
                hypothesis["positional_scores"], expected, rtol=1e-4, atol=1e-4
            )


# Neither normalizer nor mixing changes what a search keeps of a hypothesis; the steps above have
# all of them.
@pytest.mark.parametrize("flags", [*SCOPED, *POSITIONS], ids=shown)
def test_beam_search_scores_its_hypotheses_as_the_full_pass_does(flags):
    assert_scores_are_those_of_the_full_pass(
        [shake(build("mixhead_transformer", **{"head_dim": 4, **flags})).eval()]
    )


@pytest.mark.parametrize("mixing", ["none", "position-wise"])
def test_beam_search_of_joint_attention_and_of_an_ensemble(mixing):
    joint = {"no_cross_attention": True, "cross_self_attention": True, "head_mixing": mixing}
    models = [shake(build("mixhead_transformer", **joint)).eval()]
    assert_scores_are_those_of_the_full_pass(models)
    assert_scores_are_those_of_the_full_pass(
        [*models, shake(build("sigsoftmax_transformer", seed=2)).eval()]
    )


def test_a_search_keeps_the_keys_of_a_sentence_once_not_once_a_beam():
    model = build("mixhead_transformer")
    model.set_beam_size(4)
    beams = {
        (module.encoder_decoder_attention, module.beam_size) for module in attentions(model.decoder)
    }
    assert beams == {(True, 4), (False, 1)}
