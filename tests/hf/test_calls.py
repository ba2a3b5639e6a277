"""A call of a mixed model keeps what it needs by itself.

Hooks, threads and compilers around it change nothing.
"""

import contextlib
import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mixhead_plugin.hf.calls import THREADS
from tests.attention_equations import COMBINATIONS
from tests.covering import each_once
from tests.hf.models import FEW, build, hf, shake, transformers, whole

VARIANT = dict(head_mixing="position-wise", feature_mixing="shared")


def attention(model):
    return model.model.layers[0].self_attn


def patch(projection, args, output):
    return output + torch.linspace(-1, 1, output.size(-1), dtype=output.dtype)


def mixed_llama(seed=0):
    torch.manual_seed(seed)
    model, inputs = build("LlamaForCausalLM", **VARIANT)
    return model, inputs


@torch.no_grad()
@pytest.mark.parametrize("when", ["after mix", "after a call"])
def test_mixings_read_the_query_as_hooks_have_patched_it_whenever_they_came(when):
    model, inputs = build("LlamaForCausalLM")
    first = copy.deepcopy(model)
    second = copy.deepcopy(model)
    attention(first).q_proj.register_forward_hook(patch)
    for each in (first, second):
        torch.manual_seed(1)
        shake(hf.mix(each, **VARIANT))
    if when == "after a call":
        second(**inputs)
    attention(second).q_proj.register_forward_hook(patch)
    torch.testing.assert_close(second(**inputs).logits, first(**inputs).logits)


@torch.no_grad()
def test_hooks_that_read_a_projection_see_its_own_features_in_every_call():
    model, inputs = mixed_llama()
    seen = []
    projection = attention(model).q_proj
    projection.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    for _ in range(2):
        model(**inputs)
    assert len(seen) == 2
    for x, features in seen:
        assert torch.equal(features, nn.functional.linear(x, projection.weight))
    # and nothing is mixed outside of a call of the attention
    assert torch.equal(projection(x), features)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # torch announces the end of this quantisation
def test_quantised_models_mix_features_once_called_before_or_not():
    model, inputs = mixed_llama()
    model.float()
    called = copy.deepcopy(model)
    called(**inputs)
    found = [
        torch.ao.quantization.quantize_dynamic(each, {nn.Linear})(**inputs).logits
        for each in (model, called)
    ]
    torch.testing.assert_close(*found)
    error = (found[0] - model(**inputs).logits).norm() / found[0].norm()
    assert error < 0.1  # applied twice, it is about 0.6


@pytest.mark.filterwarnings("ignore")
def test_quantised_models_are_refused_where_their_weights_are_read_or_changed():
    plain, inputs = build("LlamaForCausalLM")
    mixed, _ = build("LlamaForCausalLM", feature_mixing="shared")
    plain, mixed = (
        torch.ao.quantization.quantize_dynamic(each.float(), {nn.Linear}) for each in (plain, mixed)
    )
    before = plain(**inputs).logits
    for refused, what in (
        (lambda: hf.mix(plain, "position-wise"), "mixed"),
        (lambda: hf.prune(plain, {0: [0, 1]}), "pruned"),
        (lambda: hf.fold(mixed), "folded"),
    ):
        problem = (
            rf"^LlamaForCausalLM: model\..*q_proj is quantised; must be {what} before it is "
            r"quantised$"
        )
        with pytest.raises(ValueError, match=problem):
            refused()
    assert torch.equal(plain(**inputs).logits, before)


def test_unmixing_leaves_no_hook_behind():
    model, _ = build("GPT2LMHeadModel")
    hf.unmix(hf.mix(model, **VARIANT))
    for module in model.modules():
        hooks = [name for name, value in vars(module).items() if "_hooks" in name and value]
        assert not hooks


@torch.no_grad()
def test_another_projection_in_place_of_one_is_followed():
    model, inputs = mixed_llama()
    expected = model(**inputs).logits
    attention(model).q_proj = copy.deepcopy(attention(model).q_proj)
    torch.testing.assert_close(model(**inputs).logits, expected)


