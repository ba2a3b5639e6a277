"""Transformer-XL is the model of the paper; its memory holds the text before and nothing else."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fairseq.examples.truncated_bptt.truncated_bptt_lm_task import (
    TruncatedBPTTLMConfig,
    TruncatedBPTTLMTask,
)
from fairseq.models import build_model
from fairseq.tasks import FairseqTask
from omegaconf import OmegaConf

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.models.transformer_xl.decoder import distance_encodings, span_mask
from mixhead_plugin.fairseq.models.transformer_xl.model import MixheadTransformerXLModel
from mixhead_plugin.fairseq.options import FAMILIES
from mixhead_plugin.ops import NORMALIZERS
from mixhead_plugin.parts.head_mixing import HEAD_MIXINGS
from tests.covering import each_once
from tests.fairseq.models.cases import (
    WIKITEXT2,
    attentions,
    command,
    in_real_size,
    parameters,
    step_by_step,
    task_of,
    yaml,
)
from tests.helpers import VOCABULARY, dictionary, task
from tests.transformer_xl import TINY_XL, build_xl, in_windows, log_probs, text

every_entry = each_once(normalizer=NORMALIZERS, mixing=HEAD_MIXINGS, same_length=[False, True])


def variant(normalizer="softmax", mixing="position-wise", **flags):
    """Return a model in double precision and in evaluation."""
    flags |= {"n_head": 4} if HEAD_MIXINGS[mixing].heads_per_mixed > 1 else {}
    return build_xl(attention_normalizer=normalizer, head_mixing=mixing, **flags).double().eval()


def by_definition(model, tokens, span=None):
    """Return the log-probabilities of a whole text, layer by layer.

    Attention and softmax have tests of their own.
    """
    decoder = model.decoder
    x = decoder.embed_tokens(tokens).transpose(0, 1)
    n = x.size(0)
    positions = distance_encodings(n, x.size(2), decoder.clamp_len, x)
    mask = span_mask(n, n, span, x)
    for layer in decoder.layers:
        first = layer.self_attn_layer_norm
        second = layer.final_layer_norm
        attended = layer.self_attn(
            x, None, positions, decoder.content_bias, decoder.position_bias, attn_mask=mask
        )
        x = F.layer_norm(x + attended, x.shape[2:], first.weight, first.bias, 1e-5)
        inner = F.linear(
            F.relu(F.linear(x, layer.fc1.weight, layer.fc1.bias)), layer.fc2.weight, layer.fc2.bias
        )
        x = F.layer_norm(x + inner, x.shape[2:], second.weight, second.bias, 1e-5)
    return decoder.adaptive_softmax.get_log_prob(x.transpose(0, 1), None)


# ---- the text before ---------------------------------------------------------------------------


@every_entry
def test_a_text_is_the_same_in_one_window_and_in_many(normalizer, mixing, same_length):
    """Compare them where the memory holds as much as each token sees."""
    model = variant(normalizer, mixing, mem_len=6 if same_length else 30, same_length=same_length)
    tokens = text(23)
    expected = by_definition(model, tokens, span=6 if same_length else None)
    torch.testing.assert_close(log_probs(model, tokens, 0), expected)
    torch.testing.assert_close(in_windows(model, tokens, [1, 3, 2, 5, 4, 8]), expected)


def test_neither_other_rows_nor_padding_at_the_end_are_seen():
    model = variant("sigsoftmax")
    alone = variant("sigsoftmax", mem_len=0)
    tokens = text(16, batch=3)
    together = in_windows(model, tokens, [8, 8])
    for i in range(3):
        torch.testing.assert_close(
            in_windows(model, tokens[i : i + 1], [8, 8]), together[i : i + 1]
        )
    padded = torch.cat([tokens, torch.full((3, 3), dictionary().pad())], 1)
    torch.testing.assert_close(log_probs(alone, padded)[:, :16], log_probs(alone, tokens))


def test_without_numbers_memory_goes_on_until_it_is_reset():
    model = variant()
    first, second = text(16).split(8, 1)
    alone = log_probs(model, second)
    expected = in_windows(model, torch.cat([first, second], 1), [8, 8])[:, 8:]
    assert (expected - alone).abs().max() > 0.01  # memory matters
    model.reset_memory()
    log_probs(model, first)
    torch.testing.assert_close(log_probs(model, second), expected)
    model.reset_memory()
    torch.testing.assert_close(log_probs(model, second), alone)


# ---- windows of fairseq's task -----------------------------------------------------------------


def bptt_task(text_data, **settings):
    settings = {"tokens_per_sample": 8, "max_target_positions": 8, "batch_size": 3, **settings}
    return TruncatedBPTTLMTask.setup_task(
        OmegaConf.structured(TruncatedBPTTLMConfig(data=str(text_data), **settings))
    )


def build_for(made, arch="mixhead_transformer_xl", **sizes):
    model = build_model(Namespace(arch=arch, **(sizes or TINY_XL)), made)
    for split in ("train", "valid"):
        made.load_dataset(split)
    return model.eval()


def batches(made, split):
    return list(made.get_batch_iterator(made.dataset(split)).next_epoch_itr(shuffle=False))


def test_batches_say_which_window_of_their_text_they_are(text_data):
    made = bptt_task(text_data)
    build_for(made)
    model = build_for(made, "l2_transformer_xl")  # a second model must not number them again
    found = batches(made, "train")
    assert [batch["net_input"]["window"] for batch in found] == list(range(len(found)))
    assert all(batch["net_input"]["src_lengths"].tolist() == [8, 8, 8] for batch in found[:-1])
    rows = torch.cat([batch["net_input"]["src_tokens"] for batch in found[:-1]], 1)
    assert torch.equal(
        rows[0], torch.cat([made.datasets["train"].data[i] for i in range(len(found) - 1)])
    )
    model(**found[0]["net_input"])


def test_the_loss_is_divided_by_the_tokens_that_are_predicted(text_data):
    """The last token of a window has no target, because the next word is in the next window."""
    made = bptt_task(text_data)
    build_for(made)
    *full, last = batches(made, "valid")
    assert [batch["ntokens"] for batch in full] == [3 * 7] * len(full)
    assert last["ntokens"] == last["target"].ne(made.dictionary.pad()).sum()


def test_a_last_window_of_one_token_is_left_out(text_data):
    """It has no target, and adaptive_loss would divide by their number."""
    one_row = bptt_task(text_data, batch_size=1)
    one_row.load_dataset("valid")
    tokens = sum(batch["net_input"]["src_tokens"].numel() for batch in batches(one_row, "valid"))
    length = next(length for length in range(2, tokens) if tokens % length == 1)
    made = bptt_task(text_data, batch_size=1, tokens_per_sample=length)
    made.load_dataset("valid")
    found = batches(made, "valid")
    assert [batch["ntokens"] for batch in found] == [length - 1] * (tokens // length)


def test_what_fills_no_row_is_said_and_nothing_at_all_is_refused(text_data, caplog):
    made = bptt_task(text_data, batch_size=5)
    build_for(made)
    dataset = made.dataset("valid")
    left_out = len(dataset.data) % 5
    assert left_out > 0
    assert len(list(made.eval_lm_dataloader(dataset, num_workers=0))) == len(dataset)
    assert f"the last {left_out} windows fill no row" in caplog.text
    made.cfg.batch_size = len(dataset.data) + 1
    made.load_dataset("valid")
    with pytest.raises(
        OptionError, match=f"^--batch-size {len(dataset.data) + 1}: .* {len(dataset.data)}"
    ):
        made.eval_lm_dataloader(made.dataset("valid"))


def test_a_checkpoint_of_two_workers_is_validated_by_one(text_data):
    """Set up the task as fairseq-validate does.

    That is by `from_checkpoint`, with the worker of the training.
    """
    saved = bptt_task(text_data, data_parallel_rank=0, data_parallel_size=2)
    saved.load_dataset("valid")
    again = TruncatedBPTTLMTask.setup_task(saved.cfg, from_checkpoint=True)
    again.load_dataset("valid")
    assert len(again.dataset("valid")) == 2 * len(saved.dataset("valid")) > 0


# ---- step by step ------------------------------------------------------------------------------


@every_entry
def test_step_by_step_is_the_full_pass(normalizer, mixing, same_length):
    model = variant(normalizer, mixing, same_length=same_length, mem_len=5)
    tokens = text(8)
    logits, state = step_by_step(model.decoder, tokens)
    found = model.get_normalized_probs((logits, None), log_probs=True)
    torch.testing.assert_close(found, log_probs(model, tokens, 0))
    order = torch.tensor([1, 1])
    model.decoder.reorder_incremental_state_scripting(state, order)
    longer = torch.cat([tokens[order], text(1)], 1)
    step = model.get_normalized_probs(
        model.decoder(longer, incremental_state=state), log_probs=True
    )
    torch.testing.assert_close(step, log_probs(model, longer, 0)[:, -1:])


def test_steps_leave_the_memory_alone():
    model = variant()
    first, second = text(16).split(8, 1)
    expected = in_windows(model, torch.cat([first, second], 1), [8, 8])[:, 8:]
    log_probs(model, first, 0)
    step_by_step(model.decoder, first)
    torch.testing.assert_close(log_probs(model, second, 1), expected)


# ---- what fairseq's models can do --------------------------------------------------------------


def test_gradients_go_through_everything_and_the_memory_of_none():
    model = build_xl(div_val=2).train()
    first, second = torch.arange(32).remainder(VOCABULARY).view(2, 16).split(8, 1)
    model(first, window=0)
    log_probs(model, second, 1).square().mean().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())


@pytest.mark.parametrize("flag", ["checkpoint_activations", "offload_activations"])
def test_checkpointed_activations_give_the_same_gradients(flag):
    gradients = []
    tokens = text(16)
    for on in (False, True):
        model = build_xl(dropout=0.1, dropatt=0.2, **{flag: on}).train()
        torch.manual_seed(5)
        for window, part in enumerate(tokens.split(8, 1)):
            log_probs(model, part, window)[..., 5].mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_the_initialisation_is_that_of_the_published_code():
    args = Namespace(
        arch="l2_transformer_xl", **{**TINY_XL, "d_model": 64, "d_inner": 96, "div_val": 2}
    )
    decoder = build_model(args, task()).decoder
    layer = decoder.layers[0]
    for values, mean, std in [
        (layer.self_attn.q_proj.weight, 0, 0.02),
        (layer.self_attn.position_proj.weight, 0, 0.02),
        (layer.self_attn.v_proj.weight, 0, 0.01),  # family l2 applies its factor afterwards
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
    biases = {name: p for name, p in decoder.named_parameters() if name.endswith("bias")}
    assert {name for name, p in biases.items() if p.any()} == {"content_bias", "position_bias"}


# ---- architectures -----------------------------------------------------------------------------


def test_the_published_code_has_exactly_as_many_parameters():
    """Use its vocabularies, which have <unk> and <eos>.

    fairseq adds <s>, <pad> and words up to a multiple of 8.
    """
    assert parameters("sigsoftmax_transformer_xl_wiki103", 267_735) == 151_107_538
    assert parameters("sigsoftmax_transformer_xl_lm1b", 793_471) == 294_452_082


@pytest.mark.parametrize("family", FAMILIES)
def test_the_size_of_a_head_is_d_head_unless_the_family_or_the_flag_says_otherwise(family):
    arch = f"{family}_transformer_xl_wiki103"
    expected = 48 if family == "fixhead" else 41
    with torch.device("meta"):
        model = build_model(yaml(arch), task_of(WIKITEXT2))
    assert {attention.head_dim for attention in attentions(model)} == {expected}
    assert model.decoder.embed_tokens.cutoffs == [20_000, WIKITEXT2]
    model = in_real_size(
        arch, WIKITEXT2, head_dim=7, n_layer=3, cutoffs=[100, 200], tokens_per_sample=48
    )
    assert [attention.head_dim for attention in attentions(model)] == [7, 7, 7]
    assert model.decoder.embed_tokens.cutoffs == [100, 200, WIKITEXT2]


def test_the_checks_get_the_true_sizes_and_heads_need_not_divide_the_model():
    sizes = MixheadTransformerXLModel.attention_sites(Namespace(**TINY_XL))["decoder-self"]
    assert (sizes.embed_flag, sizes.embed_dim, sizes.head_dim) == ("--d-model", 12, 5)
    model = build_xl(n_head=7)
    assert model.decoder.layers[0].self_attn.head_dim == 5


def test_bands_that_leave_no_column_are_refused():
    with pytest.raises(OptionError) as error:
        build_xl(div_val=4)
    assert str(error.value) == (
        "--div-val 4: leaves the last of 3 bands (--cutoffs) no column of --d-model 12; must be at "
        "most 3"
    )
    build_xl(div_val=3)


class Shuffled(FairseqTask):
    target_dictionary = dictionary()


def test_memory_is_refused_where_windows_are_shuffled():
    refused = pytest.raises(
        OptionError, match=r"^--mem-len 150: --task language_modeling .*'mem_len': 0.*, or --task"
    )
    with refused:
        command("mixhead_transformer_xl_wiki103", task="language_modeling")
    shuffled = Shuffled(SimpleNamespace(_name="language_modeling"))
    flags = {**TINY_XL, "arch": "mixhead_transformer_xl"}
    with refused:
        build_model(Namespace(**{**flags, "mem_len": 150}), shuffled)
    assert build_model(Namespace(**{**flags, "mem_len": 0}), shuffled).decoder.memory.length == 0
