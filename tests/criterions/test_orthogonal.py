import pytest
import torch
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY, build_criterion
from fairseq.logging import metrics
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY
from omegaconf import OmegaConf

from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.modules.penalties import PENALTIES, RegularizedPass
from tests.criterions.cases import CASES, PAD, criterion, mixing_of_each_attention, model, task
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


def unmixed_weights(made, sample, run):
    """softmax(scale * Q K^T + masks) of every attention in `run()`, [B, H, Nq, Nk], and its real queries [B, Nq]"""
    found, handles = [], []
    for name, module in made.named_modules():
        if not isinstance(module, MixheadAttention):
            continue
        decoder = "decoder." in name and "prev_output_tokens" in sample["net_input"]
        real = sample["net_input"]["prev_output_tokens" if decoder else "src_tokens"].ne(PAD)

        def remember(m, args, kwargs, output, real=real):
            query, key = (kwargs[name] if name in kwargs else args[i] for i, name in enumerate(("query", "key")))
            q, k = (
                projection(x).unflatten(2, (m.num_heads, m.head_dim)).permute(1, 2, 0, 3)
                for projection, x in ((m.q_proj, query), (m.k_proj, key))
            )
            scores = q @ k.transpose(2, 3) / m.head_dim**0.5
            if kwargs.get("attn_mask") is not None:
                scores = scores + kwargs["attn_mask"]
            if kwargs.get("key_padding_mask") is not None:
                scores = scores.masked_fill(kwargs["key_padding_mask"][:, None, None].bool(), float("-inf"))
            found.append((scores.softmax(-1), real))

        handles.append(module.register_forward_hook(remember, with_kwargs=True))
    run()
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("stock", CASES)
def test_rank_penalty_is_added_for_every_attention_of_real_queries(stock):
    """Of the matrices before mixing."""
    made, sample = model(stock), CASES[stock].batch()
    captured = unmixed_weights(made, sample, lambda: pure_loss(stock, made, sample))
    pure, size, _ = pure_loss(stock, made, sample)
    expected = 0.0
    for weights, real in captured:
        sentences, heads = weights.shape[:2]
        for b in range(sentences):
            p = weights[b][:, real[b]]
            pairs = [
                (p[i] @ p[j].T).square().sum() + (p[i].T @ p[j]).square().sum() for i in range(heads) for j in range(i)
            ]
            expected += float(sum(pairs).detach()) / len(pairs) / sentences
    loss, _, logged = criterion(f"orthogonal_{stock}", orthogonal_weight=0, rank_weight=0.01)(made, sample)
    assert float(logged["rank_loss"]) == pytest.approx(int(size) * expected, rel=1e-4)
    assert float(loss.sum()) == pytest.approx(float(pure.sum()) + 0.01 * int(size) * expected, rel=1e-4)
    assert "orthogonal_loss" not in logged


def costly(heads, real):
    raise AssertionError("a penalty was computed")


@pytest.fixture
def no_penalty_is_computed(monkeypatch):
    for name, penalty in PENALTIES.items():
        monkeypatch.setitem(PENALTIES, name, penalty._replace(of=costly))


@pytest.mark.usefixtures("no_penalty_is_computed")
@pytest.mark.parametrize("stock", CASES)
def test_validation_is_the_stock_criterions(stock):
    made, sample = model(stock).eval(), CASES[stock].batch()
    expected, _, expected_log = criterion(stock).eval()(made, sample)
    loss, _, logged = criterion(f"orthogonal_{stock}", orthogonal_weight=10, rank_weight=10).eval()(made, sample)
    assert torch.equal(loss, expected)
    assert logged.keys() == expected_log.keys()


@pytest.mark.usefixtures("no_penalty_is_computed")
def test_losses_token_by_token_are_the_stock_criterions():
    made, sample = model("cross_entropy"), CASES["cross_entropy"].batch()
    expected = criterion("cross_entropy")(made, sample, reduce=False)[0]
    assert expected.dim() == 1
    assert torch.equal(criterion("orthogonal_cross_entropy")(made, sample, reduce=False)[0], expected)


@pytest.mark.usefixtures("no_penalty_is_computed")
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
def test_half_precision_models_are_regularized_in_float32(dtype):
    made, sample = model("cross_entropy").to(dtype), CASES["cross_entropy"].batch()
    judge = criterion("orthogonal_cross_entropy", orthogonal_weight=0.3, rank_weight=0.01)
    loss, _, logged = judge(made, sample)
    assert loss.dtype == logged["orthogonal_loss"].dtype == logged["rank_loss"].dtype == torch.float32
    assert all(gradient.isfinite().all() for gradient in gradients(loss, made).values())


def test_autocast_does_not_reach_the_penalties():
    made, sample = model("cross_entropy", head_mixing="position-independent"), CASES["cross_entropy"].batch()
    judge = criterion("orthogonal_cross_entropy", orthogonal_weight=0.3)
    expected = judge(made, sample)[2]["orthogonal_loss"]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(judge(made, sample)[2]["orthogonal_loss"], expected)


