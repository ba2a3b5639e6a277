import math

import pytest
import torch

from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.attention import HeadGates, MixheadAttention
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.modules.pruning import (
    PARAMETERS,
    KeptHeads,
    cut_parameters,
    cut_state,
    heads_per_layer,
    mask,
    pruned_flags,
)
from mixhead_plugin.modules.relative_position import RELATIVE_POSITIONS
from mixhead_plugin.ops import NORMALIZERS
from tests.helpers import build, shake, tokens

HEADS, SIZE, EMBED = 4, 3, 10
UNMIXED = KeptHeads((0, 2, 3), (0, 2, 3))
MIXED = KeptHeads((1, 3), (0, 1, 3))


def kept_for(mixing):
    return MIXED if HEAD_MIXINGS[mixing].build else UNMIXED


def attention(mixing="position-wise", normalizer="softmax", **flags):
    flags = {"self_attention": True, **flags}
    module = MixheadAttention(EMBED, HEADS, head_dim=SIZE, normalizer=normalizer, head_mixing=mixing, **flags)
    torch.nn.init.normal_(module.q_proj.bias)
    torch.nn.init.normal_(module.v_proj.bias)
    return shake(module).double().eval()


def by_definition(x, parameters, normalizer, kept):
    """Mixhead eqs 8-12 with the parameters of the heads that stay, for x [N, embed_dim]"""

    def projected(name):
        return x @ parameters[f"{name}.weight"].T + parameters[f"{name}.bias"]  # [N, H * D]

    q, k, v = (projected(name).unflatten(1, (-1, SIZE)) for name in ("q_proj", "k_proj", "v_proj"))  # [N, H, D]
    weights = NORMALIZERS[normalizer].weights(torch.einsum("thd,khd->htk", q, k) / math.sqrt(SIZE))
    if "head_mixing.query_weight" in parameters:
        m = torch.einsum("tjd,di->tji", q, parameters["head_mixing.query_weight"]) + parameters["head_mixing.bias"]
        weights = torch.einsum("jtk,tji->itk", weights, m)
    elif "head_mixing.weight" in parameters:
        weights = torch.einsum("jtk,ji->itk", weights, parameters["head_mixing.weight"])
    assert weights.shape[0] == len(kept.mixed)
    out = torch.einsum("htk,khd->thd", weights, v).flatten(1)
    return out @ parameters["out_proj.weight"].T + parameters["out_proj.bias"]


@pytest.mark.parametrize("mixing", HEAD_MIXINGS)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_cut_heads_give_what_masked_heads_give(normalizer, mixing):
    module, kept = attention(mixing, normalizer), kept_for(mixing)
    x = torch.randn(5, EMBED, dtype=torch.float64)
    whole = module(x[:, None], x[:, None], x[:, None])[0]
    module.gates = mask(module, kept)
    masked = module(x[:, None], x[:, None], x[:, None])[0]
    cut = by_definition(x, cut_parameters("attention", module, kept), normalizer, kept)
    torch.testing.assert_close(cut, masked[:, 0], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(whole, masked)


@pytest.mark.parametrize("mixing", HEAD_MIXINGS)
@pytest.mark.parametrize("flags", [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"bias": False}])
def test_the_smaller_module_is_the_masked_one(flags, mixing):
    kept = kept_for(mixing)
    torch.manual_seed(3)
    module = MixheadAttention(EMBED, HEADS, kdim=7, vdim=7, head_dim=SIZE, head_mixing=mixing, **flags)
    module = shake(module).double().eval()
    smaller = MixheadAttention(
        EMBED,
        len(kept.source),
        kdim=7,
        vdim=7,
        head_dim=SIZE,
        head_mixing=mixing,
        num_mixed_heads=len(kept.mixed),
        **flags,
    ).double()
    smaller.load_state_dict(cut_parameters("attention", module, kept))
    query, memory = torch.randn(5, 2, EMBED).double(), torch.randn(6, 2, 7).double()
    module.gates = mask(module, kept)
    for weights in (False, True):
        expected = module(query, memory, memory, need_weights=weights)[0]
        found = smaller.eval()(query, memory, memory, need_weights=weights)[0]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("position", RELATIVE_POSITIONS)
