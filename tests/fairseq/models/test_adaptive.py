"""Test the adaptive input and softmax of Transformer-XL."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from mixhead_plugin.fairseq.models.transformer_xl.adaptive import (
    AdaptiveEmbedding,
    BandedAdaptiveSoftmax,
)
from tests.covering import covering, each_once

DIM = 8
WORDS = 12
BANDS = [[12], [4, 7, 12]]

every_case = covering(cutoffs=BANDS, div_val=[1, 2])


def modules(cutoffs, div_val=2, dtype=torch.float64):
    embedding = AdaptiveEmbedding(cutoffs, DIM, div_val)
    softmax = BandedAdaptiveSoftmax(embedding)
    for parameter in softmax.parameters():
        torch.nn.init.normal_(parameter)
    return embedding.to(dtype), softmax.to(dtype)


def band_of(word, cutoffs):
    """Return the band of a word, and its place there."""
    band = sum(word >= cutoff for cutoff in cutoffs)
    first = 0 if band == 0 else cutoffs[band - 1]
    return band, word - first


def log_prob(softmax, x, word):
    """Return one word's log-probability by definition.

    The first band's words and the other bands share a softmax.
    """
    band, place = band_of(word, softmax.cutoff)

    def projected(part):
        return x if part.projection is None else part.projection.weight @ x

    head = softmax.head
    scores = head.weight @ projected(head) + head.bias
    if head.cluster_weight is not None:
        scores = torch.cat([scores, head.cluster_weight @ projected(head) + head.cluster_bias])
    shares = scores - torch.logsumexp(scores, 0)
    if band == 0:
        return shares[place]
    tail = softmax.tail[band - 1]
    scores = tail.weight @ projected(tail) + tail.bias
    return shares[softmax.cutoff[0] + band - 1] + scores[place] - torch.logsumexp(scores, 0)


def log_probs(softmax, x):
    """Return the log-probabilities of all words, one by one."""
    return torch.stack([log_prob(softmax, x, word) for word in range(WORDS)])


@every_case
def test_every_word_has_its_row_scaled(cutoffs, div_val):
    embedding, _ = modules(cutoffs, div_val)
    rows = embedding(torch.arange(WORDS)[None])[0]
    for word in range(WORDS):
        band, place = band_of(word, cutoffs)
        row = embedding.bands[band].weight[place]
        assert row.numel() == DIM // div_val**band
        if embedding.projections:
            row = embedding.projections[band].weight @ row
        torch.testing.assert_close(rows[word], row * DIM**0.5)
    assert len(embedding.projections) == (len(cutoffs) if div_val > 1 else 0)


@every_case
def test_log_probabilities_are_those_of_the_definition(cutoffs, div_val):
    _, softmax = modules(cutoffs, div_val)
    x = torch.randn(2, 4, DIM, dtype=torch.float64)
    target = torch.tensor([[0, 3, 4, 5], [3, 11, 0, 7]])
    every = softmax.get_log_prob(x, None)
    found = softmax.get_log_prob(x, target)
    expected = torch.stack([log_probs(softmax, row) for row in x.flatten(0, 1)])
    torch.testing.assert_close(every.flatten(0, 1), expected)
    # with targets, other bands than theirs and the first are left out
    torch.testing.assert_close(found[..., : cutoffs[0]], every[..., : cutoffs[0]])
    for start, stop in pairwise(cutoffs):
        inside = (target >= start) & (target < stop)
        torch.testing.assert_close(found[inside][:, start:stop], every[inside][:, start:stop])
        assert (found[~inside][:, start:stop] == -torch.inf).all()


@covering(
    cutoffs=BANDS,
    div_val=[1, 2],
    targets=[[[0, 3, 4, 5], [3, 11, 0, 7]], [[0, 3, 2, 0], [3, 0, 0, 1]]],
)
def test_all_losses_and_their_gradients_agree(cutoffs, div_val, targets):
    """Compare fairseq's adaptive loss, its cross entropy and the definition.

    Some bands may have no target.
    """
    _, softmax = modules(cutoffs, div_val)
    x = torch.randn(2, 4, DIM, dtype=torch.float64, requires_grad=True)
    target = torch.tensor(targets)
    logits, parts = softmax(x, target)
    adaptive = 0
    for scores, part in zip(logits, parts):
        if part is not None:
            adaptive = adaptive + F.cross_entropy(scores, part, reduction="sum")
    log_probabilities = softmax.get_log_prob(x, target).flatten(0, 1)
    plain = F.nll_loss(log_probabilities, target.flatten(), reduction="sum")
    rows = zip(x.flatten(0, 1), target.flatten().tolist())
    expected = -sum(log_prob(softmax, row, word) for row, word in rows)
    sources = [x, *softmax.parameters()]
    wanted = torch.autograd.grad(expected, sources, allow_unused=True, materialize_grads=True)
    for loss in (adaptive, plain):
        torch.testing.assert_close(loss, expected)
        found = torch.autograd.grad(loss, sources, allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(found, wanted)


def test_every_parameter_has_a_gradient_whatever_the_words():
    embedding, softmax = modules([4, 7, 12])
    words = torch.tensor([[0, 1, 2]])
    softmax.get_log_prob(embedding(words), words).gather(2, words[..., None]).sum().backward()
    assert all(
        parameter.grad is not None for parameter in [*embedding.parameters(), *softmax.parameters()]
    )


@each_once(cutoffs=[[29], [7, 29], [7, 20, 29]], token=[-1, 29, 100])
def test_a_token_of_another_vocabulary_is_an_error(cutoffs, token):
    embedding, *_ = modules(cutoffs)
    with pytest.raises(IndexError):
        embedding(torch.tensor([[1, token]]))


def test_words_are_tied_and_projections_are_not():
    embedding, softmax = modules([4, 7, 12])
    for band, part in zip(embedding.bands, [softmax.head, *softmax.tail], strict=True):
        assert band.weight is part.weight
    assert not {id(p) for p in embedding.projections.parameters()} & {
        id(p) for p in softmax.parameters()
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gives_probabilities_in_float32(dtype):
    """Errors are at most twice those of the formula in half precision."""
    embedding, softmax = modules([4, 7, 12], dtype=dtype)
    words = torch.arange(WORDS)[None]
    hidden = embedding(words)
    assert hidden.dtype == dtype
    found = softmax.get_log_prob(hidden, None)
    logits, _ = softmax(hidden, words)
    for each in (found, *logits):
        assert each.dtype == torch.float32
    plain = torch.stack([log_probs(softmax, row) for row in hidden[0]])
    exact = copy.deepcopy(softmax).double().get_log_prob(hidden.double(), None)
    assert (found - exact).abs().max() <= 2 * (plain - exact).abs().max()


def test_projections_may_be_in_half_precision_under_autocast():
    embedding, _ = modules([4, 7, 12], dtype=torch.float32)
    words = torch.arange(WORDS)[None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = embedding(words)
    exact = copy.deepcopy(embedding).double()(words)
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() <= 2 * (embedding.bfloat16()(words) - exact).abs().max()
