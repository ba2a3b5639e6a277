"""The class and the function of docs/python.md take the place of nanoGPT's attention and move its
weights.
"""

import types

import pytest
import torch
from torch.nn import functional as F

from tests.test_documents import ROOT, blocks

CONFIGS = [(bias, dropout) for bias in (True, False) for dropout in (0.0, 0.2)]


class PlainAttention(torch.nn.Module):
    """Causal self-attention with nanoGPT's names of parameters: queries, keys and values from one
    matrix.
    """

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = torch.nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = torch.nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        # its mask without flash attention
        self.register_buffer("bias", torch.ones(1, 1, 8, 8).tril())

    def forward(self, x):
        heads = []
        for part in self.c_attn(x).chunk(3, dim=-1):
            heads.append(part.unflatten(-1, (self.n_head, -1)).transpose(1, 2))  # [B, H, N, D]
        out = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.c_proj(out.transpose(1, 2).flatten(2))


class Model(torch.nn.Module):
    """Two layers of nothing but attention, with nanoGPT's names."""

    def __init__(self, attention, config):
        super().__init__()
        layers = [torch.nn.ModuleDict({"attn": attention(config)}) for _ in range(2)]
        self.transformer = torch.nn.ModuleDict({"h": torch.nn.ModuleList(layers)})

    def forward(self, x):
        for layer in self.transformer["h"]:
            x = x + layer["attn"](x)
        return x


@pytest.fixture(scope="module")
def page():
    """Return the names that the block of the page defines."""
    (program,) = [
        block
        for kind, block in blocks(ROOT / "docs" / "python.md")
        if kind == "python" and "class CausalSelfAttention" in block
    ]
    names = {"torch": torch}
    exec(program, names)
    return names


@pytest.mark.parametrize(
    ("bias", "dropout"), CONFIGS, ids=[f"bias {bias}, dropout {drop}" for bias, drop in CONFIGS]
)
@pytest.mark.parametrize("prefix", ["", "_orig_mod."], ids=["as it is", "compiled"])
def test_a_checkpoint_of_nanogpt_keeps_its_outputs(page, bias, dropout, prefix):
    torch.manual_seed(0)
    config = types.SimpleNamespace(n_embd=32, n_head=4, dropout=dropout, bias=bias)
    plain = Model(PlainAttention, config).eval()
    mixed = Model(page["CausalSelfAttention"], config).eval()
    checkpoint = {prefix + name: tensor for name, tensor in plain.state_dict().items()}

    mixed.load_state_dict(page["renamed"](checkpoint))

    x = torch.randn(2, 8, 32)
    torch.testing.assert_close(mixed(x), plain(x))


def test_the_dropout_of_the_config_acts_on_weights_and_output(page):
    config = types.SimpleNamespace(n_embd=32, n_head=4, dropout=0.2, bias=True)
    attention = page["CausalSelfAttention"](config)
    assert (attention.attention.dropout, attention.resid_dropout.p) == (0.2, 0.2)


def test_the_init_of_nanogpt_leaves_the_mixing_at_the_identity(page):
    """nanoGPT draws every nn.Linear anew."""

    def draw(module):
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.02)

    config = types.SimpleNamespace(n_embd=32, n_head=4, dropout=0.0, bias=False)
    model = Model(page["CausalSelfAttention"], config)
    before = {name: p.clone() for name, p in model.named_parameters() if "head_mixing" in name}
    model.apply(draw)
    after = dict(model.named_parameters())
    assert before
    for name, parameter in before.items():
        assert torch.equal(after[name], parameter)
    # which nanoGPT's own init would miss
    assert sum(name.endswith("out_proj.weight") for name in after) == 2