def test_a_loss_in_half_precision_is_added_to_in_float32():
    loss = torch.tensor(30_000.0, dtype=torch.float16, requires_grad=True)
    regularized = RegularizedPass(torch.nn.Identity(), {"orthogonal": 1.0}, {})
    regularized.values["orthogonal"] = torch.tensor(20.0)
    total = regularized.add_to(loss, 4096)
    assert float(total) == 30_000 + 20 * 4096  # more than float16 can hold
    total.backward()
    assert loss.grad.dtype == torch.float16


@pytest.mark.parametrize("flags", [{"report_accuracy": True}, {"ignore_prefix_size": 2}, {"sentence_avg": True}])
def test_flags_of_the_stock_criterion_stay(flags):
    stock = "label_smoothed_cross_entropy"
    made, sample = model(stock), CASES[stock].batch()
    pure, size, expected_log = criterion(stock, **flags)(made, sample)
    distance = distance_from_orthogonal(made, stock, sample)
    loss, sample_size, logged = criterion(f"orthogonal_{stock}", orthogonal_weight=0.3, **flags)(made, sample)
    assert sample_size == size
    torch.testing.assert_close(loss, pure + 0.3 * size * distance)
    assert all(logged[name] == value for name, value in expected_log.items())


def test_a_batch_without_masked_tokens_has_nothing_to_add():
    made, sample = model("masked_lm"), CASES["masked_lm"].batch()
    sample["target"] = torch.full_like(sample["target"], PAD)
    loss, size, logged = criterion("orthogonal_masked_lm")(made, sample)
    assert size == 0 == float(loss) == float(logged["orthogonal_loss"])
    assert all(not gradient.any() for gradient in gradients(loss, made).values())


def test_sources_padded_on_the_left_are_real_where_they_have_words():
    """fairseq's translation task pads so."""
    stock = "label_smoothed_cross_entropy"
    made, sample = model(stock), CASES[stock].batch()
    source = sample["net_input"]["src_tokens"]
    assert source[1, -1] == PAD
    for i, sentence in enumerate(source):
        source[i] = sentence.roll(int(sentence.eq(PAD).sum()))
    assert source[1, 0] == PAD
    distance = distance_from_orthogonal(made, stock, sample)
    _, size, logged = criterion(f"orthogonal_{stock}")(made, sample)
    torch.testing.assert_close(logged["orthogonal_loss"], size * distance.detach())


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
        assert all(m.hook is None for m in made.modules() if isinstance(m, MixheadAttention))
    torch.testing.assert_close(results[1][:2], results[0][:2])
    for name, gradient in results[0][2].items():
        torch.testing.assert_close(results[1][2][name], gradient, msg=name)


def test_a_backward_pass_that_was_given_up_leaves_nothing_behind():
    made, sample = model("cross_entropy", checkpoint_activations=True), CASES["cross_entropy"].batch()
    expected = pure_loss("cross_entropy", made.eval(), sample)[0]
    criterion("orthogonal_cross_entropy")(made.train(), sample)  # out of memory, say, before the backward pass
    with torch.no_grad():
        assert torch.equal(pure_loss("cross_entropy", made.eval(), sample)[0], expected)
    assert all(m.hook is None for m in made.modules() if isinstance(m, MixheadAttention))


def test_checkpointed_passes_come_one_after_the_other():
    made, sample = model("cross_entropy", checkpoint_activations=True), CASES["cross_entropy"].batch()
    judge = criterion("orthogonal_cross_entropy")
    total = judge(made, sample)[0] * 2
    with pytest.raises(RuntimeError, match="is not yet differentiated"):
        judge(made, sample)
    total.backward()
    expected = {name: p.grad.clone() for name, p in made.named_parameters()}
    made.zero_grad()
    judge(made, sample)  # given up, as after running out of memory
    (judge(made, sample)[0] * 2).backward()
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


def test_passes_without_checkpointing_may_share_a_backward_pass():
    made, sample = model("cross_entropy"), CASES["cross_entropy"].batch()
    judge = criterion("orthogonal_cross_entropy")
    both = gradients(judge(made, sample)[0] + 3 * judge(made, sample)[0], made)
    for name, gradient in gradients(judge(made, sample)[0], made).items():
        torch.testing.assert_close(both[name], 4 * gradient, rtol=1e-4, atol=1e-4, msg=name)


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


