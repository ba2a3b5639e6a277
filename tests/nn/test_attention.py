"""MixedAttention is torch's attention before training, and fairseq's module of the plugin with
every variant.
"""

import copy

import pytest
import torch
from torch import nn

from mixhead_plugin.nn import MixedAttention, mix, parameter_groups
from mixhead_plugin.parts import OPTIONS, PARTS
from tests.covering import each_once
from tests.fairseq.definition import (
    KINDS,
    MIXINGS,
    NORMALIZERS,
    NQ,
    B,
    E,
    H,
    build,
    future,
    inputs,
    padding,
    variant,
)

FUTURE, HIDDEN = future().double(), padding(n_keys=NQ)
BY_HEAD = torch.randn(B * H, NQ, NQ).double()


# torch's, of a bool beside a float mask
@pytest.mark.filterwarnings("ignore:Support for mismatched")
@each_once(
    mixing=[
        n
        for n, v in MIXINGS.items()
        if v["head_mixing"] not in ("random", "average", "differential")
    ],
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
    torchs = nn.MultiheadAttention(E, H, batch_first=layout == "first", **sizes).double().eval()
    ours = (
        MixedAttention(E, H, batch_first=layout == "first", **MIXINGS[mixing], **sizes)
        .double()
        .eval()
    )
    for parameter in torchs.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(torchs.state_dict())
    given = [
        torch.randn(NQ, B, size).double()
        for size in (E, sizes.get("kdim", E), sizes.get("vdim", E))
    ]
    if layout == "first":
        given = [x.transpose(0, 1) for x in given]
    elif layout == "unbatched":
        given, hidden = [x[:, 1] for x in given], None if hidden is None else hidden[1]
        masks = {**masks, "attn_mask": BY_HEAD[:H]} if masks.get("attn_mask") is BY_HEAD else masks
    arguments = {**masks, **need, "key_padding_mask": hidden}
    torch.testing.assert_close(ours(*given, **arguments), torchs(*given, **arguments))


@each_once(normalizer=NORMALIZERS, mixing=MIXINGS, kind=["self", "rotary", "t5", "gain", "cross"])
def test_every_variant_is_fairseqs_module_and_decodes_from_a_cache(normalizer, mixing, kind):
    theirs, cross, dtype, cache = (
        build(kind, mixing, normalizer).double(),
        kind == "cross",
        torch.float64,
        {},
    )
    options = {"causal": not cross, **variant(normalizer, mixing), **KINDS[kind]}
    options.pop("encoder_decoder_attention", None)
    ours = MixedAttention(E, H, dropout=0.5, dtype=dtype, **options).eval()
    ours.load_state_dict(theirs.state_dict())
    ours.load_state_dict({"q_proj.weight": theirs.q_proj.weight}, strict=False)  # leaves the mixing
    x, key, masks = inputs(kind, dtype=dtype)
    expected = theirs(x, key, key, need_head_weights=True, **masks)
    masks = {name: mask for name, mask in masks.items() if name == "key_padding_mask"}
    full, weights = ours(x, key, key, average_attn_weights=False, **masks)
    torch.testing.assert_close((full, weights.transpose(0, 1)), expected)
    for t in range(NQ):
        new = x[t : t + 1] if not cross else key if t == 0 else None
        step = ours(x[t : t + 1], new, new, need_weights=False, cache=cache, **masks)[0]
        torch.testing.assert_close(step[0], full[t])
    assert not torch.equal(*(ours.train()(x, key, key)[0] for _ in range(2)))


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
    for (args, options), (given, masks) in (
        [(x.args, x.kwargs) for x in (sample.constructor_input, sample.forward_input)]
        for sample in samples
    ):
        if not (options.get("add_bias_kv") or options.get("add_zero_attn")):
            torchs = nn.ModuleList([kind(*args, **options)]).double().eval()
            (ours,) = mix(copy.deepcopy(torchs), "position-wise")
            torch.testing.assert_close(ours(*given, **masks), torchs[0](*given, **masks))


def of_a_decoder(**asked):
    return mix(nn.ModuleList([nn.TransformerDecoderLayer(E, H, E)]), **asked)


NOT_CROSS = "must not be given where there is cross-attention, only for self-attention"
REFUSED = {
    "num_heads 0: must be at least 1": lambda: MixedAttention(E, 0),
    "num_heads 5: must divide embed_dim 16, or head_dim be given": lambda: MixedAttention(E, 5),
    "embed_dim 0: must be at least 1": lambda: MixedAttention(0, H),
    "dropout 1.5: must be a probability, from 0 to 1": lambda: MixedAttention(E, H, dropout=1.5),
    "head_dim 0: must be a whole number of at least 1": lambda: MixedAttention(E, H, head_dim=0),
    "relative_gain -1: must be a whole number of at least 0": lambda: MixedAttention(
        E, H, relative_gain=-1
    ),
    "add_bias_kv True: must be False": lambda: MixedAttention(E, H, add_bias_kv=True),
    "add_zero_attn True: must be False": lambda: MixedAttention(E, H, add_zero_attn=True),
    "attention_sink 'a': must be one of none, zero, learned": lambda: MixedAttention(
        E, H, attention_sink="a"
    ),
    f"mix: must be one of {', '.join(OPTIONS)}": lambda: MixedAttention(E, H, mix="b"),
    f"relative_position: {NOT_CROSS}": lambda: of_a_decoder(relative_position="rotary"),
    f"causal: {NOT_CROSS}": lambda: of_a_decoder(head_mixing="average", causal=True),
    "key, value: must both be given, or both be in the cache and None": (
        lambda: MixedAttention(E, H)(X, X, None, cache={"key": X})
    ),
}
X = torch.zeros(NQ, B, E)


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_work_is_refused_in_one_line(message):
    with pytest.raises(ValueError) as error:
        REFUSED[message]()
    assert str(error.value) == message


def test_nothing_is_refused_with_all_that_could_be_asked_for():
    with pytest.raises(
        ValueError, match=r"^nothing is asked for; must be at least one of"
    ) as error:
        mix(nn.ModuleList([nn.MultiheadAttention(E, H)]))
    assert "head_mixing: none, position-independent, position-wise, low-rank" in str(error.value)


def test_mix_keeps_weights_hooks_modes_and_what_is_frozen():
    x = torch.randn(NQ, B, E)
    old = nn.MultiheadAttention(E, H).requires_grad_(False)
    old.register_forward_hook(lambda module, args, output: (output[0] + 1, None))
    old.register_load_state_dict_pre_hook(lambda *_: 1 / 0)
    new = mix(nn.ModuleDict({"a": old, "b": old}), head_mixing="position-wise")
    assert new["a"] is new["b"] and new["a"].training
    new.load_state_dict(new.state_dict())
    assert not mix(nn.ModuleDict({"a": nn.MultiheadAttention(E, H)}).eval(), "random")["a"].training
    assert all(
        ("head_mixing" in name) == parameter.requires_grad
        for name, parameter in new.named_parameters()
    )
    torch.testing.assert_close(new["a"](x, x, x)[0], old(x, x, x)[0])


def test_a_checkpoint_with_a_part_of_a_mixing_or_for_random_numbers_on_meta_is_refused():
    ours = MixedAttention(E, H, head_mixing="position-wise")
    state = ours.state_dict()
    del state["head_mixing.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*head_mixing\.bias"):
        ours.load_state_dict(state)
    on_meta = MixedAttention(E, H, device="meta", head_mixing="random")
    with pytest.raises(RuntimeError, match=r"Missing key.*head_mixing"):
        on_meta.load_state_dict(nn.MultiheadAttention(E, H).state_dict(), assign=True)


@pytest.mark.parametrize("batch_first", [False, True])
def test_shapes_are_refused_in_the_words_of_torch(batch_first):
    x, one = torch.randn(B + 1, B + 1, E), torch.randn(B + 1, E)
    ours, torchs = (
        kind(E, H, batch_first=batch_first) for kind in (MixedAttention, nn.MultiheadAttention)
    )
    for call, masks in (
        ((x, one, x), {}),
        ((x, x, one), {}),
        ((one, one, x), {}),
        ((x[None], x, x), {}),
        ((x, x, x), {"key_padding_mask": torch.zeros(B + 1).bool()}),
        ((x, x, x), {"attn_mask": torch.zeros(B + 1)}),
        ((x, x, x), {"attn_mask": torch.zeros(B + 1, B + 1).int()}),
        ((x[..., :3], x, x), {}),
        ((one, one, one), {"attn_mask": torch.zeros(1, B + 1, B + 1)}),
    ):
        with pytest.raises(AssertionError) as theirs:
            torchs(*call, **masks)
        with pytest.raises(ValueError) as found:
            ours(*call, **masks)
        assert str(found.value) == str(theirs.value)
    cache = {}
    with pytest.raises(ValueError):
        ours(x, x, x, attn_mask=torch.zeros(1, B + 1), cache=cache)
    assert not cache
    # as many sentences as heads: a mask for each sentence is none for each head
    same = torch.randn(H, H, E)
    for refused in (
        {"attn_mask": torch.zeros(H, H, H)},
        {"attn_mask": torch.zeros(1, H)},
        {"key_padding_mask": torch.zeros(1, H)},
        {"key_padding_mask": torch.zeros(H, 1)},
        {"key": torch.randn(H - 1, H - 1, E)},
        {"value": one},
    ):
        for kind in (ours, torchs):
            with pytest.raises((AssertionError, RuntimeError)):
                kind(**{"query": same, "key": same, "value": same, **refused})


@torch.no_grad()
@pytest.mark.parametrize("variant", [{"attention_sink": "zero"}, {"score_mixing": "position-wise"}])
def test_states_may_be_assigned_and_may_be_parts(variant):
    state, x = (
        nn.MultiheadAttention(E, H, dtype=torch.bfloat16).state_dict(),
        torch.randn(NQ, B, E).bfloat16(),
    )
    module = MixedAttention(
        E, H, device="meta", dtype=torch.bfloat16, head_mixing="position-wise", **variant
    )
    module.load_state_dict(state, assign=True)
    assert module(x, x, x)[0].isfinite().all()
    module.head_mixing.bias.fill_(2)
    missing = module.load_state_dict(
        {"out_proj.weight": state["out_proj.weight"]}, strict=False
    ).missing_keys
    assert "head_mixing.bias" in missing and (module.head_mixing.bias == 2).all()


@torch.no_grad()
@pytest.mark.parametrize("position", ["rotary", "t5"])
def test_a_query_may_lie_before_all_keys(position):
    module, x = MixedAttention(E, H, relative_position=position), torch.randn(NQ, B, E)
    for bias in module.relative_position.parameters():
        bias.normal_()
    expected, _ = module(x, x, x, attn_mask=torch.arange(NQ).expand(NQ, NQ) == 0)
    torch.testing.assert_close(module(x, x[1:], x[1:])[0], expected)


def test_gradients_of_each_sentence_are_those_of_the_batch():
    model = mix(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, E, 0.0, batch_first=True), 1),
        "position-wise",
    )
    parameters, x = dict(model.named_parameters()), torch.randn(B, 40, E)
    loss = lambda values, x: torch.func.functional_call(model, values, (x[None],)).square().sum()  # noqa: E731
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
    # at the end, as torch's kernels ask for
    hidden = torch.arange(NQ) >= torch.arange(NQ - B + 1, NQ + 1)[:, None]
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


