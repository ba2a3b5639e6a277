"""Compare the orthogonal_* criteria with fairseq's own and the formulas."""

import pytest
import torch
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY, build_criterion
from fairseq.logging import metrics
from omegaconf import OmegaConf

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.criterions.penalties import PENALTIES
from tests.covering import covering, each_once
from tests.fairseq.criterions.cases import CASES, PAD, criterion, mixing_of_each, model, task
from tests.helpers import build, shake

MIXINGS = ["position-independent", "position-wise"]


def distance_from_orthogonal(made, upstream, sample):
    """Return the sum over attentions of the mean over real positions of ||M^T M - I||^2."""
    total = 0.0
    for matrices, real in mixing_of_each(made, sample, lambda: criterion(upstream)(made, sample)):
        at_positions = [(m.T @ m - torch.eye(len(m))).square().sum() for m in matrices[real]]
        total = total + sum(at_positions) / len(at_positions)
    return total


def unmixed_weights(made, sample, run):
    """Return softmax(scale * Q K^T + masks) of every attention in `run()`, and its real queries [B,
    Nq].
    """
    found, handles = [], []
    for name, module in made.named_modules():
        if not isinstance(module, MixheadAttention):
            continue
        decoder = "decoder." in name and "prev_output_tokens" in sample["net_input"]
        real = sample["net_input"]["prev_output_tokens" if decoder else "src_tokens"].ne(PAD)

        def remember(m, args, kwargs, output, real=real):
            query, key = (
                kwargs[name] if name in kwargs else args[i]
                for i, name in enumerate(("query", "key"))
            )
            q, k = (
                projection(x).unflatten(2, (m.num_heads, m.head_dim)).permute(1, 2, 0, 3)
                for projection, x in ((m.q_proj, query), (m.k_proj, key))
            )
            scores = q @ k.transpose(2, 3) / m.head_dim**0.5
            if kwargs.get("attn_mask") is not None:
                scores = scores + kwargs["attn_mask"]
            if kwargs.get("key_padding_mask") is not None:
                scores = scores.masked_fill(
                    kwargs["key_padding_mask"][:, None, None].bool(), float("-inf")
                )
            found.append((scores.softmax(-1), real))

        handles.append(module.register_forward_hook(remember, with_kwargs=True))
    run()
    for handle in handles:
        handle.remove()
    return found


def rank_by_definition(made, upstream, sample):
    total = 0.0
    for weights, real in unmixed_weights(made, sample, lambda: criterion(upstream)(made, sample)):
        for b, matrices in enumerate(weights):
            p = matrices[:, real[b]]
            pairs = [(i, j) for i in range(len(p)) for j in range(i)]
            norms = [
                (p[i] @ p[j].T).square().sum() + (p[i].T @ p[j]).square().sum() for i, j in pairs
            ]
            total = total + sum(norms) / len(pairs) / len(weights)
    return total


FORMULAS = {"orthogonal": (0.3, distance_from_orthogonal), "rank": (0.01, rank_by_definition)}


def gradients(loss, made):
    names, parameters = zip(*made.named_parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g
        for name, p, g in zip(names, parameters, found)
    }


@covering(upstream=CASES, mixing=MIXINGS, penalty=PENALTIES)
def test_loss_and_gradients_are_fairseqs_plus_the_weighted_formula(upstream, mixing, penalty):
    made, sample = model(upstream, head_mixing=mixing), CASES[upstream].batch()
    weight, formula = FORMULAS[penalty]
    pure, size, _ = criterion(upstream)(made, sample)
    expected = formula(made, upstream, sample)
    weights = {f"{name}_weight": weight * (name == penalty) for name in PENALTIES}
    loss, sample_size, logged = criterion(f"orthogonal_{upstream}", **weights)(made, sample)
    assert sample_size == size and float(expected.detach()) > 0.1
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
        monkeypatch.setitem(PENALTIES, name, penalty._replace(of=lambda heads, real: 1 / 0))
    made, sample = model(upstream).train(off != "validation"), CASES[upstream].batch()
    weights = {f"{name}_weight": 0 if off == "weight 0" else 10 for name in PENALTIES}
    kinds = [criterion(upstream), criterion(f"orthogonal_{upstream}", **weights)]
    reduce = {} if off != "token by token" else {"reduce": False}
    (expected, _, expected_log), (loss, _, logged) = (
        kind.train(off != "validation")(made, sample, **reduce) for kind in kinds
    )
    assert torch.equal(loss, expected) and logged.keys() == expected_log.keys()


def test_left_padded_sources_are_real_and_attentions_out_of_scope_have_no_penalty():
    """fairseq's translation task pads sources on the left."""
    upstream = "label_smoothed_cross_entropy"
    made, sample = (
        shake(build("mixhead_transformer", attention_scope="encoder")).train(),
        CASES[upstream].batch(),
    )
    source = sample["net_input"]["src_tokens"]
    for i, sentence in enumerate(source):
        source[i] = sentence.roll(int(sentence.eq(PAD).sum()))
    assert source[1, 0] == PAD
    distance = distance_from_orthogonal(made, upstream, sample)
    _, size, logged = criterion(f"orthogonal_{upstream}")(made, sample)
    torch.testing.assert_close(logged["orthogonal_loss"], size * distance.detach())


