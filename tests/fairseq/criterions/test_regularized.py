"""Compare the orthogonal_* criteria with fairseq's own and the formulas."""

import itertools

import pytest
import torch
from fairseq.logging import metrics

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.criterions.penalties import PENALTIES
from tests.covering import covering, each_once
from tests.fairseq.criterions.cases import (
    CASES,
    PAD,
    criterion,
    mixing_of_each,
    model,
    real_queries,
)
from tests.helpers import build, shake

MIXINGS = ["position-independent", "position-wise"]


def distance_from_orthogonal(made, upstream, sample):
    """Return the sum over attentions of the mean over real positions of ||M^T M - I||^2."""
    total = 0.0
    for matrices, real in mixing_of_each(made, sample, lambda: criterion(upstream)(made, sample)):
        at_positions = [(m.T @ m - torch.eye(len(m))).square().sum() for m in matrices[real]]
        total = total + sum(at_positions) / len(at_positions)
    return total


def weights_of_call(attention, query, key, attn_mask=None, key_padding_mask=None):
    """Return softmax(scale * Q K^T + masks), [B, H, Nq, Nk], of inputs [N, B, C]."""

    def heads(features):
        shape = (attention.num_heads, attention.head_dim)
        return features.unflatten(2, shape).permute(1, 2, 0, 3)  # [B, H, N, D]

    q = heads(attention.q_proj(query))
    k = heads(attention.k_proj(key))
    scores = q @ k.mT / attention.head_dim**0.5
    if attn_mask is not None:
        scores = scores + attn_mask
    if key_padding_mask is not None:
        hidden = key_padding_mask[:, None, None].bool()
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1)


def unmixed_weights(made, sample, run):
    """Return the weights of every attention in `run()` before they are mixed.

    Beside them stand its real queries, [B, Nq].
    """
    found = []
    handles = []
    for name, module in made.named_modules():
        if not isinstance(module, MixheadAttention):
            continue
        real = real_queries(name, sample)

        def remember(attention, args, kwargs, output, real=real):
            # query and key are given by their places or by their names
            given = {**dict(zip(("query", "key"), args)), **kwargs}
            names = ("query", "key", "attn_mask", "key_padding_mask")
            given = {name: value for name, value in given.items() if name in names}
            found.append((weights_of_call(attention, **given), real))

        handles.append(module.register_forward_hook(remember, with_kwargs=True))
    run()
    for handle in handles:
        handle.remove()
    return found


def rank_by_definition(made, upstream, sample):
    """Return the rank penalty by definition, summed over attentions.

    It is the mean over sentences and pairs of heads i, j of ||P_i P_j^T||^2 + ||P_i^T P_j||^2.
    """
    total = 0.0
    for weights, real in unmixed_weights(made, sample, lambda: criterion(upstream)(made, sample)):
        for b, matrices in enumerate(weights):
            p = matrices[:, real[b]]  # [H, real queries, Nk]
            pairs = list(itertools.combinations(p, 2))
            for one, other in pairs:
                norms = (one @ other.T).square().sum() + (one.T @ other).square().sum()
                total = total + norms / len(pairs) / len(weights)
    return total


FORMULAS = {"orthogonal": (0.3, distance_from_orthogonal), "rank": (0.01, rank_by_definition)}


def weights_of(name, weight):
    """Return the flags that give one penalty a weight, and the others none."""
    flags = {f"{other}_weight": 0.0 for other in PENALTIES}
    flags[f"{name}_weight"] = weight
    return flags


def gradients(loss, made):
    """Return the gradient of each parameter by name; 0 where the loss does not depend on it."""
    parameters = dict(made.named_parameters())
    found = torch.autograd.grad(
        loss, list(parameters.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(parameters, found))


@covering(upstream=CASES, mixing=MIXINGS, penalty=PENALTIES)
def test_loss_and_gradients_are_fairseqs_plus_the_weighted_formula(upstream, mixing, penalty):
    made = model(upstream, head_mixing=mixing)
    sample = CASES[upstream].batch()
    weight, formula = FORMULAS[penalty]
    pure, size, _ = criterion(upstream)(made, sample)
    expected = formula(made, upstream, sample)
    assert float(expected.detach()) > 0.1

    judge = criterion(f"orthogonal_{upstream}", **weights_of(penalty, weight))
    loss, sample_size, logged = judge(made, sample)
    assert sample_size == size
    torch.testing.assert_close(loss.sum(), pure.sum() + weight * size * expected)
    torch.testing.assert_close(logged["loss"], pure.detach())  # perplexity derives from it
    torch.testing.assert_close(logged[f"{penalty}_loss"], size * expected.detach())
    assert {name for name in PENALTIES if f"{name}_loss" in logged} == {penalty}
    wanted = gradients(pure.sum() + weight * size * expected, made)
    for name, gradient in gradients(loss.sum(), made).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-4, msg=name)


