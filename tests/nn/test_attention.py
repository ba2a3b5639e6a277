"""MixedAttention is torch's attention before training.

With every variant it is fairseq's module of the plugin.
"""

import copy
import inspect

import numpy as np
import pytest
import torch
from torch import nn

from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.nn import MixedAttention, ShapeError, mix, parameter_groups
from mixhead_plugin.parts import OPTIONS, PARTS, Variant
from tests.attention_equations import (
    ATTENTIONS,
    COMBINATIONS,
    NQ,
    SOME_NORMALIZERS,
    B,
    E,
    H,
    build,
    future,
    inputs,
    padding,
    variant,
)
from tests.covering import each_once

FUTURE = future().double()
HIDDEN = padding(n_keys=NQ)
BY_HEAD = torch.randn(B * H, NQ, NQ, generator=torch.Generator().manual_seed(0)).double()
X = torch.zeros(NQ, B, E)

# The mixings that start as the identity.
STARTING_PLAIN = [
    name
    for name, options in COMBINATIONS.items()
    if options["head_mixing"] not in ("random", "average", "differential")
]


def arranged(inputs, masks, hidden, layout):
    """Return the inputs [N, B, C] and the masks of a call in another layout.

    Args:
        layout: 'first' is [B, N, C], 'second' leaves [N, B, C], 'unbatched' is one sentence [N, C]
    """
    if layout == "first":
        return [x.transpose(0, 1) for x in inputs], masks, hidden
    if layout == "second":
        return inputs, masks, hidden
    if masks.get("attn_mask") is BY_HEAD:
        masks = {**masks, "attn_mask": BY_HEAD[:H]}
    if hidden is not None:
        hidden = hidden[1]
    return [x[:, 1] for x in inputs], masks, hidden


@pytest.mark.parametrize(
    "key, value, message",
    [
        ((5, 2, 9), (5, 2, 7), "key shape torch.Size([5, 2, 9]): its last size must be kdim 6"),
        ((5, 2, 6), (5, 2, 6), "value shape torch.Size([5, 2, 6]): its last size must be vdim 7"),
        (
            (5, 2, 6),
            (4, 2, 7),
            "key shape torch.Size([5, 2, 6]) and value shape torch.Size([4, 2, 7]): must have as "
            "many positions and sentences",
        ),
        (
            (5, 3, 6),
            (5, 3, 7),
            "key shape torch.Size([5, 3, 6]): must have as many sentences as the query, 2",
        ),
    ],
    ids=["kdim", "vdim", "positions", "sentences"],
)
def test_each_fault_of_keys_and_values_has_its_message(key, value, message):
    attention = MixedAttention(8, 2, kdim=6, vdim=7)
    with pytest.raises(ShapeError) as refused:
        attention(torch.zeros(4, 2, 8), torch.zeros(key), torch.zeros(value))
    assert str(refused.value) == message


# torch's, of a bool beside a float mask
@pytest.mark.filterwarnings("ignore:Support for mismatched")
@each_once(
    mixing=STARTING_PLAIN,
    layout=["first", "second", "unbatched"],
    sizes=[{}, {"kdim": 12, "vdim": 9}, {"bias": False}],
    masks=[
        {},
        {"attn_mask": FUTURE.bool()},
        {"attn_mask": BY_HEAD},
        {"attn_mask": FUTURE, "is_causal": True},
    ],
    hidden=[None, HIDDEN, torch.zeros(B, NQ).double().masked_fill(HIDDEN, -1e9)],
    need=[{"need_weights": False}, {}, {"average_attn_weights": False}],
)
def test_before_training_it_is_torchs_module(mixing, layout, sizes, masks, hidden, need):
    sizes = {**sizes, "batch_first": layout == "first"}
    torchs = nn.MultiheadAttention(E, H, **sizes).double().eval()
    for parameter in torchs.parameters():
        nn.init.normal_(parameter)
    ours = MixedAttention(E, H, **COMBINATIONS[mixing], **sizes).double().eval()
    ours.load_state_dict(torchs.state_dict())

    features = [E, sizes.get("kdim", E), sizes.get("vdim", E)]
    given = [torch.randn(NQ, B, size).double() for size in features]
    given, masks, hidden = arranged(given, masks, hidden, layout)
    arguments = {**masks, **need, "key_padding_mask": hidden}
    torch.testing.assert_close(ours(*given, **arguments), torchs(*given, **arguments))