def test_a_scaled_loss_has_scaled_gradients():
    """fp16 training multiplies the loss before the backward pass."""
    made, sample = model("cross_entropy"), CASES["cross_entropy"].batch()
    judge = criterion("orthogonal_cross_entropy", orthogonal_weight=0.3, rank_weight=0.01)
    plain, scaled, ignored = (
        gradients(judge(made, sample)[0] * scale, made) for scale in (1, 128, 0)
    )
    assert all(torch.equal(scaled[name], 128 * gradient) for name, gradient in plain.items())
    # fairseq ignores the batch of an idle worker so
    assert all(not gradient.any() for gradient in ignored.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_penalties_are_in_float32(dtype):
    judge = criterion("orthogonal_cross_entropy", orthogonal_weight=0.3, rank_weight=0.01)
    made, sample = (
        model("cross_entropy", head_mixing="position-independent"),
        CASES["cross_entropy"].batch(),
    )
    expected = judge(made, sample)[2]["orthogonal_loss"]
    with torch.autocast("cpu", dtype):
        assert torch.equal(judge(made, sample)[2]["orthogonal_loss"], expected)
    loss, _, logged = judge(made.to(dtype), sample)
    assert (
        loss.dtype == logged["orthogonal_loss"].dtype == logged["rank_loss"].dtype == torch.float32
    )
    assert all(gradient.isfinite().all() for gradient in gradients(loss, made).values())


def test_a_batch_without_masked_tokens_has_nothing_to_add():
    made, sample = model("masked_lm"), CASES["masked_lm"].batch()
    sample["target"] = torch.full_like(sample["target"], PAD)
    loss, size, logged = criterion("orthogonal_masked_lm")(made, sample)
    assert size == 0 == float(loss.detach()) == float(logged["orthogonal_loss"])
    assert all(not gradient.any() for gradient in gradients(loss, made).values())


def test_a_layer_that_is_dropped_is_not_regularized():
    made, sample = model("cross_entropy", decoder_layerdrop=0.5), CASES["cross_entropy"].batch()
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


@pytest.mark.parametrize("upstream", CASES)
def test_logs_of_several_batches_are_their_weighted_mean(upstream):
    """Logs are reduced over the workers of an update, then over updates of different sizes."""
    judge, fairseqs = (
        criterion(f"orthogonal_{upstream}", orthogonal_weight=0.3),
        criterion(upstream),
    )
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
    mean = sum(float(log["orthogonal_loss"]) for log in logs) / sum(
        float(log["sample_size"]) for log in logs
    )
    assert float(values[0].pop("orthogonal_loss")) == pytest.approx(mean, rel=1e-6)
    assert values[0] == values[1]
    assert judge.logging_outputs_can_be_summed() == fairseqs.logging_outputs_can_be_summed()


@each_once(name=PENALTIES, weight=[-1.0, float("nan"), float("inf")])
def test_a_weight_that_makes_no_sense_is_refused(name, weight):
    with pytest.raises(OptionError, match=f"^--{name}-weight {weight}: "):
        criterion("orthogonal_cross_entropy", **{f"{name}_weight": weight})


NOTHING_TO_ACT_ON = [
    ("transformer_lm", {}, "orthogonal"),
    ("l2_transformer_lm", {}, "orthogonal"),
    ("mixhead_transformer_lm", {"head_mixing": "random"}, "orthogonal"),
    ("transformer_lm", {}, "rank"),
    ("mixhead_transformer_lm", {"decoder_attention_heads": 1}, "rank"),
]


def build_beside(model_flags, **weights):
    """Build the criterion as fairseq does: the model's flags stand beside its own."""
    node = OmegaConf.structured(CRITERION_DATACLASS_REGISTRY["orthogonal_cross_entropy"]())
    OmegaConf.set_struct(node, False)
    node.update({"_name": "orthogonal_cross_entropy", "sentence_avg": False, **weights})
    whole = OmegaConf.create(
        {"criterion": node, "model": model_flags}, flags={"allow_objects": True}
    )
    build_criterion(whole.criterion, task())


@pytest.mark.parametrize("arch, flags, name", NOTHING_TO_ACT_ON)
def test_a_model_without_anything_to_act_on_is_refused_by_the_first_batch_or_before_it_if_known(
    arch, flags, name
):
    weights = {
        f"{other}_weight": PENALTIES["orthogonal"].weight * (other == name) for other in PENALTIES
    }
    batch, judge = CASES["cross_entropy"].batch(), criterion("orthogonal_cross_entropy", **weights)
    with pytest.raises(OptionError, match=rf"^--{name}-weight 0.0001: .*$") as error:
        judge(build(arch, **flags).train(), batch)
    assert ("the default" in str(error.value)) == (name == "orthogonal")  # nobody has typed it
    with pytest.raises(OptionError, match=rf"^--{name}-weight 0.0001: .*$"):
        build_beside({"_name": arch, **flags}, **weights)
    build_beside({"_name": arch, **flags}, orthogonal_weight=0.0)
    build_beside({"_name": "somebody_elses"}, **weights)
    build_beside({"_name": "mixhead_transformer_lm"}, **weights)