@pytest.mark.parametrize("stock", CASES)
def test_logs_of_several_batches_are_their_weighted_mean(stock):
    """Of the workers of one update, and over updates of different sizes."""
    made = model(stock)
    judge = criterion(f"orthogonal_{stock}", orthogonal_weight=0.3)
    logs = [judge(made, CASES[stock].batch())[2] for _ in range(3)]
    logs[2] = {name: 10 * value for name, value in logs[2].items()}
    logs[2]["orthogonal_loss"] *= 2
    with metrics.aggregate() as found:
        judge.__class__.reduce_metrics(logs[:2])
        judge.__class__.reduce_metrics(logs[2:])
    with metrics.aggregate() as expected:
        criterion(stock).__class__.reduce_metrics(logs[:2])
        criterion(stock).__class__.reduce_metrics(logs[2:])
    values, stock_values = found.get_smoothed_values(), expected.get_smoothed_values()
    mean = sum(float(log["orthogonal_loss"]) for log in logs) / sum(float(log["sample_size"]) for log in logs)
    assert float(values.pop("orthogonal_loss")) == pytest.approx(mean, rel=1e-6)
    assert values == stock_values
    assert judge.logging_outputs_can_be_summed() == criterion(stock).logging_outputs_can_be_summed()


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_makes_no_sense_is_refused(name, weight):
    with pytest.raises(OptionError, match=f"^--{name}-weight {weight}: must be a finite number, 0"):
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
            "--orthogonal-weight 0.0001: nothing to act on in --arch transformer_lm; use",
        ),
        (
            {"_name": "l2_transformer_lm"},
            {},
            "--orthogonal-weight 0.0001: nothing to act on with --head-mixing none; use",
        ),
        (
            {"_name": "mixhead_transformer", "head_mixing": "average"},
            {},
            "--orthogonal-weight 0.0001: nothing to act on with --head-mixing average; use",
        ),
        (
            {"_name": "transformer"},
            {"orthogonal_weight": 0.0, "rank_weight": 1.0},
            "--rank-weight 1.0: nothing to act on in --arch transformer; use",
        ),
        (
            {"_name": "l2_transformer_lm", "decoder_attention_heads": 1},
            {"orthogonal_weight": 0.0, "rank_weight": 1.0},
            "--rank-weight 1.0: nothing to act on with --decoder-attention-heads 1; use",
        ),
        (
            {"_name": "mixhead_transformer", "attention_scope": "encoder", "encoder_attention_heads": 1},
            {"orthogonal_weight": 0.0, "rank_weight": 1.0},
            "--rank-weight 1.0: nothing to act on with --encoder-attention-heads 1; use",
        ),
        ({"_name": "somebody_elses"}, {}, None),  # registered by nobody here: the first batch shows what it has
        ({"_name": "a_users_own"}, {}, None),
        ({"_name": "mixhead_transformer"}, {}, None),
        ({"_name": "l2_transformer_lm", "head_mixing": "position-independent"}, {}, None),
        ({"_name": "l2_transformer_lm"}, {"orthogonal_weight": 0.0, "rank_weight": 1.0}, None),
        ({"_name": "transformer_lm"}, {"orthogonal_weight": 0.0}, None),
    ],
)
def test_a_model_without_anything_to_penalise_is_refused_when_the_criterion_is_built(
    model_flags, flags, message, monkeypatch
):
    for registry in (ARCH_MODEL_REGISTRY, ARCH_MODEL_NAME_REGISTRY):
        monkeypatch.setitem(registry, "a_users_own", registry["mixhead_transformer"])
    if message is None:
        build_criterion(config(model_flags, **flags), task())
    else:
        with pytest.raises(OptionError) as error:
            build_criterion(config(model_flags, **flags), task())
        assert str(error.value).startswith(message) and "\n" not in str(error.value)
        # nobody has typed the weight: the line says where it comes from
        preset = str(error.value).endswith("(0.0001 is the default of --criterion orthogonal_cross_entropy)")
        assert preset == ("0.0001" in message)


@pytest.mark.parametrize(
    "arch, flags, weights, message",
    [
        ("transformer_lm", {}, {}, "--orthogonal-weight 0.0001: nothing to act on in this model; use"),
        (
            "mixhead_transformer_lm",
            {"head_mixing": "random"},
            {},
            "--orthogonal-weight 0.0001: nothing to act on in this model",
        ),
        (
            "mixhead_transformer_lm",
            {"decoder_attention_heads": 1},
            {"orthogonal_weight": 0.0, "rank_weight": 1.0},
            "--rank-weight 1.0: nothing to act on in this model; use an architecture of this plugin with two heads",
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


def test_every_penalty_has_its_flag():
    for stock in CASES:
        configs = [CRITERION_DATACLASS_REGISTRY[name]() for name in (stock, f"orthogonal_{stock}")]
        before, after = (set(config._get_all_attributes()) for config in configs)
        assert after - before == {f"{name}_weight" for name in PENALTIES} and before <= after
        assert all(entry.formula in configs[1]._get_help(f"{name}_weight") for name, entry in PENALTIES.items())


def test_adaptive_loss_says_which_ddp_backend_it_needs():
    with pytest.raises(OptionError, match=r"^--ddp-backend pytorch_ddp: an adaptive loss needs legacy_ddp$"):
        criterion("orthogonal_adaptive_loss", ddp_backend="pytorch_ddp")