def pair_of_modules(normalizer, mixing, kind, values=None):
    """Return fairseq's module of the plugin and ours with its weights, in double precision."""
    theirs = build(kind, mixing, normalizer, value_head_dim=values).double()
    options = {"causal": kind != "cross", **variant(normalizer, mixing), **ATTENTIONS[kind]}
    options["value_head_dim"] = values
    options.pop("encoder_decoder_attention", None)
    ours = MixedAttention(E, H, dropout=0.5, dtype=torch.float64, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours.eval()


@each_once(
    normalizer=SOME_NORMALIZERS,
    mixing=COMBINATIONS,
    kind=["self", "rotary", "t5", "gain", "cross"],
    values=[None, 7],
)
def test_every_variant_is_fairseqs_module_and_decodes_from_a_cache(
    normalizer, mixing, kind, values
):
    theirs, ours = pair_of_modules(normalizer, mixing, kind, values)
    # A part of a state dict leaves the mixing as it is.
    ours.load_state_dict({"q_proj.weight": theirs.q_proj.weight}, strict=False)

    x, key, masks = inputs(kind, dtype=torch.float64)
    expected = theirs(x, key, key, need_head_weights=True, **masks)
    masks = {name: mask for name, mask in masks.items() if name == "key_padding_mask"}
    full, weights = ours(x, key, key, average_attn_weights=False, **masks)
    torch.testing.assert_close((full, weights.transpose(0, 1)), expected)

    cache = {}
    for t in range(NQ):
        query = x[t : t + 1]
        new = query
        if kind == "cross":  # later steps find the source in the cache
            new = key if t == 0 else None
        step, _ = ours(query, new, new, need_weights=False, cache=cache, **masks)
        torch.testing.assert_close(step[0], full[t])


@pytest.mark.parametrize(
    "field, value",
    [("normalizer", "l2"), ("attention_sink", "zero"), ("relative_position", "rotary")],
)
def test_what_a_module_of_fairseq_has_without_tensors_is_not_lost(field, value):
    theirs = MixheadAttention(E, H, self_attention=True, variant=Variant.of({field: value}))
    with pytest.raises(RuntimeError) as refused:
        MixedAttention(E, H).load_state_dict(theirs.state_dict())
    usual = OPTIONS[field].default
    assert f"was saved with {field} {value}, this module has {usual}." in str(refused.value)
    MixedAttention(E, H, **{field: value}).load_state_dict(theirs.state_dict())


@pytest.mark.parametrize(
    "field, value",
    [("normalizer", "l2"), ("attention_sink", "zero"), ("relative_position", "rotary")],
)
def test_what_leaves_no_trace_is_not_put_beside_tensors_of_fairseq_without_it(field, value):
    theirs = MixheadAttention(E, H, self_attention=True)
    with pytest.raises(RuntimeError, match=f"was saved with {field} .*, this module has {value}"):
        MixedAttention(E, H, **{field: value}).load_state_dict(theirs.state_dict())


def test_other_heads_of_the_same_tensors_in_fairseq_are_refused():
    theirs = MixheadAttention(E, H, self_attention=True)
    with pytest.raises(RuntimeError, match=f"was saved with heads {H}, this module has {2 * H}"):
        MixedAttention(E, 2 * H).load_state_dict(theirs.state_dict())


@torch.no_grad()
def test_a_mixing_starts_anew_beside_tensors_of_fairseq_without_it():
    theirs = MixheadAttention(E, H, self_attention=True).eval()
    ours = MixedAttention(E, H, head_mixing="position-wise").eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(NQ, B, E)
    torch.testing.assert_close(ours(x, x, x)[0], theirs(x, x, x)[0])


def test_dropout_acts_in_training():
    x = torch.randn(NQ, B, E)
    ours = MixedAttention(E, H, dropout=0.5)
    assert not torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.Transformer],
)
def test_torchs_own_samples_give_the_same(kind):
    pytest.importorskip("expecttest", reason="torch's tests need it: pip install expecttest")
    from torch.testing._internal.common_modules import module_db

    (info,) = (info for info in module_db if info.module_cls is kind)
    samples = info.module_inputs_func(info, "cpu", torch.float64, False, training=False)
    assert len(samples) >= 8
    for sample in samples:
        made = sample.constructor_input
        if made.kwargs.get("add_bias_kv") or made.kwargs.get("add_zero_attn"):
            continue  # which `mix` refuses
        torchs = nn.ModuleList([kind(*made.args, **made.kwargs)]).double().eval()
        (ours,) = mix(copy.deepcopy(torchs), "position-wise")
        call = sample.forward_input
        expected = torchs[0](*call.args, **call.kwargs)
        torch.testing.assert_close(ours(*call.args, **call.kwargs), expected)