@each_once(upstream=CASES, off=["token by token", "validation", "weight 0"])
def test_where_penalties_are_off_it_is_fairseqs_criterion(upstream, off, monkeypatch):
    if (upstream, off) == ("adaptive_loss", "token by token"):
        pytest.skip("fairseq's adaptive loss only knows sums")
    for name, penalty in PENALTIES.items():
        monkeypatch.setitem(PENALTIES, name, penalty._replace(compute=lambda *call: 1 / 0))
    is_training = off != "validation"
    weight = 0 if off == "weight 0" else 10
    options = {"reduce": False} if off == "token by token" else {}

    made = model(upstream).train(is_training)
    sample = CASES[upstream].batch()
    fairseqs = criterion(upstream).train(is_training)
    weights = {f"{name}_weight": weight for name in PENALTIES}
    ours = criterion(f"orthogonal_{upstream}", **weights).train(is_training)

    expected, _, expected_log = fairseqs(made, sample, **options)
    loss, _, logged = ours(made, sample, **options)
    assert torch.equal(loss, expected)
    assert logged.keys() == expected_log.keys()


def test_left_padded_sources_are_real_and_attentions_out_of_scope_have_no_penalty():
    """fairseq's translation task pads sources on the left."""
    upstream = "label_smoothed_cross_entropy"
    made = shake(build("mixhead_transformer", attention_scope="encoder")).train()
    sample = CASES[upstream].batch()
    source = sample["net_input"]["src_tokens"]
    for i, sentence in enumerate(source):
        source[i] = sentence.roll(int(sentence.eq(PAD).sum()))
    assert source[1, 0] == PAD
    distance = distance_from_orthogonal(made, upstream, sample)
    _, size, logged = criterion(f"orthogonal_{upstream}")(made, sample)
    torch.testing.assert_close(logged["orthogonal_loss"], size * distance.detach())