@torch.no_grad()
def test_weights_are_given_in_the_calls_that_ask_for_them_and_in_no_later_ones():
    model, inputs = build("BertForMaskedLM", head_mixing="position-wise")
    layer = model.bert.encoder.layer[0].attention.self
    x = torch.randn(2, 3, 32).double()
    assert model(**inputs, output_attentions=True).attentions[0] is not None
    assert layer(x)[1] is None
    with pytest.raises(IndexError):  # which ends the call in the middle
        model(input_ids=torch.tensor([[99]]), output_attentions=True)
    assert layer(x)[1] is None


@torch.no_grad()
@pytest.mark.parametrize("next_call", ["same model", "another model"])
def test_the_call_after_an_interrupt_is_right_and_keeps_nothing_of_it(next_call):
    """torch runs no hook after Ctrl-C, because it is no Exception."""

    def interrupt(*_):
        raise KeyboardInterrupt

    model, inputs = build("GPT2LMHeadModel", head_mixing="position-wise")
    mixing = weakref.ref(model.transformer.h[1].attn.head_mixing)
    handle = model.transformer.h[1].attn.c_proj.register_forward_pre_hook(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        model(**inputs, output_attentions=True)
    handle.remove()
    assert THREADS.own.call is not None  # else the interrupt came too late to leave something

    if next_call == "same model":
        assert model(**inputs).attentions is None
        assert THREADS.own.wishes == ()
    else:
        other, _ = build("GPT2LMHeadModel", head_mixing="position-wise")
        assert other(**inputs).attentions is None
    assert THREADS.own.call is None
    del model
    gc.collect()
    assert mixing() is None


@torch.no_grad()
@pytest.mark.parametrize("refuses", [False, True], ids=["another runs", "another is refused"])
def test_a_model_that_is_called_inside_has_its_own_wish_for_weights(refuses):
    def refuse(*_):
        raise KeyError

    def call_inner(*_):
        with contextlib.suppress(KeyError):
            inner(**inputs)

    outer, inputs = build("GPT2LMHeadModel", head_mixing="position-wise")
    inner, _ = build("GPT2LMHeadModel")
    if refuses:
        inner.register_forward_pre_hook(refuse)  # runs before those of the mixing
    hf.mix(inner, "position-wise")
    outer.transformer.h[0].register_forward_pre_hook(call_inner)
    outputs = outer.transformer(**inputs, output_attentions=True)
    assert [weights is None for weights in outputs.attentions] == [False, False]


@torch.no_grad()
@pytest.mark.parametrize("inner", ["model", "layer", "same class, refused"])
def test_a_hook_of_a_projection_may_call_another_mixed_model(inner):
    student, inputs = mixed_llama()
    expected = student(**inputs).logits
    teacher, _ = mixed_llama(seed=1)
    expected_of_teacher = teacher(**inputs).logits
    layer = attention(teacher)
    seen = []

    def call_teacher(*_):
        if inner == "model":
            seen.append(teacher(**inputs).logits)
            return
        queries = torch.randn(1, 3, 32).double()
        rotation = torch.ones(1, 3, 8).double(), torch.zeros(1, 3, 8).double()
        if inner == "layer":
            layer(queries, rotation, None)
            return
        with pytest.raises(ValueError, match="its queries have 16 features"):
            layer(queries, rotation, None)

    if inner == "same class, refused":
        layer.q_proj = nn.Linear(32, 16, bias=False).double()
    attention(student).q_proj.register_forward_hook(call_teacher)
    torch.testing.assert_close(student(**inputs).logits, expected)
    for found in seen:
        torch.testing.assert_close(found, expected_of_teacher)
    assert THREADS.own.call is None


@torch.no_grad()
def test_threads_do_not_see_each_others_calls():
    model, inputs = mixed_llama()
    ids = [inputs["input_ids"], inputs["input_ids"].flip(1)]
    expected = [model(input_ids=each).logits for each in ids]

    @torch.no_grad()
    def call(number):
        for _ in range(30):
            torch.testing.assert_close(model(input_ids=ids[number]).logits, expected[number])

    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(call, number % 2) for number in range(4)]
    for each in calls:
        each.result()  # raises what the call has raised


