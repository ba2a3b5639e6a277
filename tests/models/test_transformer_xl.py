"""Transformer-XL: the model of the paper, whose memory is the text before and nothing else."""

import subprocess
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fairseq import options
from fairseq.dataclass.initialize import add_defaults
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.examples.truncated_bptt.truncated_bptt_lm_task import TruncatedBPTTLMConfig, TruncatedBPTTLMTask
from fairseq.models import ARCH_MODEL_REGISTRY, build_model
from fairseq.search import BeamSearch
from fairseq.sequence_generator import SequenceGenerator
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks import FairseqTask
from omegaconf import OmegaConf

from mixhead_plugin.errors import OptionError
from mixhead_plugin.models import RECIPE_ARCHITECTURES
from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.modules.segment_attention import distance_encodings, segment_mask
from mixhead_plugin.ops import NORMALIZERS
from mixhead_plugin.options import FAMILIES
from tests.helpers import VOCABULARY, dictionary, task
from tests.models.test_recipe_architectures import LM1B, WIKITEXT2, WIKITEXT103, parameters, task_of
from tests.xl import TINY_XL, build_xl, in_windows, log_probs, text

every_normalizer = pytest.mark.parametrize("normalizer", NORMALIZERS)
every_mixing = pytest.mark.parametrize("mixing", HEAD_MIXINGS)

XL = [name for name, entry in RECIPE_ARCHITECTURES.items() if entry.model == "transformer_xl"]


def variant(normalizer, mixing, **flags):
    """In double precision and in evaluation."""
    return build_xl(attention_normalizer=normalizer, head_mixing=mixing, **flags).double().eval()


def by_definition(model, tokens, span=None):
    """Log-probabilities of a whole text, one layer after the other; attention and softmax have tests of their own."""
    decoder = model.decoder
    x = decoder.embed_tokens(tokens).transpose(0, 1)
    n = x.size(0)
    positions = distance_encodings(n, x.size(2), decoder.clamp_len, x)
    mask = segment_mask(n, n, span, x)
    for layer in decoder.layers:
        attended = layer.self_attn(x, None, positions, decoder.content_bias, decoder.position_bias, attn_mask=mask)
        x = F.layer_norm(
            x + attended, x.shape[2:], layer.self_attn_layer_norm.weight, layer.self_attn_layer_norm.bias, 1e-5
        )
        inner = F.relu(F.linear(x, layer.fc1.weight, layer.fc1.bias))
        inner = F.linear(inner, layer.fc2.weight, layer.fc2.bias)
        x = F.layer_norm(x + inner, x.shape[2:], layer.final_layer_norm.weight, layer.final_layer_norm.bias, 1e-5)
    return decoder.adaptive_softmax.get_log_prob(x.transpose(0, 1), None)


# ---- the text before -------------------------------------------------------------------------------------------------


@every_mixing
@every_normalizer
def test_a_text_is_the_same_in_one_window_and_in_many(normalizer, mixing):
    """With the same span for every token, and a memory that holds it."""
    model = variant(normalizer, mixing, mem_len=6, same_length=True)
    tokens = text(23)
    whole = log_probs(model, tokens, 0)
    torch.testing.assert_close(whole, by_definition(model, tokens, span=6))
    torch.testing.assert_close(in_windows(model, tokens, [8, 8, 7]), whole)
    torch.testing.assert_close(in_windows(model, tokens, [1, 3, 2, 5, 4, 8]), whole)


@every_mixing
@every_normalizer
def test_a_window_with_memory_is_the_whole_text_computed_again(normalizer, mixing):
    model = variant(normalizer, mixing, mem_len=20)
    tokens = text(17)
    torch.testing.assert_close(in_windows(model, tokens, [7, 4, 6]), by_definition(model, tokens))


