"""Other rows and other rotations, for the length of a test."""

from tests.hf.models import hf, transformers


def row(monkeypatch, name, *fields, **others):
    monkeypatch.setitem(hf.LAYOUTS, f"{name}Attention", hf.Layout(*fields, **others))


def rotating(monkeypatch, change):
    """Let the attentions of Llama change queries and keys [B, H, N, D] where they rotate them."""
    module = transformers.models.llama.modeling_llama
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, *_: change(q, k))