def test_nested_cross_attention_is_refused():
    nested = torch.nested.nested_tensor([torch.zeros(2, E), torch.zeros(3, E)])
    with pytest.raises(ValueError, match=r"^nested query: must be key and value, too"):
        MixedAttention(E, H, batch_first=True)(nested, nested, nested)


PARTS_WITH_TENSORS = [
    (option, value)
    for option, table in PARTS.items()
    for value, kind in table.items()
    if kind.parameters
]  # fmt: skip


@pytest.mark.parametrize(
    "option, value", [*PARTS_WITH_TENSORS, ("relative_gain", 3), ("mixing_start", "random")]
)
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
    assert all((projection.bias == 0).all() for projection in (emptied.q_proj, emptied.out_proj))

    name = "head_mixing" if option == "mixing_start" else option
    part, started = getattr(fresh, name), getattr(emptied, name)
    random = {"hidden_weight", "left_weight", "left"} if value in ("low-rank", "output") else set()
    if value == "random":
        random = {"weight", "bias"} & part.state_dict().keys()
    for key, tensor in part.state_dict().items():
        if key not in random:
            assert torch.equal(started.state_dict()[key], tensor)


def test_weight_decay_spares_the_mixing():
    model = mix(
        nn.Transformer(E, H, 1, 1, E), "position-independent", attention_sink="learned"
    ).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mixing" in name or "out_proj" in name)
    decayed, vectors, mixing = parameter_groups(model, 0.5, mixing_lr=0.1)
    assert (
        all(parameter.shape == (E, E) for parameter in decayed["params"])
        and len(decayed["params"]) == 3
    )
    assert len(vectors["params"]) == 3 and len(mixing["params"]) == 3
    torch.optim.AdamW([decayed, vectors, mixing], lr=0.1).step()
    assert [group["weight_decay"] for group in (decayed, vectors, mixing)] == [
        0.5,
        0.0,
        0.0,
    ] and mixing["lr"] == 0.1


def test_a_mixing_starts_as_it_is_asked_to_and_a_state_without_it_is_still_the_identity():
    asked = {"head_mixing": "position-independent", "mixing_start": "uniform"}
    uniform, torchs = torch.full((H, H), 1 / H), nn.MultiheadAttention(E, H)
    made, (mixed,) = (
        MixedAttention(E, H, **asked),
        mix(nn.ModuleList([copy.deepcopy(torchs)]), **asked),
    )
    for attention in (made, mixed):
        assert torch.equal(attention.head_mixing.weight, uniform)
        attention.load_state_dict(torchs.state_dict())
        assert torch.equal(attention.head_mixing.weight, torch.eye(H))
    refused = r"^mixing_start random: has no effect with head mixing low-rank; must be identity, or"
    with pytest.raises(ValueError, match=refused):
        MixedAttention(E, H, head_mixing="low-rank", mixing_start="random")
