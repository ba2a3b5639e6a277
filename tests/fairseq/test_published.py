"""Checkpoints of the Mixhead authors' code become checkpoints of the plugin.

Their outputs stay the same.
"""

import re
from argparse import Namespace

import pytest
import torch
from fairseq.checkpoint_utils import load_checkpoint_to_cpu
from fairseq.models import build_model
from fairseq.modules import MultiheadAttention
from omegaconf import OmegaConf
from torch import nn

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.published import convert, converted
from tests.fairseq.models.cases import forward, yaml
from tests.helpers import TINY, build, task, tokens


class PublishedAttention(nn.Module):
    """Attention with the parameters of the authors' module, written from its equations.

    It has no cache and no dropout.
    """

    def __init__(self, of: MultiheadAttention, kind: str):
        super().__init__()
        self.heads = of.num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            of.q_proj,
            of.k_proj,
            of.v_proj,
            of.out_proj,
        )
        head_dim = of.q_proj.out_features // of.num_heads
        if kind == "A":
            self.stochastic_w = nn.Parameter(torch.randn(self.heads, self.heads))
        else:
            self.stochastic_w = nn.Parameter(torch.randn(head_dim, self.heads))
            self.bias = nn.Parameter(torch.randn(self.heads, self.heads))

    def _get_input_buffer(self, incremental_state):  # fairseq's layer asks for it
        return {}

    def split(self, x):
        # [N, B, H * D] -> [B, H, N, D]
        return x.unflatten(-1, (self.heads, -1)).permute(1, 2, 0, 3)

    def forward(self, query, key, value, key_padding_mask=None, attn_mask=None, **_):
        q = self.split(self.q_proj(query))
        k = self.split(self.k_proj(key))
        v = self.split(self.v_proj(value))
        scores = q @ k.transpose(2, 3) * q.size(-1) ** -0.5  # [B, H, Nq, Nk]
        if attn_mask is not None:
            scores = scores + attn_mask
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask.bool()[:, None, None], -torch.inf)
        weights = scores.softmax(-1).permute(0, 2, 3, 1)  # [B, Nq, Nk, H]: source heads last
        mixing = self.stochastic_w
        if hasattr(self, "bias"):
            mixing = q.transpose(1, 2) @ mixing + self.bias  # [B, Nq, H, H]
        mixed = (weights @ mixing).permute(0, 3, 1, 2)  # [B, H, Nq, Nk]
        return self.out_proj((mixed @ v).permute(2, 0, 1, 3).flatten(2)), None


def published(path, arch, kind, sites=("self_attn", "encoder_attn"), **arguments):
    """Write a checkpoint of the authors' code, and return its model.

    Only attentions of `sites` mix.
    """
    model = build(arch).eval()
    torch.manual_seed(2)
    for name, module in list(model.named_modules()):
        if isinstance(module, MultiheadAttention) and name.endswith(tuple(sites)):
            model.set_submodule(name, PublishedAttention(module, kind))
    model_cfg = Namespace(arch=arch, **TINY[arch], **arguments)
    if arch == "transformer_lm":  # fairseq keeps its flags as a dataclass
        flags = yaml(arch, **TINY[arch])
        model_cfg = {**OmegaConf.to_container(flags, resolve=True, enum_to_str=True), **arguments}
    history = {
        "criterion_name": "CrossEntropyCriterion",
        "optimizer_name": "",
        "lr_scheduler_state": {},
    }
    state = {
        "cfg": {"model": model_cfg},
        "args": None,
        "model": model.state_dict(),
        "optimizer_history": [history],
    }
    torch.save(
        {**state, "extra_state": {"train_iterator": {}}, "last_optimizer_state": {"step": 3}}, path
    )
    return model