@pytest.mark.parametrize("mixing", ["none", "position-wise"])
def test_what_heads_know_of_distances_goes_with_them(mixing, position):
    kept, size = kept_for(mixing), 4
    flags = {"relative_position": position, "relative_gain": 2, "causal": True, "self_attention": True}
    flags |= {"head_dim": size, "head_mixing": mixing}
    module = shake(MixheadAttention(EMBED, HEADS, **flags)).double().eval()
    for own in (module.relative_position, module.relative_gain):
        for parameter in own.parameters() if own is not None else ():
            torch.nn.init.normal_(parameter)
    smaller = MixheadAttention(EMBED, len(kept.source), num_mixed_heads=len(kept.mixed), **flags).double().eval()
    smaller.load_state_dict(cut_parameters("attention", module, kept))
    x = torch.randn(5, 2, EMBED).double()
    module.gates = mask(module, kept)
    torch.testing.assert_close(smaller(x, x, x)[0], module(x, x, x)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mixing", HEAD_MIXINGS)
def test_every_parameter_is_in_the_table(mixing):
    module = MixheadAttention(EMBED, HEADS, head_dim=SIZE, head_mixing=mixing, add_bias_kv=True)
    assert set(module.state_dict()) <= set(PARAMETERS)


def test_the_mask_leaves_whole_attentions_alone():
    everything = KeptHeads((0, 1, 2, 3), (0, 1, 2, 3))
    assert mask(attention(), everything) == HeadGates(None, None)
    assert mask(attention("none"), UNMIXED).source is None
    assert mask(attention(), MIXED).source.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "mixing, kept, message",
    [
        ("average", KeptHeads((), (0,)), r"source heads \[\]: must be some of 0 to 3"),
        ("average", KeptHeads((0,), (0, 4)), r"mixed heads \[0, 4\]: must be some of 0 to 3"),
        ("average", KeptHeads((1, 0), (0,)), r"source heads \[1, 0\]: must be some of 0 to 3, ascending"),
        ("average", KeptHeads((-1, 0), (0,)), r"source heads \[-1, 0\]: must be some of 0 to 3"),
        ("none", KeptHeads((0,), (1,)), "must be equal where heads do not mix"),
    ],
)
def test_heads_that_cannot_be_kept_are_refused(mixing, kept, message):
    with pytest.raises(ValueError, match=message):
        cut_parameters("decoder.layers.0.self_attn", attention(mixing), kept)


def test_a_parameter_that_nobody_said_how_to_cut_is_refused():
    class Other(MixheadAttention):
        pass

    module = Other(EMBED, HEADS, head_dim=SIZE)
    module.positions = torch.nn.Parameter(torch.zeros(HEADS))
    with pytest.raises(OptionError, match=r"^layer: cannot be cut, its positions belongs to Other"):
        cut_parameters("layer", module, UNMIXED)


def test_the_flag_says_both_numbers_where_they_differ():
    layers = {"encoder-self": [UNMIXED, KeptHeads((0,), (0,))], "cross": [MIXED, KeptHeads((0, 1), (2, 3))]}
    assert heads_per_layer(layers) == "encoder-self=3,1;cross=2:3,2"


def test_one_flag_cannot_name_two_head_sizes():
    attentions = {"a": attention(), "b": MixheadAttention(EMBED, 2)}
    with pytest.raises(OptionError, match="heads of sizes 3, 5: cannot be cut"):
        pruned_flags(attentions, {})


def forward(model, sentences):
    if hasattr(model, "decoder") and hasattr(model, "encoder"):
        return model(sentences, torch.full((len(sentences),), sentences.shape[1]), sentences)[0]
    return model(sentences)[0]


@pytest.mark.parametrize("mixing", HEAD_MIXINGS)
@pytest.mark.parametrize(
    "arch, sites",
    [
        ("mixhead_transformer", ("encoder-self", "decoder-self", "cross")),
        ("mixhead_transformer_lm", ("decoder-self",)),
        ("mixhead_roberta_base", ("encoder-self",)),
    ],
)
def test_a_pruned_model_is_the_masked_one(arch, sites, mixing):
    """Other heads in every attention, so that no two can be mistaken for each other."""
    torch.manual_seed(2)
    model = shake(build(arch, head_mixing=mixing)).double().eval()
    attentions = {name: m for name, m in model.named_modules() if isinstance(m, MixheadAttention)}
    kept, layers = {}, {site: [] for site in sites}
    for i, name in enumerate(attentions):
        heads = tuple(sorted(torch.randperm(4)[: 1 + i % 4].tolist()))
        others = tuple(sorted(torch.randperm(4)[: 1 + (i + 1) % 3].tolist()))
        kept[name] = KeptHeads(heads, others if HEAD_MIXINGS[mixing].build else heads)
        site = "cross" if "encoder_attn" in name else f"{name.split('.')[0]}-self"
        layers[site if site in sites else sites[0]].append(kept[name])
    smaller = build(arch, seed=9, head_mixing=mixing, **pruned_flags(attentions, layers)).double().eval()
    smaller.load_state_dict(cut_state(model.state_dict(), attentions, kept))
    sentences = tokens(padded=True)
    whole = forward(model, sentences)
    for name, module in attentions.items():
        module.gates = mask(module, kept[name])
    torch.testing.assert_close(forward(smaller, sentences), forward(model, sentences), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(whole, forward(model, sentences))
