"""The pictures that explain an idea are what the script draws, and say what the plugin computes."""

import re
from xml.etree import ElementTree

import pytest
import torch
from development import drawings

from mixhead_plugin.ops.penalties import orthogonal_penalty
from mixhead_plugin.parts.head_mixing import PositionWiseMixing
from mixhead_plugin.parts.kinds import AttentionSizes

EACH = pytest.mark.parametrize("name", drawings.DRAWINGS)


@EACH
def test_a_committed_picture_is_what_the_script_draws(name):
    drawn = drawings.DRAWINGS[name]().svg()
    committed = (drawings.DOCS / f"{name}.svg").read_text(encoding="utf-8")
    assert committed == drawn, "run scripts/development/drawings.py"


@EACH
def test_every_element_has_a_look_of_the_style(name):
    """A misspelt class would draw black on dark paper."""
    styled = set(re.findall(r"\.([a-z-]+)", drawings.STYLE))
    picture = ElementTree.fromstring(drawings.DRAWINGS[name]().svg())
    looks = " ".join(element.get("class", "") for element in picture.iter())
    assert set(looks.split()) <= styled


def test_the_picture_of_b_computes_m_as_position_wise_mixing_does():
    sizes = AttentionSizes(num_heads=3, head_dim=4, mixed_heads=3, value_dim=4, embed_dim=12)
    mixing = PositionWiseMixing(sizes).double()
    mixing.query_weight.data = torch.tensor(drawings.READING, dtype=torch.float64)
    mixing.bias.data = torch.tensor(drawings.MIXING, dtype=torch.float64)
    queries = torch.tensor(drawings.QUERIES, dtype=torch.float64)  # [Nq, H, D]
    drawn = [drawings.read_mixing(each) for each in drawings.QUERIES]
    computed = mixing(queries.transpose(0, 1)[None], None)[0]  # [Nq, H, H]
    torch.testing.assert_close(computed, torch.tensor(drawn, dtype=torch.float64))


@pytest.mark.parametrize("mixing", [drawings.ALIKE, drawings.APART], ids=["alike", "apart"])
def test_the_picture_of_the_penalty_has_what_the_penalty_computes(mixing):
    m = torch.tensor(mixing, dtype=torch.float64)
    everything = torch.ones(1, 1, dtype=torch.bool)  # there is no padding
    computed = orthogonal_penalty(m, everything).item()
    assert drawings.penalty(mixing) == pytest.approx(computed, abs=1e-12)