@torch.no_grad()
@pytest.mark.parametrize(
    "way",
    [
        "in one graph",
        *(
            pytest.param(way, marks=pytest.mark.slow)
            for way in ("before mixing", "in broken graphs")
        ),
    ],
)
def test_compiled_models_mix(way):
    model, inputs = build("LlamaForCausalLM", {"num_hidden_layers": 1})
    inputs = {"input_ids": inputs["input_ids"], "use_cache": False}
    compiled = torch.compile(model, backend="eager", fullgraph=way == "in one graph")
    if way == "before mixing":
        compiled(**inputs)
    shake(hf.mix(model, **VARIANT))
    if way == "in broken graphs":  # the rest of a graph still knows what the call has
        attention(model).k_proj.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)


@torch.no_grad()
def test_projections_that_are_compiled_alone_mix_if_they_were_mixed_before():
    # torch 2.13 does not guard hooks, so it would take the graph of a projection of another model
    # of this process, if that was compiled with breaks of the graph.
    torch.compiler.reset()
    plain, inputs = build("LlamaForCausalLM", {"num_hidden_layers": 1})
    model = shake(hf.mix(copy.deepcopy(plain), **VARIANT))
    expected = model(**inputs).logits
    attention(model).q_proj = torch.compile(attention(model).q_proj, backend="eager")
    attention(model).v_proj.compile(backend="eager")
    torch.testing.assert_close(model(**inputs).logits, expected)

    attention(plain).v_proj.compile(backend="eager")
    problem = (
        r"^LlamaForCausalLM: model\.layers\.0\.self_attn\.v_proj is compiled; must be mixed "
        "before it is compiled$"
    )
    with pytest.raises(ValueError, match=problem):
        hf.mix(plain, **VARIANT)


@pytest.mark.parametrize("use_cache", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "T5ForConditionalGeneration"])
def test_autocast_computes_in_its_type_as_in_the_plain_model(name, dtype, use_cache):
    model, inputs = build(name)
    model.float()
    inputs = whole(model, inputs) | {"use_cache": use_cache}
    mixed = hf.mix(copy.deepcopy(model), **VARIANT)
    with torch.autocast("cpu", dtype):
        expected = model(**inputs).logits
        found = mixed(**inputs).logits
    assert found.dtype == dtype
    assert (found - expected).abs().max() < 0.03 * expected.abs().max()

    found.float().square().sum().backward()
    for parameter in hf.mixing_parameters(mixed).values():
        assert parameter.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:.*was mixed in torch.bfloat16")
@each_once(name=FEW, mixing=COMBINATIONS)
def test_parts_in_float32_compute_and_train_beside_a_model_in_bfloat16(name, mixing, tmp_path):
    model, inputs = build(name)
    inputs = whole(model, inputs)
    shake(hf.mix(model.bfloat16(), **COMBINATIONS[mixing]))
    parts = hf.mixing_parameters(model)
    for parameter in parts.values():
        parameter.data = parameter.data.float() + 1e-4  # which bfloat16 would round away

    found = model(**inputs).logits
    assert found.dtype == torch.bfloat16
    found.float().square().mean().backward()
    for parameter in parts.values():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.any()

    model.save_pretrained(tmp_path)
    loaded = hf.load(tmp_path, dtype=torch.float32).eval()
    for name, parameter in hf.mixing_parameters(loaded).items():
        assert torch.equal(parameter, parts[name])
    exact = loaded(**inputs).logits
    wholly = loaded.bfloat16()(**inputs).logits
    assert torch.linalg.norm(found - exact) < 1.5 * torch.linalg.norm(wholly - exact)


def test_an_integer_mask_of_four_dimensions_is_refused():
    """Its 0 and 1 could be taken for what is added to the scores, or for what is visible."""
    mixed, inputs = mixed_llama()
    length = inputs["input_ids"].size(1)
    mask = torch.ones(len(inputs["input_ids"]), 1, length, length, dtype=torch.long).tril()
    mixed(inputs["input_ids"], attention_mask=mask.bool())
    with pytest.raises(TypeError) as refused:
        mixed(inputs["input_ids"], attention_mask=mask)
    assert str(refused.value) == (
        "attention_mask is torch.int64: a mask of four dimensions must be bool, True is visible, "
        "or floats, which are added"
    )


class AttentionWithMemory(nn.Module):
    """A causal attention without a mask, whose keys may begin before its queries."""

    is_causal = True

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.num_heads = 4
        self.head_dim = 8
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(32, 32))

    def forward(self, x, memory=None, attention_mask=None):
        keys = x if memory is None else torch.cat([memory, x], 1)
        q, k, v = (
            projection(inputs).unflatten(-1, (4, 8)).transpose(1, 2)
            for projection, inputs in (
                (self.q_proj, x),
                (self.k_proj, keys),
                (self.v_proj, keys),
            )
        )
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = attend(self, q, k, v, attention_mask, scaling=8**-0.5)
        return self.o_proj(out.flatten(2))


