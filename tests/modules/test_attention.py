import itertools
from typing import Dict, List, Optional

import pytest
import torch
from fairseq.modules import MultiheadAttention

from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.ops import NORMALIZERS, attention
from tests.helpers import shake

E, H, B, NQ, NK = 16, 4, 3, 5, 7
KDIM = 12

every_normalizer = pytest.mark.parametrize("normalizer", NORMALIZERS)
every_mixing = pytest.mark.parametrize("mixing", HEAD_MIXINGS)
every_trained_mixing = pytest.mark.parametrize("mixing", [n for n, kind in HEAD_MIXINGS.items() if kind.trained])


def pair(mixing="none", **arguments):
    """The stock module and ours from the same seed."""
    torch.manual_seed(3)
    stock = MultiheadAttention(E, H, **arguments)
    torch.manual_seed(3)
    return stock.eval(), MixheadAttention(E, H, head_mixing=mixing, **arguments).eval()


def padding(n_keys=NK):
    mask = torch.zeros(B, n_keys, dtype=torch.bool)
    mask[1, -2:] = True
    mask[2, -1:] = True
    return mask


def future(n=NQ):
    return torch.full((n, n), float("-inf")).triu(1)


@every_trained_mixing
def test_the_same_seed_gives_the_stock_initialisation(mixing):
    stock, ours = pair(mixing)
    for name, parameter in stock.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name)), name


@every_trained_mixing
@pytest.mark.parametrize("bias", ["plain", "add_bias_kv", "add_zero_attn"])
@pytest.mark.parametrize("masked", [False, True])
def test_untrained_self_attention_is_the_stock_module(mixing, bias, masked):
    arguments = {} if bias == "plain" else {bias: True}
    stock, ours = pair(mixing, self_attention=True, **arguments)
    x = torch.randn(NQ, B, E)
    masks = dict(key_padding_mask=padding(NQ), attn_mask=future()) if masked else {}
    expected, expected_weights = stock(x, x, x, **masks)
    out, weights = ours(x, x, x, **masks)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights, expected_weights)
    assert ours(x, x, x, need_weights=False, **masks)[1] is None


@every_trained_mixing
@pytest.mark.parametrize("need_head_weights", [False, True])
def test_untrained_cross_attention_is_the_stock_module(mixing, need_head_weights):
    stock, ours = pair(mixing, kdim=KDIM, vdim=KDIM, encoder_decoder_attention=True)
    query, key = torch.randn(NQ, B, E), torch.randn(NK, B, KDIM)
    arguments = dict(key_padding_mask=padding(), static_kv=True, need_head_weights=need_head_weights)
    expected, expected_weights = stock(query, key, key, **arguments)
    out, weights = ours(query, key, key, **arguments)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights, expected_weights)
    assert weights.shape == ((H, B, NQ, NK) if need_head_weights else (B, NQ, NK))


def test_before_softmax_returns_what_the_stock_module_returns():
    stock, ours = pair(kdim=KDIM, vdim=KDIM, encoder_decoder_attention=True)
    query, key = torch.randn(NQ, B, E), torch.randn(NK, B, KDIM)
    arguments = dict(key_padding_mask=padding(), static_kv=True, before_softmax=True)
    for expected, out in zip(stock(query, key, key, **arguments), ours(query, key, key, **arguments), strict=True):
        torch.testing.assert_close(out, expected)


@every_trained_mixing
def test_gradients_of_the_untrained_module_are_the_stock_modules(mixing):
    stock, ours = pair(mixing, self_attention=True)
    x = torch.randn(NQ, B, E)
    for module in (stock, ours):
        module(x, x, x, attn_mask=future())[0].square().sum().backward()
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, msg=name)
    for name, parameter in ours.head_mixing.named_parameters():
        assert parameter.grad.abs().max() > 0, name


