import pytest
import torch
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY
from fairseq.logging import metrics
from omegaconf import OmegaConf

from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.modules.penalties import PENALTIES
from mixhead_plugin.options import OptionError
from tests.criterions.cases import CASES, PAD, criterion, mixing_of_each_attention, model
from tests.helpers import build, shake

MIXINGS = ["position-independent", "position-wise"]


def pure_loss(stock, made, sample):
    return criterion(stock)(made, sample)


def distance_from_orthogonal(made, stock, sample):
    """sum over attentions of the mean over real positions of ||M^T M - I||^2, position by position"""
    total = 0.0
    for matrices, real in mixing_of_each_attention(made, sample, lambda: pure_loss(stock, made, sample)):
        at_positions = [(m.T @ m - torch.eye(len(m))).square().sum() for m in matrices[real]]
        total = total + sum(at_positions) / len(at_positions)
    return total


def gradients(loss, made):
    names, parameters = zip(*made.named_parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for name, p, g in zip(names, parameters, found)}


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("stock", CASES)
def test_loss_and_gradients_are_the_stock_ones_plus_the_weighted_formula(stock, mixing):
    made, sample = model(stock, head_mixing=mixing), CASES[stock].batch()
    pure, size, _ = pure_loss(stock, made, sample)
    distance = distance_from_orthogonal(made, stock, sample)
    loss, sample_size, logged = criterion(f"orthogonal_{stock}", orthogonal_weight=0.3)(made, sample)
    assert sample_size == size and float(distance) > 0.1
    torch.testing.assert_close(loss.sum(), pure.sum() + 0.3 * size * distance)
    torch.testing.assert_close(logged["loss"], pure.detach())  # perplexity derives from it
    torch.testing.assert_close(logged["orthogonal_loss"], size * distance.detach())

    expected = gradients(pure.sum() + 0.3 * size * distance, made)
    for name, gradient in gradients(loss.sum(), made).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("stock", CASES)
def test_rank_penalty_is_added_for_every_attention_of_real_queries(stock):
    """Against the definition, from weights that the attentions themselves return."""
    made, sample = model(stock, head_mixing="none"), CASES[stock].batch()
    captured, handles = [], []
    for name, module in made.named_modules():
        if isinstance(module, MixheadAttention):
            decoder = "decoder." in name and "prev_output_tokens" in sample["net_input"]
            real = sample["net_input"]["prev_output_tokens" if decoder else "src_tokens"].ne(PAD)

            def remember(m, args, kwargs, output, real=real):
                with torch.no_grad():
                    again = {**kwargs, "need_weights": True, "need_head_weights": True}
                    captured.append((MixheadAttention.forward(m, *args, **again)[1], real))

            handles.append(module.register_forward_hook(remember, with_kwargs=True))
    pure, size, _ = pure_loss(stock, made, sample)
    for handle in handles:
        handle.remove()
    expected = 0.0
    for weights, real in captured:  # [H, B, Nq, Nk]
        heads, sentences = weights.shape[:2]
        for b in range(sentences):
            p = weights[:, b, real[b]]
            pairs = [
                (p[i] @ p[j].T).square().sum() + (p[i].T @ p[j]).square().sum() for i in range(heads) for j in range(i)
            ]
            expected += float(sum(pairs)) / len(pairs) / sentences
    loss, _, logged = criterion(f"orthogonal_{stock}", orthogonal_weight=0, rank_weight=0.01)(made, sample)
    assert float(logged["rank_loss"]) == pytest.approx(int(size) * expected, rel=1e-4)
    assert float(loss.sum()) == pytest.approx(float(pure.sum()) + 0.01 * int(size) * expected, rel=1e-4)
    assert "orthogonal_loss" not in logged


@pytest.mark.parametrize("stock", CASES)
def test_validation_is_the_stock_criterions(stock):
    made, sample = model(stock).eval(), CASES[stock].batch()
    expected, _, expected_log = criterion(stock).eval()(made, sample)
    loss, _, logged = criterion(f"orthogonal_{stock}", orthogonal_weight=10, rank_weight=10).eval()(made, sample)
    assert torch.equal(loss, expected)
    assert logged.keys() == expected_log.keys()