@pytest.mark.parametrize("kind", ["A", "B"])
@pytest.mark.parametrize(
    "arch, sites, scope",
    [
        ("transformer_lm", ["self_attn"], "all"),
        ("roberta_base", ["self_attn"], "all"),
        ("transformer", ["self_attn"], "self"),
        ("transformer", ["self_attn", "encoder_attn"], "all"),
    ],
    ids=["language model", "RoBERTa", "translation, self", "translation, all"],
)
def test_the_outputs_are_those_of_the_authors_code(arch, sites, scope, kind, tmp_path):
    file = str(tmp_path / "published.pt")
    out = str(tmp_path / "converted.pt")
    theirs = published(file, arch, kind, sites, mix_type={"A": 7, "B": 17}[kind])
    assert convert(file, out) == f"mixhead_{arch}"

    state = load_checkpoint_to_cpu(out)
    assert state["cfg"].model.attention_scope == scope
    assert "last_optimizer_state" not in state
    ours = build_model(state["cfg"].model, task(), from_checkpoint=True).eval()
    ours.load_state_dict(state["model"], strict=True)
    sentences = tokens(padded=arch != "roberta_base")
    with torch.no_grad():
        torch.testing.assert_close(
            forward(ours, sentences), forward(theirs, sentences), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    "change, said",
    [
        (
            {"arch": "fconv"},
            "--arch fconv: must be an architecture of fairseq that the plugin has, too",
        ),
        ({"mix_type": 3}, "mix_type 3: must be one of 7, 9, 10, 14, 17"),
        (
            {"pre_mix": True},
            "pre_mix: must be false; --score-mixing mixes scores before masks are added",
        ),
    ],
    ids=["architecture", "kind", "scores"],
)
def test_a_model_that_the_plugin_does_not_compute_is_refused_in_one_line(change, said, tmp_path):
    file = str(tmp_path / "published.pt")
    published(file, "transformer", "A")
    state = torch.load(file, weights_only=False)
    vars(state["cfg"]["model"]).update(change)
    torch.save(state, file)
    with pytest.raises(OptionError, match=f"^{re.escape(f'{file}: {said}')}$"):
        convert(file, str(tmp_path / "converted.pt"))
    assert not (tmp_path / "converted.pt").exists()


def test_a_file_without_a_config_is_refused_in_one_line(tmp_path):
    file = str(tmp_path / "published.pt")
    published(file, "transformer", "A")
    torch.save({**torch.load(file, weights_only=False), "cfg": None}, file)
    said = (
        f"{file}: has no config; must be a checkpoint that fairseq-train wrote, not its tensors "
        "alone"
    )
    with pytest.raises(OptionError, match=f"^{re.escape(said)}$"):
        convert(file, str(tmp_path / "converted.pt"))


Q = "decoder.layers.0.self_attn.q_proj.weight"
W = "decoder.layers.0.self_attn.stochastic_w"
BIAS = "decoder.layers.0.self_attn.bias"
OTHER = {
    name.replace("layers.0", "layers.1"): value for name, value in {Q: torch.zeros(16, 16)}.items()
}


@pytest.mark.parametrize(
    "tensors, said",
    [
        ({}, "has no tensor *.stochastic_w, so it is no model of the authors' Mixhead code"),
        (
            {W: torch.zeros(2, 8)},
            f"{W} is [2, 8] without a bias; must be [8, 8] without one (A), or [2, 8] with one (B)",
        ),
        (
            {W: torch.zeros(8, 8), BIAS: torch.zeros(8, 8)},
            f"{W} is [8, 8] with a bias; must be [8, 8] without one (A), or [2, 8] with one (B)",
        ),
        (
            {W: torch.zeros(8)},
            f"{W} is [8], {Q} is [16, 16]; both must be matrices with numbers",
        ),
        (
            {W: torch.zeros(8, 0)},
            f"{W} is [8, 0], {Q} is [16, 16]; both must be matrices with numbers",
        ),
        (
            {W.replace("0", "1"): torch.zeros(8, 8)},
            f"has {W.replace('0', '1')}, but no {Q.replace('0', '1')}; must be a whole model",
        ),
        (
            {W: torch.zeros(8, 8), **OTHER},
            "mixes 1 of 2 attentions, which no --attention-scope covers",
        ),
    ],
    ids=[
        "no mixing",
        "no static part",
        "another shape",
        "vector",
        "empty",
        "no projection",
        "some layers",
    ],
)
def test_tensors_that_are_neither_a_nor_b_are_refused_in_one_line(tensors, said):
    with pytest.raises(OptionError, match=f"^{re.escape(f'x.pt: {said}')}$"):
        converted("x.pt", {Q: torch.zeros(16, 16), **tensors})


def test_a_free_head_size_becomes_a_flag():
    found = converted("x.pt", {Q: torch.zeros(64, 16), W: torch.zeros(8, 8)})
    assert (found.head_mixing, found.attention_scope, found.head_dim) == (
        "position-independent",
        "all",
        8,
    )