@every_mixing
@every_normalizer
@pytest.mark.parametrize("head_dim", [None, 3])
def test_the_output_is_the_equations(normalizer, mixing, head_dim):
    module = MixheadAttention(
        E, H, self_attention=True, normalizer=normalizer, head_mixing=mixing, head_dim=head_dim
    ).double()
    shake(module)
    x = torch.randn(NQ, B, E).double()
    out, weights = module(x, x, x, attn_mask=future().double(), key_padding_mask=padding(NQ), need_head_weights=True)

    size = head_dim or E // H
    q, k, v = (
        proj(x).view(NQ, B, H, size).permute(1, 2, 0, 3) for proj in (module.q_proj, module.k_proj, module.v_proj)
    )
    matrix = None
    if mixing == "position-wise":
        matrix = torch.einsum("bjtd,di->btji", q, module.head_mixing.query_weight) + module.head_mixing.bias
    elif mixing != "none":
        matrix = module.head_mixing.weight
    arguments = dict(normalizer=normalizer, mixing=matrix, causal=True, key_padding_mask=padding(NQ), impl="reference")
    expected = module.out_proj(attention(q, k, v, **arguments).permute(2, 0, 1, 3).reshape(NQ, B, H * size))
    torch.testing.assert_close(out, expected)
    # with V the identity the reference's output is the weights
    identity = torch.eye(NQ).double().expand(B, H, NQ, NQ)
    torch.testing.assert_close(weights, attention(q, k, identity, **arguments).transpose(0, 1))


@every_mixing
@every_normalizer
def test_weights_asked_for_or_not_the_output_is_the_same(normalizer, mixing):
    module = shake(MixheadAttention(E, H, self_attention=True, normalizer=normalizer, head_mixing=mixing))
    x = torch.randn(NQ, B, E)
    outputs = [module(x, x, x, need_weights=need, attn_mask=future())[0] for need in (False, True)]
    torch.testing.assert_close(*outputs)


def decode(module, x, key=None, beams=1, key_padding_mask=None):
    """The module fed one query at a time, as beam search does."""
    state, steps = {}, []
    for t in range(x.size(0)):
        step = x[t : t + 1]
        k = step if key is None else key
        arguments = {} if key is None else dict(static_kv=True, key_padding_mask=key_padding_mask)
        steps.append(module(step, k, k, incremental_state=state, need_weights=False, **arguments)[0])
    return torch.cat(steps), state


@every_mixing
@every_normalizer
def test_self_attention_step_by_step_is_the_full_pass(normalizer, mixing):
    module = shake(MixheadAttention(E, H, self_attention=True, normalizer=normalizer, head_mixing=mixing))
    x = torch.randn(NQ, B, E)
    full = module(x, x, x, attn_mask=future(), need_weights=False)[0]
    torch.testing.assert_close(decode(module, x)[0], full)


@pytest.mark.parametrize("constant", ["add_bias_kv", "add_zero_attn"])
def test_constant_keys_count_once_however_many_steps_were_decoded(constant):
    module = shake(MixheadAttention(E, H, self_attention=True, head_mixing="position-wise", **{constant: True}))
    x = torch.randn(NQ, B, E)
    full = module(x, x, x, attn_mask=future(), need_weights=False)[0]
    torch.testing.assert_close(decode(module, x)[0], full)


