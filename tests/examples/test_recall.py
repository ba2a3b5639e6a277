"""examples/recall draws multi-query associative recall, and a small model learns it."""

import pytest
import torch
import torch.nn.functional as F
from recall.run import TASK, WIDTH, WORDS, Model, WideAttention, attention_of, draw
from synthetic import Setting, run


def solve(row):
    """Return the answers of a row by reading it.

    An answer is the token behind the key the first time.
    """
    known = {}
    answers = []
    for place, token in enumerate(row):
        if 1 <= token <= WORDS:
            answers.append(known[token] - WORDS - 1 if token in known else -1)
            known.setdefault(token, row[place + 1] if place + 1 < len(row) else None)
        else:
            answers.append(-1)
    return answers


def test_the_answers_are_those_of_a_reader():
    tokens, due = draw(64, torch.Generator().manual_seed(0))
    assert tokens.shape == due.shape == (16, 64) and ((due >= 0).sum(1) == 16).all()
    assert due.tolist() == [solve(row) for row in tokens.tolist()]


def test_small_distances_are_frequent():
    """The query of the first key is drawn first, so it follows the power law itself."""
    tokens = torch.cat([draw(64, torch.Generator().manual_seed(seed))[0] for seed in range(60)])
    # of the first key's query, 0 .. 15
    places = (tokens[:, 32:] == tokens[:, :1]).float().argmax(1) // 2
    law = torch.arange(1, 17.0) ** -0.9
    found = torch.bincount(places, minlength=16) / len(places)
    assert (found - law / law.sum()).abs().max() < 0.05


@pytest.mark.parametrize("attention", TASK.attentions)
def test_no_state_sees_the_future(attention):
    model = Model(attention, 32, 64)
    tokens, _ = draw(64, torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 40:] = 0
    torch.testing.assert_close(model(tokens)[:, :40], model(changed)[:, :40])


@pytest.mark.parametrize("query_size, value_size", [(4, 4), (4, WIDTH), (WIDTH, 4)])
def test_a_wide_attention_is_torchs_attention_with_its_projections(query_size, value_size):
    heads = 16
    wide = WideAttention(heads, query_size, value_size).double()
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    q, k, v = (
        F.linear(x, projection.weight, projection.bias).view(2, 9, heads, size).transpose(1, 2)
        for projection, size in (
            (wide.q_proj, query_size),
            (wide.k_proj, query_size),
            (wide.v_proj, value_size),
        )
    )
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = wide.out_proj(attended.transpose(1, 2).reshape(2, 9, heads * value_size))
    torch.testing.assert_close(wide(x, x, x)[0], expected)


@pytest.mark.parametrize("attention", ["wide-values", "wide-queries"])
def test_a_wide_attention_starts_with_outputs_as_large_as_softmax_has(attention):
    torch.manual_seed(0)
    x = torch.randn(64, 32, WIDTH)
    usual, wide = (
        float(attention_of(name, 4)(x, x, x)[0].std()) for name in ("softmax", attention)
    )
    assert wide / usual == pytest.approx(1, abs=0.15)


def test_softmax_learns_and_uniform_weights_cannot(monkeypatch):
    monkeypatch.setattr("recall.run.TOKENS", 256)
    monkeypatch.setattr("recall.run.WORDS", 4)
    nats = {
        name: run(TASK, Setting(name, 32, 8, 0.01, 1.0, 110, 1))["nats an answer"]
        for name in ("softmax", "uniform")
    }
    assert nats["softmax"] < 0.1 and nats["uniform"] > 0.3, nats
