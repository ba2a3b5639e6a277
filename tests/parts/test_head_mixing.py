"""Test head mixings alone; tests/fairseq/test_attention.py has them in whole attentions."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization

from mixhead_plugin.ops import LowRank
from mixhead_plugin.parts import PARTS, Assembly, AttentionSizes, Variant, first_part_with_effect
from mixhead_plugin.parts.head_mixing import HEAD_MIXINGS, MIXING_STARTS
from mixhead_plugin.parts.kinds import Part

H, D, C = 6, 4, 7
SHAPES = {"query": (2, H, 3, D), "input": (2, 3, C)}
built = pytest.mark.parametrize("name", [n for n, kind in HEAD_MIXINGS.items() if kind.build])


def build(name, heads=H, mixed=None):
    kind = HEAD_MIXINGS[name]
    mixed = mixed or heads // kind.heads_per_mixed
    return kind.build(AttentionSizes(heads, D, mixed, kind.heads_per_mixed * D, C))


def numbers(mixing):
    """Return M, also where a part gives its factors."""
    return mixing.matrix() if isinstance(mixing, LowRank) else mixing


def inputs():
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("option", PARTS)
def test_the_table_says_what_a_part_has(option):
    for value, kind in PARTS[option].items():
        mixed = H - 1 if not kind.why_not_cut and kind.trained else H // kind.heads_per_mixed
        module = (
            kind.build(AttentionSizes(H, D, mixed, kind.heads_per_mixed * D, C))
            if kind.build
            else torch.nn.Module()
        )
        assert set(module.state_dict()) == set(kind.parameters), value
        for parameter, axes in kind.parameters.items():
            for dim, side, size_of_head in axes:
                size = {"source": H, "mixed": mixed}[side] * (D if size_of_head else 1)
                assert module.state_dict()[parameter].shape[dim] == size, value
        if kind.trained:
            starts_plain = isinstance(module, Part) and module.identity() != {}
            assert kind.loads_without == starts_plain, value


@built
def test_the_table_says_what_a_mixing_reads(name):
    """Frozen matrices are in checkpoints too."""
    kind = HEAD_MIXINGS[name]
    mixing = build(name)
    given = inputs()
    assert bool(list(mixing.parameters())) == kind.trained
    torch.manual_seed(1)
    for tensor in mixing.state_dict().values():
        torch.nn.init.normal_(tensor)
    for what in given:
        changed = {**given, what: torch.randn(SHAPES[what])}
        before, after = (numbers(mixing(*values.values())) for values in (given, changed))
        assert torch.equal(before, after) == (kind.reads != what)


def test_average_mixing_makes_every_head_the_mean_head():
    matrix = build("average")(*inputs().values())
    torch.testing.assert_close(matrix, torch.full((H, H), 1 / H))


@pytest.mark.parametrize("heads", [1, 2, 8, 64])
def test_columns_of_random_mixing_sum_to_one(heads):
    matrix = build("random", heads)(*inputs().values())
    torch.testing.assert_close(matrix.sum(0), torch.ones(heads))
    assert heads == 1 or matrix.std() > 0.01


def test_a_differential_mixing_starts_at_one_half():
    """The source says so; tests/attention_equations.py has the equation."""
    matrix = build("differential")(*inputs().values())
    assert (matrix[..., H // 2 :, :].diagonal(dim1=-2, dim2=-1) == -0.5).all()


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_the_rank_sets_the_columns_of_the_factors(rank):
    sizes = AttentionSizes(H, D, H, D, C)
    mixing = HEAD_MIXINGS["low-rank"].build(sizes, mixing_rank=rank)
    left, right, diagonal = mixing(*inputs().values())
    assert left.shape == right.shape == (2, 3, H, rank)
    assert diagonal.shape == (2, 3, H)
    assert mixing.hidden_weight.shape == (C, 2 * rank * H)


@pytest.mark.parametrize(
    "name, tensor",
    [("low-rank", "hidden_weight"), ("low-rank", "left_weight"), ("random", "weight")],
)
def test_two_mixings_start_apart(name, tensor):
    first = build(name)
    _ = torch.rand(1)  # as the projections of the second attention draw
    second = build(name)
    assert not torch.equal(first.state_dict()[tensor], second.state_dict()[tensor])


# ---- random numbers ----------------------------------------------------------------------------

DRAWN = {f"{option} {value}": {option: value} for option in PARTS for value in PARTS[option]}
DRAWN["mixing_start random"] = {"head_mixing": "position-wise", "mixing_start": "random"}


@pytest.mark.parametrize("asked", DRAWN)
def test_a_part_leaves_the_random_numbers_of_everything_else(asked, monkeypatch):
    """Also those of GPUs, which `torch.manual_seed` seeds."""
    variant = Variant(**DRAWN[asked])
    sizes = variant.sizes(H, H * D)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    Assembly().add_parts(variant, sizes)
    assert torch.equal(torch.get_rng_state(), before)
    assert not seeded


def test_a_mixing_that_float32_would_take_for_the_identity_has_an_effect():
    mixing = build("position-independent").double()
    assert first_part_with_effect({"head_mixing": mixing}) == ""
    mixing.weight.data[0, 0] += 1e-8
    assert first_part_with_effect({"head_mixing": mixing}) == "head_mixing"


def test_a_mixing_whose_tensor_a_tool_computes_has_an_effect():
    parametrized = build("position-independent")
    register_parametrization(parametrized, "weight", nn.Softmax(dim=0))
    pruned = prune.identity(build("position-independent"), "weight")
    for mixing in (parametrized, pruned):
        assert first_part_with_effect({"head_mixing": mixing}) == "head_mixing"


# ---- --mixing-start ----------------------------------------------------------------------------

STARTED = [name for name, kind in HEAD_MIXINGS.items() if "mixing_start" in kind.options]


def started(name, start, heads=H, mixed=H):
    return HEAD_MIXINGS[name].build(AttentionSizes(heads, D, mixed, D, C), mixing_start=start)


@pytest.mark.parametrize("name", STARTED)
def test_a_mixing_starts_as_it_was_asked(name):
    """Mixhead section 3.2."""
    for start, expected in (
        ("identity", torch.eye(H, H - 1)),
        ("uniform", torch.full((H, H - 1), 1 / H)),
    ):
        mixing = started(name, start, mixed=H - 1)
        torch.testing.assert_close(mixing(*inputs().values()).expand(2, 3, -1, -1)[1, 2], expected)
    for heads in (16, 100):
        matrix = started(name, "random", heads, heads)(
            torch.zeros(1, heads, 1, D), torch.zeros(1, 1, C)
        )
        assert abs(matrix.std() * heads**0.5 - 1) < 0.2
        assert abs(matrix.mean()) < 0.05


@pytest.mark.parametrize("name", STARTED)
@pytest.mark.parametrize("start", MIXING_STARTS)
def test_a_mixing_starts_again_as_it_was_asked(name, start):
    mixing = started(name, start)
    for tensor in mixing.state_dict().values():
        tensor.fill_(7.0)
    torch.manual_seed(3)
    mixing.reset_parameters()
    torch.manual_seed(3)
    assert all(
        torch.equal(value, mixing.state_dict()[k])
        for k, value in started(name, start).state_dict().items()
    )


def test_a_start_belongs_to_head_mixing_alone():
    mixings = dict.fromkeys(("head_mixing", "score_mixing"), "position-wise")
    variant = Variant(**mixings, mixing_start="uniform")
    assembly = Assembly()
    assembly.add_parts(variant, variant.sizes(H, H * D))
    assert torch.equal(assembly.head_mixing.bias, torch.full((H, H), 1 / H))
    assert torch.equal(assembly.score_mixing.bias, torch.eye(H))