def test_a_short_memory_is_what_the_layers_saw_last():
    """By hand: the states of the window before, cut, in front of each layer's input."""
    model = variant("softmax", "position-wise", mem_len=3)
    tokens = text(12)
    first, second = tokens.split(6, 1)
    decoder = model.decoder

    def forward(x, memory):
        inputs = []
        for i, layer in enumerate(decoder.layers):
            inputs.append(x)
            before = memory[i] if memory else x[:0]
            n_keys = before.size(0) + x.size(0)
            positions = distance_encodings(n_keys, x.size(2), -1, x)
            mask = segment_mask(x.size(0), n_keys, None, x)
            x = layer(x, before, positions, decoder.content_bias, decoder.position_bias, attn_mask=mask)
        return x, inputs

    _, inputs = forward(decoder.embed_tokens(first).transpose(0, 1), [])
    expected, _ = forward(decoder.embed_tokens(second).transpose(0, 1), [x[-3:] for x in inputs])
    model(first, window=0)
    torch.testing.assert_close(model(second, window=1)[0], expected.transpose(0, 1))


@pytest.mark.parametrize("same_length", [False, True])
def test_the_future_does_not_leak(same_length):
    model = variant("l2", "position-wise", same_length=same_length)
    tokens = text(24)
    changed = tokens.clone()
    changed[:, 13] = (changed[:, 13] + 1) % VOCABULARY
    before, after = (in_windows(model, t, [8, 8, 8]) for t in (tokens, changed))
    assert torch.equal(before[:, :13], after[:, :13])
    for place in (13, 15, 16, 20):  # seen from its own window, and through memory from the next
        different = (before[:, place] - after[:, place]).abs().amax(1) > 1e-9
        assert different.all() or (same_length and place > 13 + 2 * 5)


def test_memory_matters_to_these_tests():
    model = variant("softmax", "position-wise")
    first, second = text(16).split(8, 1)
    alone = log_probs(model, second, 0)
    log_probs(model, first, 0)
    assert (log_probs(model, second, 1) - alone).abs().max() > 0.01


def test_rows_of_a_batch_do_not_see_each_other():
    model = variant("sigsoftmax", "position-wise")
    tokens = text(16, batch=3)
    together = in_windows(model, tokens, [8, 8])
    for i in range(3):
        torch.testing.assert_close(in_windows(model, tokens[i : i + 1], [8, 8]), together[i : i + 1])


def test_padding_at_the_end_changes_nothing_before_it():
    model = variant("sigsoftmax", "position-wise", mem_len=0)
    tokens = text(8)
    padded = torch.cat([tokens, torch.full((2, 3), dictionary().pad())], 1)
    torch.testing.assert_close(log_probs(model, padded)[:, :8], log_probs(model, tokens))


def test_far_distances_are_one_when_clamped():
    model, plain = (variant("softmax", "none", mem_len=20, clamp_len=clamp) for clamp in (3, -1))
    tokens = text(12)
    torch.testing.assert_close(in_windows(model, tokens, [5, 7]), by_definition(model, tokens))
    assert torch.equal(log_probs(model, tokens[:, :4], 0), log_probs(plain, tokens[:, :4], 0))
    assert not torch.allclose(log_probs(model, tokens, 0), log_probs(plain, tokens, 0))


def test_validation_in_the_middle_of_training_changes_nothing():
    def losses(validate):
        model = build_xl(dropout=0.1).train()
        found = []
        for window, part in enumerate(text_of_training.split(8, 1)):
            torch.manual_seed(window)
            found.append(log_probs(model.train(), part, window).detach())
            if validate and window == 1:
                model.eval()
                validations.append(in_windows(model, other_text, [8, 8]))
        return torch.cat(found, 1)

    text_of_training, other_text, validations = text(32), text(16), []
    assert torch.equal(losses(True), losses(False))
    assert torch.equal(validations[0], in_windows(build_xl(dropout=0.1).eval(), other_text, [8, 8]))


def test_without_numbers_memory_goes_on_until_it_is_reset():
    model = variant("softmax", "position-wise")
    first, second = text(16).split(8, 1)
    alone = log_probs(model, second)
    expected = in_windows(model, torch.cat([first, second], 1), [8, 8])[:, 8:]
    model.reset_memory()
    log_probs(model, first)
    torch.testing.assert_close(log_probs(model, second), expected)
    model.reset_memory()
    torch.testing.assert_close(log_probs(model, second), alone)