@every_mixing
@every_normalizer
@pytest.mark.parametrize("beam", [1, 2])
def test_cross_attention_step_by_step_is_the_full_pass(normalizer, mixing, beam):
    module = MixheadAttention(
        E, H, kdim=KDIM, vdim=KDIM, encoder_decoder_attention=True, normalizer=normalizer, head_mixing=mixing
    )
    shake(module)
    key = torch.randn(NK, B, KDIM)
    query = torch.randn(NQ, B * beam, E)
    repeated = key.repeat_interleave(beam, 1)
    mask = padding().repeat_interleave(beam, 0)
    full = module(query, repeated, repeated, key_padding_mask=mask, static_kv=True, need_weights=False)[0]
    module.set_beam_size(beam)
    steps, state = decode(module, query, repeated, key_padding_mask=mask)
    torch.testing.assert_close(steps, full)
    # the cache holds every sentence once
    assert module._get_input_buffer(state)["prev_key"].shape == (B, H, NK, E // H)
    whole, weights = module(query, repeated, repeated, key_padding_mask=mask, static_kv=True, need_head_weights=True)
    torch.testing.assert_close(whole, full)
    assert weights.shape == (H, B * beam, NQ, NK)


@every_mixing
def test_the_beam_size_of_an_earlier_search_changes_nothing(mixing):
    """Neither training, nor a search of another beam size whose sentences happen to be as many."""
    module = shake(MixheadAttention(E, H, kdim=KDIM, vdim=KDIM, encoder_decoder_attention=True, head_mixing=mixing))
    query, key = torch.randn(NQ, 4, E), torch.randn(NK, 4, KDIM)
    full = module(query, key, key, static_kv=True, need_weights=False)[0]
    module.set_beam_size(2)
    torch.testing.assert_close(module(query, key, key, static_kv=True, need_weights=False)[0], full)
    steps, state = decode(module, query, key)
    torch.testing.assert_close(steps, full)

    order = torch.tensor([3, 0, 0, 1])
    module.reorder_incremental_state(state, order)
    step = module(query[:1, order], None, None, incremental_state=state, static_kv=True, need_weights=False)[0]
    torch.testing.assert_close(step, full[:1, order])


def test_sentences_that_are_finished_leave_the_cache():
    module = shake(MixheadAttention(E, H, encoder_decoder_attention=True, head_mixing="position-wise"))
    module.set_beam_size(2)
    query, key = torch.randn(NQ, 6, E), torch.randn(NK, 3, E).repeat_interleave(2, 1)
    full = module(query, key, key, static_kv=True, need_weights=False)[0]
    _, state = decode(module, query, key)
    order = torch.tensor([1, 1, 4, 5])  # the second sentence is finished, the first goes on from its second hypothesis
    module.reorder_incremental_state(state, order)
    step = module(query[:1, order], None, None, incremental_state=state, static_kv=True, need_weights=False)[0]
    torch.testing.assert_close(step, full[:1, order])


@every_mixing
@pytest.mark.parametrize("cross", [False, True])
def test_reordered_beams_go_on_as_if_they_had_always_been_there(mixing, cross):
    module = MixheadAttention(
        E, H, self_attention=not cross, encoder_decoder_attention=cross, normalizer="sigsoftmax", head_mixing=mixing
    )
    shake(module)
    order = torch.tensor([2, 0, 0])
    x = torch.randn(NQ, B, E)
    key = torch.randn(NK, B, E) if cross else None
    _, state = decode(module, x, key)
    module.reorder_incremental_state(state, order)
    last = torch.randn(1, B, E)
    k = None if cross else last
    step = module(last, k, k, incremental_state=state, static_kv=cross, need_weights=False)[0]
    chosen = torch.cat([x[:, order], last])
    if cross:
        full = module(chosen, key[:, order], key[:, order], static_kv=True, need_weights=False)[0]
    else:
        full = module(chosen, chosen, chosen, attn_mask=future(NQ + 1), need_weights=False)[0]
    torch.testing.assert_close(step, full[-1:])


class StepByStep(torch.nn.Module):
    """`decode` inside of TorchScript, where alone its dictionaries can be changed in place."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor, key: Optional[torch.Tensor]):
        state: Dict[str, Dict[str, Optional[torch.Tensor]]] = {}
        steps: List[torch.Tensor] = []
        for t in range(x.size(0)):
            step = x[t : t + 1]
            k = step if key is None else key
            steps.append(
                self.attention(step, k, k, incremental_state=state, need_weights=False, static_kv=key is not None)[0]
            )
        return torch.cat(steps)


@every_mixing
@every_normalizer
@pytest.mark.parametrize("cross", [False, True])
def test_torchscript_gives_the_same_outputs(normalizer, mixing, cross):
    module = MixheadAttention(
        E, H, self_attention=not cross, encoder_decoder_attention=cross, normalizer=normalizer, head_mixing=mixing
    )
    shake(module).eval()
    scripted = torch.jit.script(module)
    x = torch.randn(NQ, B, E)
    key = torch.randn(NK, B, E) if cross else x
    arguments = dict(static_kv=cross, key_padding_mask=padding(key.size(0)))
    if not cross:
        arguments["attn_mask"] = future()
    for need in itertools.product([False, True], repeat=2):
        expected = module(x, key, key, need_weights=need[0], need_head_weights=need[1], **arguments)
        got = scripted(x, key, key, need_weights=need[0], need_head_weights=need[1], **arguments)
        torch.testing.assert_close(got, expected)
    steps = torch.jit.script(StepByStep(module))(x, key if cross else None)
    torch.testing.assert_close(steps, decode(module, x, key if cross else None)[0])


def test_masks_may_be_boolean_or_one_per_head():
    module = MixheadAttention(E, H, self_attention=True, head_mixing="position-wise").eval()
    shake(module)
    x = torch.randn(NQ, B, E)
    expected = module(x, x, x, attn_mask=future())[0]
    torch.testing.assert_close(module(x, x, x, attn_mask=future().bool())[0], expected)
    torch.testing.assert_close(module(x, x, x, attn_mask=future().expand(B * H, NQ, NQ))[0], expected)
    # encoder layers hide with -1e8 instead of -inf
    torch.testing.assert_close(module(x, x, x, attn_mask=future().clamp_min(-1e8))[0], expected)


@every_normalizer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_close_to_float32(normalizer, dtype):
    module = shake(MixheadAttention(E, H, self_attention=True, normalizer=normalizer, head_mixing="position-wise"))
    x = torch.randn(NQ, B, E)
    expected = module(x, x, x, attn_mask=future())[0]
    out = module.to(dtype)(x.to(dtype), x.to(dtype), x.to(dtype), attn_mask=future().to(dtype))[0]
    assert out.dtype == dtype
    assert (out.float() - expected).abs().max() <= 16 * torch.finfo(dtype).eps * expected.abs().max()


def test_autocast_does_not_lower_the_precision_of_the_weights():
    module = shake(MixheadAttention(E, H, self_attention=True, head_mixing="position-wise")).eval()
    x = torch.randn(NQ, B, E)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = module(x, x, x)[1]
    assert weights.dtype == torch.float32


def test_dropout_runs_in_training_and_where_it_is_retained():
    module = MixheadAttention(E, H, self_attention=True, dropout=0.5, head_mixing="position-wise").eval()
    x = torch.randn(NQ, B, E)
    first = module(x, x, x)[0]
    assert torch.equal(first, module(x, x, x)[0])
    module.dropout_module.make_generation_fast_(
        "attention", retain_dropout=True, retain_dropout_modules=["MultiheadAttention"]
    )
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    module.dropout_module.apply_during_inference = False
    module.train()
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])


def test_the_returned_weights_are_those_before_dropout():
    module = MixheadAttention(E, H, self_attention=True, dropout=0.5).train()
    x = torch.randn(NQ, B, E)
    torch.testing.assert_close(module(x, x, x)[1], module.eval()(x, x, x)[1])


@pytest.mark.parametrize("head_dim", [1, 3, 40])
def test_the_head_size_is_free(head_dim):
    module = MixheadAttention(E, 5, self_attention=True, head_dim=head_dim, head_mixing="position-wise")
    x = torch.randn(NQ, B, E)
    assert module(x, x, x)[0].shape == (NQ, B, E)
    assert module.q_proj.weight.shape == (5 * head_dim, E)
    assert module.scaling == head_dim**-0.5


def test_the_value_scale_shrinks_values_and_outputs_alone():
    torch.manual_seed(3)
    ours = MixheadAttention(E, H, value_init_scale=0.25)
    stock, _ = pair()
    for name, parameter in stock.named_parameters():
        scale = 0.25 if name in ("v_proj.weight", "out_proj.weight") else 1.0
        torch.testing.assert_close(ours.get_parameter(name), scale * parameter, msg=name)


def test_heads_that_do_not_divide_the_embedding_need_a_head_size():
    with pytest.raises(ValueError, match="num_heads 5 does not divide embed_dim 16"):
        MixheadAttention(E, 5)


def test_quantisation_noise_reaches_the_projections():
    module = MixheadAttention(E, H, self_attention=True, q_noise=0.5, qn_block_size=4).train()
    x = torch.randn(NQ, B, E)
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])