@pytest.mark.parametrize("stock", CASES)
def test_without_weights_it_is_the_stock_criterion(stock):
    made, sample = model(stock), CASES[stock].batch()
    expected, _, expected_log = pure_loss(stock, made, sample)
    loss, _, logged = criterion(f"orthogonal_{stock}", orthogonal_weight=0)(made, sample)
    assert torch.equal(loss, expected)
    assert logged.keys() == expected_log.keys()


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("stock", ["cross_entropy", "label_smoothed_cross_entropy", "masked_lm"])
def test_padding_changes_nothing(stock, penalty):
    made, sample = model(stock), CASES[stock].batch()
    judge = criterion(f"orthogonal_{stock}", **{f"{name}_weight": 0.2 * (name == penalty) for name in PENALTIES})
    longer = {**sample, "target": torch.nn.functional.pad(sample["target"], [0, 3], value=PAD)}
    longer["net_input"] = {
        name: torch.nn.functional.pad(value, [0, 3], value=PAD) if value.dim() == 2 else value
        for name, value in sample["net_input"].items()
    }
    results = []
    for one in (sample, longer):
        loss, size, logged = judge(made, one)
        results.append((float(loss), float(logged[f"{penalty}_loss"]), int(size), gradients(loss, made)))
    assert results[1][:3] == pytest.approx(results[0][:3], rel=1e-5)
    for name, gradient in results[0][3].items():
        torch.testing.assert_close(results[1][3][name], gradient, rtol=1e-4, atol=1e-4, msg=name)