@pytest.mark.parametrize("order", [[0, 1, 0, 1], [0, 1, 5, 6], [3, 3], [0, 1, 2, 0]])
def test_what_does_not_follow_the_window_before_starts_anew(order):
    """A new epoch or set, a reset data loader, fairseq's dummy batch, a batch computed again."""
    model = variant("softmax", "position-wise")
    last = None
    for window in order:
        part = text(8)
        fresh = variant("softmax", "position-wise")
        found = log_probs(model, part, window)
        follows = last is not None and window == last + 1
        assert torch.equal(found, log_probs(fresh, part, window)) != follows
        last = window


# ---- windows of fairseq's task ---------------------------------------------------------------------------------------


def bptt_task(text_data, **settings):
    settings.update(data=str(text_data), tokens_per_sample=8, max_target_positions=8, batch_size=3)
    return TruncatedBPTTLMTask.setup_task(OmegaConf.structured(TruncatedBPTTLMConfig(**settings)))


@pytest.fixture
def numbered(text_data):
    made = bptt_task(text_data)
    model = build_model(Namespace(arch="mixhead_transformer_xl", **TINY_XL), made)
    for split in ("train", "valid"):
        made.load_dataset(split)
    return made, model.eval()


def batches(made, split):
    return list(made.get_batch_iterator(made.dataset(split)).next_epoch_itr(shuffle=False))


def test_batches_say_which_window_of_their_text_they_are(numbered):
    made, model = numbered
    found = batches(made, "train")
    assert [batch["net_input"]["window"] for batch in found] == list(range(len(found)))
    assert all(batch["net_input"]["src_lengths"].tolist() == [8, 8, 8] for batch in found[:-1])
    rows = torch.cat([batch["net_input"]["src_tokens"] for batch in found[:-1]], 1)
    expected = torch.cat([made.datasets["train"].data[i] for i in range(len(found) - 1)])
    assert torch.equal(rows[0], expected)
    model(**found[0]["net_input"])


def test_what_fills_no_row_is_said_and_nothing_at_all_is_refused(text_data, caplog):
    made = bptt_task(text_data)
    made.cfg.batch_size = 5
    build_model(Namespace(arch="mixhead_transformer_xl", **TINY_XL), made)
    made.load_dataset("valid")
    dataset = made.dataset("valid")
    left_out = len(dataset.data) % 5
    assert left_out > 0
    assert len(list(made.eval_lm_dataloader(dataset, num_workers=0))) == len(dataset)
    assert f"the last {left_out} windows fill no row" in caplog.text

    made.cfg.batch_size = len(dataset.data) + 1
    made.load_dataset("valid")
    with pytest.raises(OptionError, match=f"--batch-size {len(dataset.data) + 1}: the text has {len(dataset.data)}"):
        made.eval_lm_dataloader(made.dataset("valid"))


def test_a_text_may_be_longer_than_the_windows_of_training():
    model = build_xl(mem_len=0).eval()
    assert model.max_positions() > 10**6
    long = text(5 * TINY_XL["tokens_per_sample"])
    assert log_probs(model, long).isfinite().all()


def test_a_checkpoint_of_two_workers_is_validated_by_one(text_data):
    """As fairseq-validate sets its task up, whose class knows no `from_checkpoint`, and would see half of the text."""
    saved = bptt_task(text_data, data_parallel_rank=0, data_parallel_size=2)
    saved.load_dataset("valid")
    again = TruncatedBPTTLMTask.setup_task(saved.cfg, from_checkpoint=True)
    again.load_dataset("valid")
    assert len(again.dataset("valid")) == 2 * len(saved.dataset("valid")) > 0


def test_a_second_model_of_the_task_numbers_them_once(numbered):
    made, _ = numbered
    collate = made._collate_fn
    build_model(Namespace(arch="l2_transformer_xl", **TINY_XL), made)
    assert made._collate_fn is collate


def test_other_models_of_the_task_see_what_they_saw(text_data):
    made = bptt_task(text_data)
    build_model(Namespace(arch="transformer_lm", tokens_per_sample=8, max_target_positions=8), made)
    made.load_dataset("valid")
    assert set(batches(made, "valid")[0]["net_input"]) == {"src_tokens"}


