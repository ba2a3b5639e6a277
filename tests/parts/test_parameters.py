"""The tensors of parts are found in a model whose own modules may have the same names."""

import pytest
import torch
from torch import nn

from mixhead_plugin.nn import MixedAttention, load
from mixhead_plugin.parts import (
    PARTS,
    AttentionSizes,
    keep_float32,
    mixing_parameters,
    name_in_attention,
    parameter_groups,
    part_of,
)
from mixhead_plugin.parts.kinds import Part

C, H = 8, 2


class Foreign(nn.Module):
    """Has modules with the names of parts that are not of this package."""

    def __init__(self):
        super().__init__()
        self.attention_gate = nn.Linear(C, C, bias=False)
        self.relative_position = nn.Embedding(6, C)
        self.score_mixing = nn.ModuleList([MixedAttention(C, H, head_mixing="position-wise")])


OURS = [f"score_mixing.0.head_mixing.{name}" for name in ("query_weight", "bias")]


def test_the_parameters_of_parts_are_told_by_their_class():
    assert [*mixing_parameters(Foreign())] == OURS


def test_weight_decay_acts_on_the_matrices_of_others():
    model = Foreign()
    decayed = parameter_groups(model, 0.1)[0]["params"]
    ids = {id(parameter) for parameter in decayed}
    assert id(model.attention_gate.weight) in ids
    assert id(model.relative_position.weight) in ids


@pytest.mark.parametrize("option", PARTS)
def test_every_part_is_of_the_class(option):
    for kind in PARTS[option].values():
        if kind.build is not None:
            sizes = AttentionSizes(H, 4, H // kind.heads_per_mixed, 4 * kind.heads_per_mixed, C)
            assert isinstance(kind.build(sizes), Part)


def test_a_tensor_of_a_part_inside_of_a_module_with_such_a_name_has_the_name_of_the_part():
    assert part_of(OURS[1]) == "head_mixing"
    assert name_in_attention(OURS[1]) == "head_mixing.bias"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_part_that_a_state_lacks_comes_to_the_device_of_its_attention(device):
    """By assign=True the tensors of the state become the parameters."""
    attention = MixedAttention(C, H, head_mixing="position-independent", relative_gain=2)
    plain = nn.MultiheadAttention(C, H, device=device)
    attention.load_state_dict(plain.state_dict(), assign=True)
    assert {parameter.device.type for parameter in attention.parameters()} == {device}


def test_only_parts_stay_in_float32_where_the_model_is_in_half_precision():
    saved = Foreign().bfloat16().state_dict()
    saved["attention_gate.weight"] = saved["attention_gate.weight"].float()
    saved[OURS[1]] = saved[OURS[1]].float()

    model = Foreign().bfloat16()
    keep_float32(model, saved)
    in_float32 = [name for name, each in model.named_parameters() if each.dtype == torch.float32]
    assert in_float32 == [OURS[1]]


def test_a_plain_state_dict_with_such_names_tells_of_no_mixing():
    plain = nn.ModuleDict({"attention_gate": nn.Linear(C, C), "inner": nn.ModuleDict()})
    with pytest.raises(
        ValueError, match=r"^state_dict: has no metadata of a mixing; the arguments"
    ):
        load(plain, dict(plain.state_dict()))