def test_a_scaled_loss_has_scaled_gradients():
    """fp16 training multiplies the loss before the backward pass."""
    made, sample = model("cross_entropy"), CASES["cross_entropy"].batch()
    judge = criterion("orthogonal_cross_entropy", orthogonal_weight=0.3, rank_weight=0.01)
    plain = gradients(judge(made, sample)[0], made)
    scaled = gradients(judge(made, sample)[0] * 128, made)
    assert all(torch.equal(scaled[name], 128 * gradient) for name, gradient in plain.items())
    ignored = gradients(judge(made, sample)[0] * 0, made)  # what fairseq does with the batch of an idle worker
    assert all(not gradient.any() for gradient in ignored.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_are_penalised_in_float32(dtype):
    made, sample = model("cross_entropy").to(dtype), CASES["cross_entropy"].batch()
    judge = criterion("orthogonal_cross_entropy", orthogonal_weight=0.3, rank_weight=0.01)
    loss, _, logged = judge(made, sample)
    assert loss.dtype == logged["orthogonal_loss"].dtype == logged["rank_loss"].dtype == torch.float32
    assert all(gradient.isfinite().all() for gradient in gradients(loss, made).values())


@pytest.mark.parametrize("arch", ["cross_entropy", "label_smoothed_cross_entropy", "masked_lm"])
def test_checkpointed_activations_change_nothing(arch):
    results = []
    for checkpointing in (False, True):
        made = model(arch, checkpoint_activations=checkpointing, attention_dropout=0.2)
        torch.manual_seed(6)
        sample = CASES[arch].batch()
        torch.manual_seed(5)
        loss, _, logged = criterion(f"orthogonal_{arch}", orthogonal_weight=0.3, rank_weight=0.01)(made, sample)
        loss.sum().backward()
        results.append((loss, logged, {name: p.grad for name, p in made.named_parameters()}))
        assert all(m.penalise is None for m in made.modules() if isinstance(m, MixheadAttention))
    torch.testing.assert_close(results[1][:2], results[0][:2])
    for name, gradient in results[0][2].items():
        torch.testing.assert_close(results[1][2][name], gradient, msg=name)


def test_a_backward_pass_that_was_given_up_leaves_nothing_behind():
    made, sample = model("cross_entropy", checkpoint_activations=True), CASES["cross_entropy"].batch()
    expected = pure_loss("cross_entropy", made.eval(), sample)[0]
    criterion("orthogonal_cross_entropy")(made.train(), sample)  # out of memory, say, before the backward pass
    with torch.no_grad():
        assert torch.equal(pure_loss("cross_entropy", made.eval(), sample)[0], expected)
    assert all(m.penalise is None for m in made.modules() if isinstance(m, MixheadAttention))


def test_a_layer_that_is_dropped_is_not_penalised():
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


@pytest.mark.parametrize("stock", CASES)
def test_logs_of_several_batches_are_their_weighted_mean(stock):
    made = model(stock)
    judge = criterion(f"orthogonal_{stock}", orthogonal_weight=0.3)
    logs = [judge(made, CASES[stock].batch())[2] for _ in range(3)]
    with metrics.aggregate() as found:
        judge.__class__.reduce_metrics(logs)
    with metrics.aggregate() as expected:
        criterion(stock).__class__.reduce_metrics(logs)
    values, stock_values = found.get_smoothed_values(), expected.get_smoothed_values()
    mean = sum(float(log["orthogonal_loss"]) for log in logs) / sum(float(log["sample_size"]) for log in logs)
    assert float(values.pop("orthogonal_loss")) == pytest.approx(mean, rel=1e-6)
    assert values == stock_values
    assert judge.logging_outputs_can_be_summed() == criterion(stock).logging_outputs_can_be_summed()


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_makes_no_sense_is_refused(name, weight):
    with pytest.raises(OptionError, match=f"^--{name}-weight {weight}: must be a number of at least 0"):
        criterion("orthogonal_cross_entropy", **{f"{name}_weight": weight})


def config(model_flags, **flags):
    node = OmegaConf.structured(CRITERION_DATACLASS_REGISTRY["orthogonal_cross_entropy"]())
    OmegaConf.set_struct(node, False)
    node.update({"_name": "orthogonal_cross_entropy", "sentence_avg": False, **flags})
    return OmegaConf.create({"criterion": node, "model": model_flags}, flags={"allow_objects": True}).criterion


@pytest.mark.parametrize(
    "model_flags, flags, message",
    [
        (
            {"_name": "transformer_lm"},
            {},
            "--orthogonal-weight 0.01: --arch transformer_lm has no head mixing to train",
        ),
        ({"_name": "l2_transformer_lm"}, {}, "--orthogonal-weight 0.01: --head-mixing none has no head mixing"),
        (
            {"_name": "mixhead_transformer", "head_mixing": "average"},
            {},
            "--orthogonal-weight 0.01: --head-mixing average",
        ),
        (
            {"_name": "transformer"},
            {"orthogonal_weight": 0.0, "rank_weight": 1.0},
            "--rank-weight 1.0: --arch transformer",
        ),
        ({"_name": "mixhead_transformer"}, {}, None),
        ({"_name": "l2_transformer_lm", "head_mixing": "position-independent"}, {}, None),
        ({"_name": "l2_transformer_lm"}, {"orthogonal_weight": 0.0, "rank_weight": 1.0}, None),
        ({"_name": "transformer_lm"}, {"orthogonal_weight": 0.0}, None),
    ],
)
def test_a_model_without_anything_to_penalise_is_refused_when_the_criterion_is_built(model_flags, flags, message):
    from fairseq.criterions import build_criterion

    from tests.criterions.cases import task

    if message is None:
        build_criterion(config(model_flags, **flags), task())
    else:
        with pytest.raises(OptionError) as error:
            build_criterion(config(model_flags, **flags), task())
        assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arch, flags, weights, message",
    [
        ("transformer_lm", {}, {}, "--orthogonal-weight 0.01: this model has no head mixing to train"),
        ("mixhead_transformer_lm", {"head_mixing": "random"}, {}, "--orthogonal-weight 0.01: this model has no head"),
        (
            "mixhead_transformer_lm",
            {"decoder_attention_heads": 1},
            {"orthogonal_weight": 0.0, "rank_weight": 1.0},
            "--rank-weight 1.0: this model has no attention of this plugin with two heads",
        ),
    ],
)
def test_a_model_without_anything_to_penalise_is_refused_in_the_first_batch_at_the_latest(
    arch, flags, weights, message
):
    with pytest.raises(OptionError, match=f"^{message}"):
        criterion("orthogonal_cross_entropy", **weights)(build(arch, **flags).train(), CASES["cross_entropy"].batch())


def test_attentions_out_of_scope_have_no_penalty():
    sample = CASES["label_smoothed_cross_entropy"].batch()
    made = shake(build("mixhead_transformer", attention_scope="cross")).train()
    distance = distance_from_orthogonal(made, "label_smoothed_cross_entropy", sample)
    judge = criterion("orthogonal_label_smoothed_cross_entropy", orthogonal_weight=0.3)
    _, size, logged = judge(made, sample)
    assert float(logged["orthogonal_loss"]) == pytest.approx(size * float(distance), rel=1e-5)


def test_the_outputs_alone_cannot_be_differentiated():
    made, sample = model("cross_entropy"), CASES["cross_entropy"].batch()
    outputs = []
    made.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    criterion("orthogonal_cross_entropy")(made, sample)
    with pytest.raises(RuntimeError, match="but not the loss"):
        outputs[0].sum().backward()