class ModelWithMemory(transformers.PreTrainedModel):
    config_class = transformers.BertConfig
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.attention = AttentionWithMemory(config)
        self.post_init()

    def forward(self, *inputs):
        return self.attention(*inputs)


@torch.no_grad()
def test_causal_attention_without_a_mask_is_refused_where_transformers_hides_different_keys():
    plain = ModelWithMemory(transformers.BertConfig()).eval()
    model = hf.mix(copy.deepcopy(plain), "position-wise")
    x = torch.randn(2, 5, 32)
    memory = torch.randn(2, 3, 32)
    with pytest.raises(ValueError) as refused:
        model(x, memory)
    assert str(refused.value) == (
        "AttentionWithMemory: is causal, and has 5 queries and 8 keys; attention_mask must say "
        "which keys a query sees, because the attentions of transformers differ there"
    )
    mask = torch.ones(2, 1, 5, 8, dtype=torch.bool).tril(3)
    one = x[:, :1]  # as in a step with a cache
    for inputs in ((x,), (x, memory, mask), (one, memory)):
        torch.testing.assert_close(model(*inputs), plain(*inputs))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_with_checkpointing_are_those_without(reentrant):
    model, inputs = mixed_llama()
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": reentrant}
            )
        model.zero_grad()
        model.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(*found)


def test_a_projection_of_another_size_is_refused():
    model, inputs = mixed_llama()
    attention(model).q_proj = nn.Linear(32, 16, bias=False).double()
    problem = r"^LlamaAttention: its queries have 16 features, must be 32, as when it was mixed$"
    with pytest.raises(ValueError, match=problem):
        model(**inputs)


def test_a_projection_whose_hooks_did_not_run_is_refused(monkeypatch):
    model, inputs = mixed_llama()
    projection = attention(model).q_proj
    call = nn.Linear.__call__

    def call_past_the_hooks(self, x):
        if self is projection:
            return self.forward(x)
        return call(self, x)

    monkeypatch.setattr(nn.Linear, "__call__", call_past_the_hooks)
    problem = "^LlamaAttention: its projection of queries was not called"
    with pytest.raises(RuntimeError, match=problem):
        model(**inputs)


@torch.no_grad()
def test_queries_that_are_projected_twice_before_they_attend_are_refused(monkeypatch):
    model, _ = build("BertForMaskedLM", head_mixing="position-wise")
    layer = model.bert.encoder.layer[0].attention.self
    forward = type(layer).forward
    x, other = torch.randn(2, 2, 3, 32).double()
    expected = layer(x)[0] + layer(other)[0]

    def one_after_the_other(self, x):
        return forward(self, x)[0] + forward(self, other)[0]

    monkeypatch.setattr(type(layer), "forward", one_after_the_other)
    torch.testing.assert_close(layer(x), expected)

    def both_at_first(self, x):
        self.query(other)
        return forward(self, x)

    monkeypatch.setattr(type(layer), "forward", both_at_first)
    with pytest.raises(RuntimeError) as refused:
        layer(x)
    assert str(refused.value) == (
        "BertSelfAttention: projects queries twice before it attends; must project those of each "
        "attention directly before it"
    )


def test_a_projection_that_is_no_module_is_refused():
    model, inputs = mixed_llama()
    projection = attention(model).q_proj
    del attention(model).q_proj
    vars(attention(model))["q_proj"] = lambda x: projection(x)
    problem = "^LlamaAttention: lost the mixing, its q_proj must be a module$"
    with pytest.raises(RuntimeError, match=problem):
        model(**inputs)


def test_a_call_after_a_refused_one_is_right():
    model, inputs = mixed_llama()
    expected = model(**inputs).logits
    projection = attention(model).q_proj
    attention(model).q_proj = nn.Linear(32, 16, bias=False).double()
    with pytest.raises(ValueError):
        model(**inputs)
    attention(model).q_proj = projection
    torch.testing.assert_close(model(**inputs).logits, expected)
