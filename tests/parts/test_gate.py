"""Test the table of gates."""

import pytest
import torch

from mixhead_plugin.parts.gate import ATTENTION_GATES
from mixhead_plugin.parts.kinds import AttentionSizes

B, H, N, D, C = 2, 4, 3, 5, 6


@pytest.mark.parametrize("name", [name for name, row in ATTENTION_GATES.items() if row.build])
def test_the_table_says_what_a_gate_reads(name):
    row = ATTENTION_GATES[name]
    sizes = AttentionSizes(
        num_heads=H, head_dim=D, mixed_heads=H, value_dim=D, embed_dim=C, causal=False, key_heads=0
    )
    gate = row.build(sizes)
    for parameter in gate.parameters():
        torch.nn.init.normal_(parameter)
    out = torch.randn(B, N, H, D)
    before = gate(out, torch.randn(B, N, C))
    after = gate(out, torch.randn(B, N, C))
    reads_input = not torch.equal(before, after)
    assert reads_input == (row.reads == "input")