def of_a_decoder(**asked):
    return mix(nn.ModuleList([nn.TransformerDecoderLayer(E, H, E)]), **asked)


KEYWORDS = ", ".join(
    [*OPTIONS, *(name for name in inspect.signature(MixedAttention).parameters)]
).removesuffix(", keywords")
NOT_CROSS = "must not be given where there is cross-attention, only for self-attention"
REFUSED = {
    "num_heads 0: must be a whole number of at least 1": lambda: MixedAttention(E, 0),
    "num_heads 5: must divide embed_dim 16, or head_dim be given": lambda: MixedAttention(E, 5),
    "embed_dim 0: must be a whole number of at least 1": lambda: MixedAttention(0, H),
    "dropout 1.5: must be a probability, from 0 to 1": lambda: MixedAttention(E, H, dropout=1.5),
    "head_dim 0: must be a whole number of at least 1": lambda: MixedAttention(E, H, head_dim=0),
    "value_head_dim 0: must be a whole number of at least 1": lambda: MixedAttention(
        E, H, value_head_dim=0
    ),
    "relative_gain -1: must be a whole number of at least 0": lambda: MixedAttention(
        E, H, relative_gain=-1
    ),
    "add_bias_kv True: must be False": lambda: MixedAttention(E, H, add_bias_kv=True),
    "add_zero_attn True: must be False": lambda: MixedAttention(E, H, add_zero_attn=True),
    "attention_sink 'a': must be one of none, zero, learned": lambda: MixedAttention(
        E, H, attention_sink="a"
    ),
    f"mix: is no keyword; must be one of {KEYWORDS}": lambda: MixedAttention(E, H, mix="b"),
    f"bathc_first: is no keyword; did you mean batch_first? It must be one of {KEYWORDS}": (
        lambda: MixedAttention(E, H, bathc_first=True)
    ),
    "dropout 'position-wise': must be a probability, from 0 to 1": lambda: MixedAttention(
        E, H, "position-wise"
    ),
    f"relative_position: {NOT_CROSS}": lambda: of_a_decoder(relative_position="rotary"),
    f"causal: {NOT_CROSS}": lambda: of_a_decoder(head_mixing="average", causal=True),
    "key, value: must both be given, or both be in the cache and None": (
        lambda: MixedAttention(E, H)(X, X, None, cache={"key": X})
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_work_is_refused_in_one_line(message):
    with pytest.raises(ValueError) as error:
        REFUSED[message]()
    assert str(error.value) == message


def test_asking_for_nothing_is_refused_with_a_list_of_what_there_is():
    with pytest.raises(ValueError) as error:
        mix(nn.ModuleList([nn.MultiheadAttention(E, H)]))
    told = str(error.value)
    assert told.startswith(
        "head_mixing: must be given, as 'position-wise' or 'position-independent', or another of "
        "normalizer, score_mixing,"
    )


def test_mix_keeps_weights_hooks_and_what_is_frozen():
    x = torch.randn(NQ, B, E)
    old = nn.MultiheadAttention(E, H).requires_grad_(False)
    old.register_forward_hook(lambda module, args, output: (output[0] + 1, None))
    old.register_load_state_dict_pre_hook(lambda *_: 1 / 0)
    new = mix(nn.ModuleDict({"a": old}), head_mixing="position-wise")["a"]
    new.load_state_dict(new.state_dict())  # without the old one's hook
    for name, parameter in new.named_parameters():
        assert parameter.requires_grad == name.startswith("head_mixing")
    torch.testing.assert_close(new(x, x, x)[0], old(x, x, x)[0])


def test_mix_keeps_the_mode():
    model = nn.ModuleDict({"a": nn.MultiheadAttention(E, H), "b": nn.MultiheadAttention(E, H)})
    model["b"].eval()
    mix(model, "random")
    assert model["a"].training
    assert not model["b"].training


def test_a_module_that_is_there_twice_is_mixed_once():
    old = nn.MultiheadAttention(E, H)
    new = mix(nn.ModuleDict({"a": old, "b": old}), "position-wise")
    assert new["a"] is new["b"]


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_a_projection_to_fewer_features_is_refused(name):
    """As torch's ColwiseParallel and structured pruning leave it: a part of the heads."""
    attention = MixedAttention(E, H, head_mixing="position-independent")
    half = E // 2
    setattr(attention, name, nn.Linear(E, half))
    with pytest.raises(ShapeError) as refused:
        attention(X, X, X)
    assert str(refused.value) == (
        f"{name}: gives {half} features, must give {E}, as when it was built; heads that are split "
        "between processes cannot be mixed"
    )


def test_a_module_that_was_built_with_numbers_of_numpy_can_be_saved_and_loaded(tmp_path):
    numbers = {"embed_dim": np.int64(E), "num_heads": np.int64(H), "kdim": np.int64(3)}
    saved = MixedAttention(**numbers, causal=np.bool_(True), head_mixing="position-wise")
    torch.save(saved.state_dict(), tmp_path / "state.pt")
    loaded = MixedAttention(E, H, kdim=3, causal=True, head_mixing="position-wise")
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    kinds = {type(getattr(saved, name)) for name in ("embed_dim", "num_heads", "kdim", "vdim")}
    assert kinds == {int}


def test_a_checkpoint_with_a_part_of_a_mixing_is_refused():
    ours = MixedAttention(E, H, head_mixing="position-wise")
    state = ours.state_dict()
    del state["head_mixing.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*head_mixing\.bias"):
        ours.load_state_dict(state)


def test_a_checkpoint_that_lacks_random_numbers_of_a_module_on_meta_is_refused():
    on_meta = MixedAttention(E, H, device="meta", head_mixing="random")
    with pytest.raises(RuntimeError, match=r"Missing key.*head_mixing"):
        on_meta.load_state_dict(nn.MultiheadAttention(E, H).state_dict(), assign=True)


# Three inputs [N, B, C], or [N, C] of one sentence, and masks that do not fit.
SQUARE = torch.zeros(B + 1, B + 1, E)
ONE = torch.zeros(B + 1, E)
WRONG_SHAPES = {
    "one key": ((SQUARE, ONE, SQUARE), {}),
    "one value": ((SQUARE, SQUARE, ONE), {}),
    "many values": ((ONE, ONE, SQUARE), {}),
    "a fourth dimension": ((SQUARE[None], SQUARE, SQUARE), {}),
    "fewer features": ((SQUARE[..., :3], SQUARE, SQUARE), {}),
    "padding of one sentence": (
        (SQUARE, SQUARE, SQUARE),
        {"key_padding_mask": torch.zeros(B + 1).bool()},
    ),
    "a mask of one dimension": ((SQUARE, SQUARE, SQUARE), {"attn_mask": torch.zeros(B + 1)}),
    "a mask of whole numbers": (
        (SQUARE, SQUARE, SQUARE),
        {"attn_mask": torch.zeros(B + 1, B + 1).int()},
    ),
    "padding of whole numbers": (
        (SQUARE, SQUARE, SQUARE),
        {"key_padding_mask": torch.zeros(B + 1, B + 1).int()},
    ),
    "a mask of three dimensions": (
        (ONE, ONE, ONE),
        {"attn_mask": torch.zeros(1, B + 1, B + 1)},
    ),
}


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("what", WRONG_SHAPES)
def test_shapes_are_refused_in_the_words_of_torch(what, batch_first):
    given, masks = WRONG_SHAPES[what]
    with pytest.raises(AssertionError) as theirs:
        nn.MultiheadAttention(E, H, batch_first=batch_first)(*given, **masks)
    with pytest.raises(ValueError) as found:
        MixedAttention(E, H, batch_first=batch_first)(*given, **masks)
    assert str(found.value) == str(theirs.value)


@pytest.mark.parametrize(
    "changed",
    [
        # As many sentences as heads: a mask for each sentence is none for each head.
        {"attn_mask": torch.zeros(H, H, H)},
        {"attn_mask": torch.zeros(1, H)},
        {"key_padding_mask": torch.zeros(1, H)},
        {"key_padding_mask": torch.zeros(H, 1)},
        {"key": torch.randn(H - 1, H - 1, E)},
        {"value": torch.randn(B + 1, E)},
    ],
    ids=[
        "attn_mask by sentence",
        "attn_mask of one query",
        "padding of one sentence",
        "padding of one key",
        "fewer keys",
        "one value",
    ],
)
def test_a_shape_that_could_be_read_otherwise_is_refused_as_torch_refuses_it(changed):
    x = torch.randn(H, H, E)
    for module in (nn.MultiheadAttention(E, H), MixedAttention(E, H)):
        with pytest.raises((AssertionError, RuntimeError)):
            module(**{"query": x, "key": x, "value": x, **changed})


@torch.no_grad()
@pytest.mark.parametrize("later", [True, False], ids=["on later", "off later"])
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_autocast_may_be_switched_between_the_steps_of_a_cache(kind, later):
    torch.manual_seed(0)
    attention = MixedAttention(E, H, batch_first=True, head_mixing="position-wise").eval()
    nn.init.normal_(attention.head_mixing.query_weight)
    x = torch.randn(B, NQ, E)
    first, last = x.split([NQ - 1, 1], dim=1)
    expected, _ = attention(last, x, x)
    steps = {
        "self": [(first, first), (last, last)],
        "cross": [(first, x), (last, None)],
    }

    cache = {}
    for (query, memory), on in zip(steps[kind], (not later, later)):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            found, _ = attention(query, memory, memory, cache=cache)
    assert found.dtype == (torch.bfloat16 if later else torch.float32)
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


def test_a_call_that_is_refused_leaves_the_cache_alone():
    x = torch.randn(NQ, B, E)
    cache = {}
    with pytest.raises(ValueError):
        MixedAttention(E, H)(x, x, x, attn_mask=torch.zeros(1, NQ), cache=cache)
    assert not cache


@torch.no_grad()
@pytest.mark.parametrize("variant", [{"attention_sink": "zero"}, {"score_mixing": "position-wise"}])
def test_states_may_be_assigned_and_may_be_parts(variant):
    torchs = nn.MultiheadAttention(E, H, dtype=torch.bfloat16).state_dict()
    x = torch.randn(NQ, B, E).bfloat16()
    module = MixedAttention(
        E, H, device="meta", dtype=torch.bfloat16, head_mixing="position-wise", **variant
    )
    module.load_state_dict(torchs, assign=True)
    assert module(x, x, x)[0].isfinite().all()

    module.head_mixing.bias.fill_(2)
    part = {"out_proj.weight": torchs["out_proj.weight"]}
    missing = module.load_state_dict(part, strict=False).missing_keys
    assert "head_mixing.bias" in missing
    assert (module.head_mixing.bias == 2).all()


def test_a_packed_state_that_is_assigned_gives_projections_of_their_own():
    """safetensors refuses tensors that share a storage."""
    module = MixedAttention(E, H, head_mixing="position-wise")
    module.load_state_dict(nn.MultiheadAttention(E, H).state_dict(), assign=True)
    tensors = list(module.parameters())
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_given_device_counts_and_not_the_default_one(device):
    other = "cpu" if device == "meta" else "meta"
    with torch.device(other):
        module = MixedAttention(E, H, device=device, head_mixing="random", attention_gate="head")
    assert {tensor.device.type for tensor in module.state_dict().values()} == {device}


@torch.no_grad()
@pytest.mark.parametrize("position", ["rotary", "t5"])
def test_a_query_may_lie_before_all_keys(position):
    module = MixedAttention(E, H, relative_position=position)
    x = torch.randn(NQ, B, E)
    for bias in module.relative_position.parameters():
        bias.normal_()
    expected, _ = module(x, x, x, attn_mask=torch.arange(NQ).expand(NQ, NQ) == 0)
    torch.testing.assert_close(module(x, x[1:], x[1:])[0], expected)


def test_gradients_of_each_sentence_are_those_of_the_batch():
    layer = nn.TransformerEncoderLayer(E, H, E, 0.0, batch_first=True)
    model = mix(nn.TransformerEncoder(layer, 1), "position-wise")
    parameters = dict(model.named_parameters())
    x = torch.randn(B, 40, E)

    def loss(values, sentence):
        return torch.func.functional_call(model, values, (sentence[None],)).square().sum()

    each = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    model(x).square().sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(each[name].sum(0), parameter.grad, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_padded_batches_of_torchs_encoder_are_not_nested():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, E, batch_first=True), 1).eval()
    x = torch.randn(B, NQ, E)
    expected = encoder(x, src_key_padding_mask=HIDDEN)[~HIDDEN]
    found = mix(encoder, "position-wise")(x, src_key_padding_mask=HIDDEN)[~HIDDEN]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("which", [[0], [1], [0, 1]], ids=["first", "second", "both"])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_layer_of_torchs_encoder_may_be_replaced_by_hand(which, grad):
    """torch hands the second layer a nested tensor if the first one is torch's."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, E, batch_first=True), 2).eval()
    x = torch.randn(B, NQ, E)
    # Padding at the end, as torch's kernels ask for; one sentence is whole.
    lengths = torch.arange(NQ - B + 1, NQ + 1)
    hidden = torch.arange(NQ) >= lengths[:, None]
    with torch.set_grad_enabled(grad):
        expected = encoder(x, src_key_padding_mask=hidden)[~hidden]
        for number in which:
            layer = encoder.layers[number]
            state = layer.self_attn.state_dict()
            layer.self_attn = MixedAttention(
                E, H, batch_first=True, head_mixing="position-wise"
            ).eval()
            layer.self_attn.load_state_dict(state)
        found = encoder(x, src_key_padding_mask=hidden)[~hidden]
    torch.testing.assert_close(found, expected)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("normalizer", ["sigmoid", "softpick", "relu2"])
@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_a_mask_of_the_least_number_hides_from_normalizers_that_count_keys(name, normalizer):
    module = MixedAttention(E, H, normalizer=normalizer)
    x = torch.randn(NQ, B, E)
    hidden = {"attn_mask": FUTURE.isinf(), "key_padding_mask": HIDDEN}[name]
    infinite = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
    least = infinite.clamp_min(torch.finfo(torch.float32).min)
    expected, _ = module(x, x, x, **{name: infinite})
    found, _ = module(x, x, x, **{name: least})
    torch.testing.assert_close(found, expected)


def test_torchs_encoder_gives_a_layer_mask_and_padding_together():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, E, batch_first=True), 2).eval()
    x = torch.randn(B, NQ, E)
    hidden = torch.arange(NQ) >= torch.arange(NQ - B + 1, NQ + 1)[:, None]
    call = {
        "mask": torch.ones(NQ, NQ).triu(1) > 0,
        "src_key_padding_mask": hidden,
        "is_causal": True,
    }
    expected = encoder(x, **call)[~hidden]
    second = encoder.layers[1]
    state = second.self_attn.state_dict()
    second.self_attn = MixedAttention(E, H, batch_first=True, head_mixing="position-wise").eval()
    second.self_attn.load_state_dict(state)
    torch.testing.assert_close(encoder(x, **call)[~hidden], expected)


def nested():
    return torch.nested.nested_tensor([torch.randn(2, E), torch.randn(3, E)])


@torch.no_grad()
def test_rows_of_a_nested_query_are_causal_each():
    attention = MixedAttention(E, H, batch_first=True, head_mixing="position-wise")
    rows = nested()
    out, _ = attention(rows, rows, rows, need_weights=False, is_causal=True)
    for row, found in zip(rows.unbind(), out.unbind(), strict=True):
        torch.testing.assert_close(found, attention(row, row, row, is_causal=True)[0])


# By the message: the arguments of a call with a nested query.
NOT_WITH_NESTED = {
    "nested query: must be key and value, too, with batch_first and need_weights=False": {
        "need_weights": True
    },
    "key_padding_mask: must be None with a nested query": {
        "key_padding_mask": torch.zeros(2, 3, dtype=torch.bool)
    },
    "attn_mask: must be None with a nested query": {"attn_mask": torch.zeros(3, 3)},
    "cache: must be None with a nested query": {"cache": {}},
}


@pytest.mark.parametrize("message", NOT_WITH_NESTED)
def test_what_a_nested_query_cannot_have_is_refused(message):
    rows = nested()
    call = {"need_weights": False, **NOT_WITH_NESTED[message]}
    with pytest.raises(ValueError) as refused:
        MixedAttention(E, H, batch_first=True)(rows, rows, rows, **call)
    assert str(refused.value) == message


# Every value of an option that has tensors of its own, and what of them starts as random numbers.
STARTS = [
    (option, value)
    for option, table in PARTS.items()
    for value, kind in table.items()
    if kind.parameters
]
STARTS += [("relative_gain", 3), ("mixing_start", "random")]
RANDOM = {
    ("head_mixing", "low-rank"): {"hidden_weight", "left_weight"},
    ("head_mixing", "random"): {"weight"},
    ("feature_mixing", "output"): {"left"},
    ("mixing_start", "random"): {"bias"},
}


@pytest.mark.parametrize("option, value", STARTS)
def test_the_usual_loop_after_to_empty_gives_every_part_its_start(option, value):
    variant = {option: value}
    if option == "mixing_start":
        variant["head_mixing"] = "position-wise"
    torch.manual_seed(5)
    fresh = MixedAttention(E, H, **variant)
    with torch.device("meta"):
        emptied = MixedAttention(E, H, **variant)
    emptied.to_empty(device="cpu")
    for tensor in (*emptied.parameters(), *emptied.buffers()):
        tensor.data.fill_(torch.nan)

    torch.manual_seed(5)
    for module in emptied.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert not any(tensor.isnan().any() for tensor in emptied.state_dict().values())

    emptied.reset_parameters()  # the loop has drawn the projections as nn.Linear does
    for projection in (emptied.q_proj, emptied.out_proj):
        assert (projection.bias == 0).all()

    part = "head_mixing" if option == "mixing_start" else option
    started = getattr(emptied, part).state_dict()
    for name, tensor in getattr(fresh, part).state_dict().items():
        if name not in RANDOM.get((option, value), ()):
            assert torch.equal(started[name], tensor)


def test_weight_decay_spares_the_mixing():
    model = mix(nn.Transformer(E, H, 1, 1, E), "position-independent", attention_sink="learned")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mixing" in name or "out_proj" in name)

    decayed, vectors, mixing = parameter_groups(model, 0.5, mixing_lr=0.1)
    assert [parameter.shape for parameter in decayed["params"]] == [(E, E)] * 3
    assert len(vectors["params"]) == 3
    assert len(mixing["params"]) == 3

    groups = torch.optim.AdamW([decayed, vectors, mixing], lr=0.3).param_groups
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0, 0.0]
    assert [group["lr"] for group in groups] == [0.3, 0.3, 0.1]


def test_a_mixing_starts_as_it_is_asked_to_and_a_state_without_it_is_still_the_identity():
    asked = {"head_mixing": "position-independent", "mixing_start": "uniform"}
    torchs = nn.MultiheadAttention(E, H)
    made = MixedAttention(E, H, **asked)
    (mixed,) = mix(nn.ModuleList([copy.deepcopy(torchs)]), **asked)
    for attention in (made, mixed):
        assert torch.equal(attention.head_mixing.weight, torch.full((H, H), 1 / H))
        attention.load_state_dict(torchs.state_dict())
        assert torch.equal(attention.head_mixing.weight, torch.eye(H))


def test_a_hook_that_adds_a_matrix_to_the_factors_of_a_mixing_is_refused():
    attention = MixedAttention(12, 4, head_mixing="low-rank", batch_first=True)
    attention.register_attention_pre_hook(
        lambda module, inputs: inputs._replace(mixing=torch.eye(4))
    )
    x = torch.randn(2, 3, 12)
    with pytest.raises(ValueError) as error:
        attention(x, x, x)
    message = "mixing: must be M or its factors, not both; with_mixing() sets one"
    assert str(error.value) == message