def test_scores_of_the_scorer_are_those_of_the_whole_text(numbered):
    """fairseq-eval-lm's scorer, the log-probabilities some tokens at a time; then another set, and the first again."""
    made, model = numbered
    model.double().decoder.memory.length = 1000
    for softmax_batch in (None, 5):
        for split in ("valid", "train", "valid"):
            found = batches(made, split)
            whole = torch.cat([batch["net_input"]["src_tokens"] for batch in found], 1)
            expected = by_definition(model, whole).log_softmax(-1)
            place = 0
            scorer = SequenceScorer(made.target_dictionary, softmax_batch)
            for batch in found:
                target = batch["target"]
                wanted = expected[:, place : place + target.size(1)].gather(2, target[..., None])[..., 0]
                for i, (hypothesis, *_) in enumerate(scorer.generate([model], batch)):
                    scores = hypothesis["positional_scores"]
                    torch.testing.assert_close(scores, wanted[i, : len(scores)])
                place += target.size(1)


# ---- step by step ----------------------------------------------------------------------------------------------------


def step_by_step(model, tokens, state):
    features = [
        model.decoder(tokens[:, : t + 1], incremental_state=state)[0] for t in range(tokens.size(1))
    ]  # each [B, 1, C]
    return model.get_normalized_probs((torch.cat(features, 1), None), log_probs=True)


@every_mixing
@every_normalizer
@pytest.mark.parametrize("same_length", [False, True])
def test_step_by_step_is_the_full_pass(normalizer, mixing, same_length):
    model = variant(normalizer, mixing, same_length=same_length, mem_len=5)
    tokens = text(8)
    state = {}
    torch.testing.assert_close(step_by_step(model, tokens, state), log_probs(model, tokens, 0))
    order = torch.tensor([1, 1])
    model.decoder.reorder_incremental_state_scripting(state, order)
    longer = torch.cat([tokens[order], text(1)], 1)
    step = model.get_normalized_probs(model.decoder(longer, incremental_state=state), log_probs=True)
    torch.testing.assert_close(step, log_probs(model, longer, 0)[:, -1:])


def test_steps_see_as_far_as_the_last_token_of_a_window_of_training():
    model = variant("softmax", "position-wise", mem_len=4, max_target_positions=3)
    tokens = text(15)
    found = step_by_step(model, tokens, {})
    torch.testing.assert_close(found, by_definition(model, tokens, span=4 + 3))
    assert not torch.allclose(found, by_definition(model, tokens))


def test_steps_leave_the_memory_alone():
    model = variant("softmax", "position-wise")
    first, second = text(16).split(8, 1)
    expected = in_windows(model, torch.cat([first, second], 1), [8, 8])[:, 8:]
    log_probs(model, first, 0)
    alone = step_by_step(model, first, {})
    torch.testing.assert_close(log_probs(model, second, 1), expected)
    torch.testing.assert_close(alone, log_probs(model, first, 0))


@pytest.mark.parametrize("arch", ["mixhead_transformer_xl", "l2_transformer_xl"])
def test_beam_search_scores_its_hypotheses_as_the_full_pass_does(arch):
    model = build_xl(arch, max_target_positions=12).double().eval()
    words = dictionary()
    source = torch.randint(words.nspecial, VOCABULARY, (3, 4))
    search = BeamSearch(words)
    generator = SequenceGenerator(
        [model], words, beam_size=4, max_len_b=9, normalize_scores=False, search_strategy=search
    )
    sample = {"net_input": {"src_tokens": source}}
    found = generator.generate([model], sample, prefix_tokens=source, bos_token=words.eos())
    assert len({tuple(h["tokens"].tolist()) for h in found[0]}) == 4
    for i, hypotheses in enumerate(found):
        for hypothesis in hypotheses:
            target = hypothesis["tokens"][None]
            assert torch.equal(target[0, :4], source[i])
            prefix = torch.cat([torch.tensor([[words.eos()]]), target[:, :-1]], 1)
            expected = log_probs(model, prefix, 0).gather(2, target[..., None])[0, :, 0]
            scores = hypothesis["positional_scores"]
            torch.testing.assert_close(scores, expected.to(scores.dtype), rtol=1e-4, atol=1e-4)