def test_a_scaled_loss_has_scaled_gradients():
    """fp16 training multiplies the loss before the backward pass."""
    made = model("cross_entropy")
    sample = CASES["cross_entropy"].batch()
    judge = criterion("orthogonal_cross_entropy", orthogonal_weight=0.3, rank_weight=0.01)

    def gradients_of_scaled(scale):
        loss, _, _ = judge(made, sample)
        return gradients(scale * loss, made)

    plain = gradients_of_scaled(1)
    scaled = gradients_of_scaled(128)
    ignored = gradients_of_scaled(0)
    assert all(torch.equal(scaled[name], 128 * gradient) for name, gradient in plain.items())
    # fairseq ignores the batch of an idle worker so
    assert all(not gradient.any() for gradient in ignored.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_penalties_are_in_float32(dtype):
    judge = criterion("orthogonal_cross_entropy", orthogonal_weight=0.3, rank_weight=0.01)
    made = model("cross_entropy", head_mixing="position-independent")
    sample = CASES["cross_entropy"].batch()
    _, _, expected = judge(made, sample)
    with torch.autocast("cpu", dtype):
        _, _, logged = judge(made, sample)
    assert torch.equal(logged["orthogonal_loss"], expected["orthogonal_loss"])

    loss, _, logged = judge(made.to(dtype), sample)
    for value in (loss, logged["orthogonal_loss"], logged["rank_loss"]):
        assert value.dtype == torch.float32
    assert all(gradient.isfinite().all() for gradient in gradients(loss, made).values())


def test_a_batch_without_masked_tokens_has_nothing_to_add():
    made = model("masked_lm")
    sample = CASES["masked_lm"].batch()
    sample["target"] = torch.full_like(sample["target"], PAD)
    loss, size, logged = criterion("orthogonal_masked_lm")(made, sample)
    assert size == 0
    assert loss == 0
    assert logged["orthogonal_loss"] == 0
    assert all(not gradient.any() for gradient in gradients(loss, made).values())


def test_a_layer_that_is_dropped_is_not_regularized():
    made = model("cross_entropy", decoder_layerdrop=0.5)
    sample = CASES["cross_entropy"].batch()
    judge = criterion("orthogonal_cross_entropy", orthogonal_weight=0.3)
    seen = set()
    for seed in range(12):
        torch.manual_seed(seed)
        distance = distance_from_orthogonal(made, "cross_entropy", sample)
        torch.manual_seed(seed)
        _, size, logged = judge(made, sample)
        assert float(logged["orthogonal_loss"]) == pytest.approx(size * float(distance), rel=1e-5)
        seen.add(round(float(distance), 4))
    assert len(seen) == 4  # neither, either, both


def kinds_of_logged(judge, made, sample):
    _, _, logged = judge(made, sample)
    return {name: torch.is_tensor(value) for name, value in logged.items()}


@pytest.mark.parametrize("upstream", CASES)
def test_a_batch_whose_layers_are_all_dropped_logs_tensors_where_others_log_tensors(upstream):
    """fairseq sums tensors and numbers over the workers in two buffers.

    One worker may drop all layers while another drops none. Then the buffers of both must be as
    long, or the sum fails or never ends.
    """
    judge = criterion(f"orthogonal_{upstream}", orthogonal_weight=0.3, rank_weight=0.01)
    sample = CASES[upstream].batch()
    all_dropped = {"encoder_layerdrop": 0.999999, "decoder_layerdrop": 0.999999}
    found = kinds_of_logged(judge, model(upstream, **all_dropped), sample)
    assert found == kinds_of_logged(judge, model(upstream), sample)


@pytest.mark.parametrize("upstream", CASES)
def test_logs_of_several_batches_are_their_weighted_mean(upstream):
    """Logs are reduced over the workers of an update, then over updates of different sizes."""
    judge = criterion(f"orthogonal_{upstream}", orthogonal_weight=0.3)
    fairseqs = criterion(upstream)
    made = model(upstream)
    logs = [judge(made, CASES[upstream].batch())[2] for _ in range(3)]
    logs[2] = {name: 10 * value for name, value in logs[2].items()}
    logs[2]["orthogonal_loss"] *= 2
    values = []
    for kind in (judge, fairseqs):
        with metrics.aggregate() as found:
            kind.reduce_metrics(logs[:2])
            kind.reduce_metrics(logs[2:])
        values.append(found.get_smoothed_values())
    ours, expected = values
    total = sum(float(log["orthogonal_loss"]) for log in logs)
    size = sum(float(log["sample_size"]) for log in logs)
    assert float(ours.pop("orthogonal_loss")) == pytest.approx(total / size, rel=1e-6)
    assert ours == expected
    assert judge.logging_outputs_can_be_summed() == fairseqs.logging_outputs_can_be_summed()


@each_once(name=PENALTIES, weight=[-1.0, float("nan"), float("inf")])
def test_a_weight_that_makes_no_sense_is_refused(name, weight):
    with pytest.raises(OptionError, match=f"^--{name}-weight {weight}: "):
        criterion("orthogonal_cross_entropy", **{f"{name}_weight": weight})


NOTHING_TO_ACT_ON = {
    "fairseq's own, M": ("transformer_lm", {}, "orthogonal"),
    "no mixing, M": ("l2_transformer_lm", {}, "orthogonal"),
    "mixing that is not trained, M": (
        "mixhead_transformer_lm",
        {"head_mixing": "random"},
        "orthogonal",
    ),
    "fairseq's own, P": ("transformer_lm", {}, "rank"),
    "one head, P": ("mixhead_transformer_lm", {"decoder_attention_heads": 1}, "rank"),
}
REMEDIES = {
    "orthogonal": "an architecture of this plugin with --head-mixing position-independent or "
    "position-wise or low-rank, or --feature-mixing heads or shared or output, or 0 (the default "
    "is 0.0001)",
    "rank": "an architecture of this plugin with two heads or more, or 0",
}


@pytest.mark.parametrize("case", NOTHING_TO_ACT_ON)
@pytest.mark.parametrize("when", ["before a training", "in the first batch"])
def test_a_model_without_anything_to_act_on_is_refused(case, when):
    arch, flags, name = NOTHING_TO_ACT_ON[case]
    judge = criterion("orthogonal_cross_entropy", **weights_of(name, 0.0001))
    made = build(arch, **flags).train()
    with pytest.raises(OptionError) as error:
        if when == "before a training":
            judge.check_model(made)
        else:
            judge(made, CASES["cross_entropy"].batch())
    message = f"--{name}-weight 0.0001: nothing to act on in this model; use {REMEDIES[name]}"
    assert str(error.value) == message


def test_any_model_may_have_penalties_of_weight_0():
    judge = criterion("orthogonal_cross_entropy", orthogonal_weight=0.0)
    judge.check_model(build("transformer_lm"))
