"""The Synthesizer is a language model of fairseq."""

from argparse import Namespace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from fairseq.models import build_model
from fairseq.tasks.language_modeling import LanguageModelingTask

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.models.synthesizer.attention import SYNTHESIZERS
from mixhead_plugin.parts.head_mixing import HEAD_MIXINGS
from tests.covering import each_once
from tests.fairseq.criterions.cases import criterion, lm_batch
from tests.fairseq.models.cases import (
    assert_scored_as_by_the_full_pass,
    attentions,
    continuations,
)
from tests.helpers import OWN, build, shake, task, tokens

ARCH = "mixhead_synthesizer_lm"
LONGEST = OWN["synthesizer_lm"]["max_target_positions"]


def test_sizes_come_from_their_flags_or_from_the_maximal_length():
    def shapes(**flags):
        return [
            tuple(p.shape)
            for n, p in build(ARCH, **flags).named_parameters()
            if "0.self_attn.synthesizer." in n
        ]

    assert shapes() == [(64, 4), (16, 16), (16,)]
    factors = {"synthesizer": "factorized-dense"}
    assert [s for s in shapes(**factors) if 16 not in s] == [(8, 4), (8, 4)]
    assert [s for s in shapes(**factors, synthesizer_factor=10) if 16 not in s] == [(10, 4), (7, 4)]
    assert shapes(synthesizer="factorized-random") == [(4, 64, 8), (4, 64, 8)]
    assert shapes(synthesizer="factorized-random", synthesizer_rank=3) == [(4, 64, 3), (4, 64, 3)]


@pytest.mark.parametrize(
    "flags, length",
    [
        ({"max_target_positions": 40}, 40),
        ({"max_target_positions": None}, 32),
        ({"max_target_positions": None, "add_bos_token": True}, 33),
    ],
)
def test_the_maximal_length_is_that_of_the_tasks_blocks_unless_it_is_given(flags, length):
    model = build(ARCH, **flags)
    assert (
        {attention.max_length for attention in attentions(model)}
        == {length}
        == {model.max_positions()}
    )
    assert model(tokens(batch=1, length=length))[0].shape[1] == length
    with pytest.raises(OptionError, match=f"--tokens-per-sample: an input has {length + 1} tokens"):
        model(tokens(batch=1, length=length + 1))


@each_once(synthesizer=SYNTHESIZERS, mixing=HEAD_MIXINGS)
def test_generation_scores_its_hypotheses_as_the_full_pass_does_and_stops_in_time(
    synthesizer, mixing
):
    model = shake(
        build(ARCH, synthesizer=synthesizer, head_mixing=mixing, max_target_positions=9)
    ).eval()
    for hypothesis in continuations(model, max_len_b=50):
        assert len(hypothesis["tokens"]) <= 9
        assert_scored_as_by_the_full_pass(model, hypothesis)


@pytest.mark.parametrize(
    "synthesizer", [n for n, kind in SYNTHESIZERS.items() if n != "fixed-random"]
)
def test_the_rank_penalty_reaches_the_scores(synthesizer):
    model = build("sigsoftmax_synthesizer_lm", synthesizer=synthesizer)
    sample = lm_batch()
    gradients = []
    for weight in (0.0, 1.0):
        model.zero_grad()
        criterion("orthogonal_cross_entropy", orthogonal_weight=0.0, rank_weight=weight)(
            model, sample
        )[0].backward()
        gradients.append([p.grad.clone() for p in attentions(model)[0].synthesizer.parameters()])
    assert all(not torch.allclose(a, b) for a, b in zip(*gradients))


def test_evaluation_refuses_what_it_would_leave_out(monkeypatch):
    """Refuse where fairseq-eval-lm would only warn, skip long inputs and print a perplexity."""
    asked = LanguageModelingTask(
        SimpleNamespace(tokens_per_sample=1024, future_target=False), task().target_dictionary
    )
    asked.get_batch_iterator = mock.MagicMock()
    build_model(Namespace(arch=ARCH, **OWN["synthesizer_lm"]), asked)
    # in a program of one's own
    assert asked.eval_lm_dataloader(SimpleNamespace(sizes=np.array([LONGEST + 1])))
    monkeypatch.setattr("__main__.cli_main", None, raising=False)
    assert asked.eval_lm_dataloader(SimpleNamespace(sizes=np.array([3, LONGEST])))
    with pytest.raises(OptionError, match=r"^--tokens-per-sample 1024: "):
        asked.eval_lm_dataloader(dataset=SimpleNamespace(sizes=np.array([3, LONGEST + 1])))
    del asked.mixhead_longest_input  # another model has positions alone
    assert asked.eval_lm_dataloader(SimpleNamespace(sizes=np.array([16])), max_positions=16)
    with pytest.raises(
        OptionError, match=r"^--tokens-per-sample 1024: .* 17 tokens, must be at most 16"
    ):
        asked.eval_lm_dataloader(SimpleNamespace(sizes=np.array([3, 17])), max_positions=16)
