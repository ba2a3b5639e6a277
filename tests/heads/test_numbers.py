"""Choose heads by their importance, and compare the numbers of heads."""

import pytest
import torch

from mixhead_plugin.heads.choosing import least_important
from mixhead_plugin.heads.correlation import pearson
from mixhead_plugin.heads.importance import normalized_by_layer
from mixhead_plugin.heads.numbers import heat_maps

NAMES = ["decoder.layers.0.self_attn", "decoder.layers.1.self_attn"]
WEIGHTS = {
    NAMES[0]: {
        "source": torch.tensor([3.0, 1.0, 2.0, 4.0]),
        "mixed": torch.tensor([0.3, 0.4, 0.0, 0.0]),
    },
    NAMES[1]: {"source": torch.tensor([0.5, 0.6, 5.0, 0.7]), "mixed": torch.zeros(4)},
}


def test_the_least_important_of_each_kind_go_first_and_the_most_important_of_a_layer_never():
    def sources(fraction, at_least=1):
        return [
            (h.attention, h.number)
            for h in least_important(WEIGHTS, fraction, at_least)
            if h.stage == "source"
        ]

    first, second = NAMES
    order = [(second, 0), (second, 1), (second, 3), (first, 1), (first, 2), (first, 0)]
    for number in range(9):
        assert sources(number / 8) == order[:number]
    assert sources(1, at_least=3) == [(second, 0), (first, 1)]
    assert least_important(WEIGHTS, 1, at_least=5) == least_important(WEIGHTS, 0) == []
    stages = [head.stage for head in least_important(WEIGHTS, 0.25)]
    assert stages == ["source", "source", "mixed", "mixed"]


def test_every_layer_is_normalized_to_length_1_unless_it_is_0():
    first, second = normalized_by_layer(WEIGHTS).values()
    torch.testing.assert_close(first["mixed"], torch.tensor([0.6, 0.8, 0.0, 0.0]))
    torch.testing.assert_close(second["source"].norm(), torch.tensor(1.0))
    assert torch.equal(second["mixed"], torch.zeros(4))


def test_pearson_is_1_for_a_linear_relation():
    scaled = {}
    turned = {}
    for name, by_stage in WEIGHTS.items():
        scaled[name] = {stage: 2 * w + 1 for stage, w in by_stage.items()}
        turned[name] = {stage: -w for stage, w in by_stage.items()}
    assert pearson(WEIGHTS, scaled) == pytest.approx({"source": 1.0, "mixed": 1.0})
    assert pearson(WEIGHTS, turned) == pytest.approx({"source": -1.0, "mixed": -1.0})
    left = {"a": {"mixed": torch.tensor([1.0, 2.0, 3.0])}}
    right = {"a": {"mixed": torch.tensor([1.0, 3.0, 2.0])}}
    assert pearson(left, right) == pytest.approx({"mixed": 0.5})


def test_an_attention_without_source_heads_has_no_row_where_these_alone_are_drawn():
    """With --attention-scope self, the others do not mix."""
    first, second = NAMES
    figure = heat_maps({first: {"source": WEIGHTS[first]["source"]}, second: {}}, "importance")
    images = []
    for axes in figure.axes:
        images += axes.images
    assert images[0].get_array().tolist() == [[3.0, 1.0, 2.0, 4.0]]
