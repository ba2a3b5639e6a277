"""examples/recall draws multi-query associative recall, and a small model learns it."""

import torch
from recall.run import TASK, WORDS, Model, draw
from synthetic import Setting, run


def solve(row):
    """Return the answers of a row by reading it: each key that came before, with the token behind it the first time."""
    known, answers = {}, []
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
    places = (tokens[:, 32:] == tokens[:, :1]).float().argmax(1) // 2  # of the first key's query, 0 .. 15
    law = torch.arange(1, 17.0) ** -0.9
    found = torch.bincount(places, minlength=16) / len(places)
    assert (found - law / law.sum()).abs().max() < 0.05


def test_no_state_sees_the_future():
    model = Model("B", 32, 64)
    tokens, _ = draw(64, torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 40:] = 0
    torch.testing.assert_close(model(tokens)[:, :40], model(changed)[:, :40])


def test_softmax_learns_and_uniform_weights_cannot(monkeypatch):
    monkeypatch.setattr("recall.run.TOKENS", 256)
    monkeypatch.setattr("recall.run.WORDS", 4)
    nats = {arm: run(TASK, Setting(arm, 32, 8, 0.01, 1.0, 110, 1))["nats an answer"] for arm in ("softmax", "uniform")}
    assert nats["softmax"] < 0.1 and nats["uniform"] > 0.3, nats