# ---- what fairseq's models can do ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_are_finite_and_close(dtype):
    model = build_xl(attention_normalizer="sigsoftmax").eval()
    tokens = text(16)
    expected = in_windows(model, tokens, [8, 8])
    found = in_windows(model.to(dtype), tokens, [8, 8])
    assert model.decoder.memory.recall(2, torch.zeros(1, 2, 1, dtype=dtype))[0].dtype == dtype
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= 64 * torch.finfo(dtype).eps * expected.abs().max()


def test_gradients_go_through_everything_and_the_memory_of_none():
    model = build_xl(div_val=2).train()
    first, second = torch.arange(32).remainder(VOCABULARY).view(2, 16).split(8, 1)
    model(first, window=0)
    log_probs(model, second, 1).square().mean().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())


@pytest.mark.parametrize("flag", ["checkpoint_activations", "offload_activations"])
def test_checkpointed_activations_give_the_same_gradients(flag):
    gradients = []
    for on in (False, True):
        model = build_xl(dropout=0.1, dropatt=0.2, **{flag: on}).train()
        torch.manual_seed(5)
        tokens = text(16)
        for window, part in enumerate(tokens.split(8, 1)):
            log_probs(model, part, window)[..., 5].mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_the_initialisation_is_that_of_the_published_code():
    args = Namespace(arch="l2_transformer_xl", **{**TINY_XL, "d_model": 64, "d_inner": 96, "div_val": 2})
    decoder = build_model(args, task()).decoder
    layer = decoder.layers[0]
    for values, mean, std in [
        (layer.self_attn.q_proj.weight, 0, 0.02),
        (layer.self_attn.position_proj.weight, 0, 0.02),
        (layer.self_attn.v_proj.weight, 0, 0.01),  # of family l2: the factor comes after
        (layer.self_attn.out_proj.weight, 0, 0.01),
        (layer.fc1.weight, 0, 0.02),
        (decoder.embed_tokens.bands[0].weight, 0, 0.02),
        (decoder.embed_tokens.projections[0].weight, 0, 0.01),
        (decoder.adaptive_softmax.head.projection.weight, 0, 0.01),
        (decoder.adaptive_softmax.head.cluster_weight, 0, 0.02),
        (decoder.content_bias, 0, 0.02),
        (layer.final_layer_norm.weight, 1, 0.02),
    ]:
        assert values.mean().item() == pytest.approx(mean, abs=4 * std / values.numel() ** 0.5)
        assert values.std().item() == pytest.approx(std, rel=4 / (2 * values.numel()) ** 0.5)
    assert all(
        not p.any()
        for n, p in decoder.named_parameters()
        if n.endswith("bias") and "content_bias" != n != "position_bias"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_its_preset(family):
    model = build_xl(f"{family}_transformer_xl")
    preset = FAMILIES[family]
    for layer in model.decoder.layers:
        attention = layer.self_attn
        assert attention.normalizer == preset.get("attention_normalizer", "softmax")
        assert attention.head_mixing_kind == preset.get("head_mixing", "none")
        assert attention.value_init_scale == preset.get("value_init_scale", 1.0)
        assert attention.head_dim == (TINY_XL["tokens_per_sample"] if "head_dim" in preset else TINY_XL["d_head"])


def test_a_checkpoint_of_other_flags_is_refused_by_flag():
    state = build_xl("l2_transformer_xl").state_dict()
    for flags, message in [
        ({"arch": "sigsoftmax_transformer_xl"}, "use --attention-normalizer l2"),
        ({"arch": "l2_transformer_xl", "n_head": 5}, "use --n-head 3"),
        ({"arch": "l2_transformer_xl", "d_model": 16}, "use --d-model 12"),
        ({"arch": "l2_transformer_xl", "d_head": 4}, "use --head-dim 5"),
    ]:
        with pytest.raises(OptionError, match=message):
            build_xl(**flags).load_state_dict(state)


# ---- architectures ---------------------------------------------------------------------------------------------------

COUNTS = {  # by recipe: vocabulary, parameters, the paper's millions, what Mixhead A and B add
    "transformer_xl_wiki103": (WIKITEXT103, 151_111_237, 151, 1_600, 8_160),
    "transformer_xl_wiki2": (WIKITEXT2, 40_296_111, 40, 1_600, 8_160),
    "transformer_xl_lm1b": (LM1B, 294_452_099, 294, 1_152, 19_584),
}


@pytest.mark.parametrize("name", XL)
def test_models_have_as_many_parameters_as_in_the_paper(name):
    vocabulary, expected, paper, independent, wise = COUNTS[name]
    arch = f"mixhead_{name}"
    base = parameters(arch, vocabulary, head_mixing="none")
    assert base == expected
    assert round(base / 1e6) == paper
    assert parameters(arch, vocabulary, head_mixing="position-independent") == base + independent
    assert parameters(arch, vocabulary, head_mixing="position-wise") == base + wise


def test_the_published_code_has_exactly_as_many():
    """Its vocabularies have <unk> and <eos>; fairseq's also <s> and <pad>, and are filled up to a multiple of 8."""
    assert parameters("sigsoftmax_transformer_xl_wiki103", 267_735) == 151_107_538
    assert parameters("sigsoftmax_transformer_xl_lm1b", 793_471) == 294_452_082


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", XL)
def test_every_recipe_architecture_builds_and_trains_in_every_family(name, family):
    sizes = {"n_layer": 2, "d_model": 16, "n_head": 4, "d_inner": 8, "cutoffs": [9, 20], "tokens_per_sample": 8}
    args = Namespace(arch=f"{family}_{name}", d_head=6, **sizes)
    model = build_model(args, task())
    assert type(model) is ARCH_MODEL_REGISTRY[f"{family}_{name}"]
    model(text(8))[0].square().mean().backward()
    attentions = [m for m in model.modules() if isinstance(m, MixheadAttention)]
    assert len(attentions) == 2 and all(m.q_proj.weight.grad.abs().sum() > 0 for m in attentions)


def command(arch, *flags, task="truncated_bptt_lm"):
    """What fairseq-train understands."""
    parser = options.get_training_parser()
    required = ["data", "--task", task, "--arch", arch, "--batch-size", "4"]
    return options.parse_args_and_arch(parser, [*required, *flags])


@pytest.mark.parametrize("name", XL)
def test_command_line_and_yaml_get_the_table(name):
    args = command(f"fixhead_{name}", "--tokens-per-sample", "48")
    model = {"_name": f"fixhead_{name}"}
    data = {"_name": "truncated_bptt_lm", "data": "data", "tokens_per_sample": 48, "batch_size": 4}
    cfg = OmegaConf.create({"task": data, "model": model, "common": {"tpu": False}})
    add_defaults(cfg)
    with torch.device("meta"):
        built = [build_model(c, task_of(WIKITEXT2)) for c in (cfg.model, convert_namespace_to_omegaconf(args).model)]
    for option, value in RECIPE_ARCHITECTURES[name].defaults.items():
        assert getattr(args, option) == cfg.model[option] == value, option
    for model in built:
        attention = model.decoder.layers[0].self_attn
        assert (attention.head_dim, len(model.decoder.layers)) == (48, args.n_layer)
        assert model.decoder.embed_tokens.cutoffs == [20_000, WIKITEXT2]


def test_flags_override_the_table():
    args = command("mixhead_transformer_xl_wiki103", "--n-layer", "3", "--d-head", "7", "--cutoffs", "100,200")
    with torch.device("meta"):
        decoder = build_model(convert_namespace_to_omegaconf(args).model, task_of(WIKITEXT2)).decoder
    assert (len(decoder.layers), decoder.embed_tokens.cutoffs) == (3, [100, 200, WIKITEXT2])
    assert {layer.self_attn.head_dim for layer in decoder.layers} == {7} == {args.head_dim}


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"n_head": 0}, "--n-head 0: must be a whole number of at least 1"),
        ({"d_head": 0}, "--d-head 0: must be a whole number of at least 1"),
        ({"n_layer": 0}, "--n-layer 0: must be a whole number of at least 1"),
        ({"d_model": 13}, "--d-model 13: must be even"),
        ({"mem_len": -1}, "--mem-len -1: must be a whole number of at least 0"),
        ({"dropatt": 1.5}, "--dropatt 1.5: must be a probability"),
        ({"cutoffs": [20, 9]}, "--cutoffs 20,9: must be words greater than 0 in ascending order"),
        ({"cutoffs": [0, 9]}, "--cutoffs 0,9: must be words greater than 0 in ascending order"),
        ({"div_val": 4}, "--div-val 4: leaves the last of 3 bands .* no column of --d-model 12"),
        ({"same_length": True, "mem_len": 0}, "--same-length: lets each token see --mem-len tokens"),
        (
            {"attention_scope": "encoder"},
            "--attention-scope encoder: this model has no such attention, only decoder-self",
        ),
        ({"clamp_len": 2.5}, "--clamp-len 2.5: must be a distance"),
        ({"mem_len": True}, "--mem-len True: must be a whole number"),
        ({"cutoffs": [3.5, 9]}, "--cutoffs 3.5,9: must be words"),
        ({"attention_scope": "decoder", "head_mixing": "none"}, "--attention-scope decoder: has no effect"),
        ({"attention_impl": "triton"}, "--attention-impl triton: lacks relative positions"),
        ({"head_mixing": "best"}, "--head-mixing best: must be one of none"),
        (
            {"relative_position": "rotary"},
            "--relative-position rotary: must be none, Transformer-XL has one of its own",
        ),
        ({"heads_per_layer": "decoder-self=3,2"}, "--heads-per-layer decoder-self=3,2: must be left out"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(flags, message):
    with pytest.raises(OptionError, match=message) as error:
        build_xl(**flags)
    assert "\n" not in str(error.value)


def test_the_task_needs_its_rows():
    with pytest.raises(OptionError, match="--batch-size is missing"):
        parser = options.get_training_parser()
        required = ["data", "--task", "truncated_bptt_lm", "--max-tokens", "100"]
        options.parse_args_and_arch(parser, [*required, "--arch", "mixhead_transformer_xl"])


def test_fixhead_without_a_length_is_refused():
    with pytest.raises(OptionError, match="--head-dim"):
        build_xl("fixhead_transformer_xl", tokens_per_sample=None)


class Shuffled(FairseqTask):
    target_dictionary = dictionary()


SHUFFLED = (
    r"--mem-len 150: --task language_modeling .* --model-overrides \"\{'mem_len': 0\}\"\), or --task truncated_bptt_lm"
)


def test_memory_is_refused_where_windows_are_shuffled():
    with pytest.raises(OptionError, match=SHUFFLED):
        command("mixhead_transformer_xl_wiki103", task="language_modeling")
    shuffled = Shuffled(SimpleNamespace(_name="language_modeling"))
    flags = {**TINY_XL, "arch": "mixhead_transformer_xl"}
    with pytest.raises(OptionError, match=SHUFFLED):
        build_model(Namespace(**{**flags, "mem_len": 150}), shuffled)
    assert build_model(Namespace(**{**flags, "mem_len": 0}), shuffled).decoder.memory.length == 0


def test_a_task_without_windows_is_refused():
    with pytest.raises(OptionError, match="--task translation: Transformer-XL needs one with --tokens-per-sample"):
        command("mixhead_transformer_xl", task="translation")


@pytest.mark.slow
def test_without_fairseqs_example_the_rest_of_the_plugin_works(tmp_path):
    code = """
import sys
sys.modules["fairseq.examples.truncated_bptt"] = None
import mixhead_plugin
mixhead_plugin.register()
from fairseq import options
from fairseq.models import ARCH_MODEL_REGISTRY
assert "mixhead_transformer_lm" in ARCH_MODEL_REGISTRY and "mixhead_transformer_xl_wiki2" in ARCH_MODEL_REGISTRY
options.parse_args_and_arch(options.get_training_parser(), ["data", "--arch", sys.argv[1]])
"""
    result = subprocess.run([sys.executable, "-c", code, "l2_transformer_xl_wiki2"], capture_output=True, text=True)
    assert result.returncode != 0
    assert result.stderr.splitlines()[-1].endswith("fairseq-fixed has it")
    assert "error: --arch l2_transformer_xl" in result.stderr and "Traceback" not in result.stderr
