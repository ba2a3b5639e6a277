"""The attentions of `transformers` that can be mixed: one row of LAYOUTS each."""

from typing import Any, NamedTuple

from torch import nn


class Layout(NamedTuple):
    """The attributes of an attention of `transformers`; of several projections, the first one that is there."""

    queries: tuple[str, ...]  # projects to the queries of all heads, before any rotation
    heads: str  # of the attention or of its config
    head_dim: str
    keys: tuple[str, ...] = ("k_proj",)
    values: tuple[str, ...] = ("v_proj",)
    output: tuple[str, ...] = ("o_proj", "out_proj")  # reads the outputs of all heads; ".." is the module around


_LAYOUTS = {
    "BertSelf BertCross RobertaSelf RobertaCross XLMRobertaSelf XLMRobertaCross ElectraSelf ElectraCross": Layout(
        ("query",), "num_attention_heads", "attention_head_size", ("key",), ("value",), ("..output.dense",)
    ),
    "DistilBertSelf": Layout(("q_lin",), "n_heads", "attention_head_size", ("k_lin",), ("v_lin",), ("out_lin",)),
    "GPT2": Layout(("q_attn", "c_attn"), "num_heads", "head_dim", ("c_attn",), ("c_attn",), ("c_proj",)),
    "Llama Mistral Qwen2 Qwen3 Gemma ViT": Layout(("q_proj",), "num_attention_heads", "head_dim"),
    "Phi": Layout(("q_proj",), "num_attention_heads", "head_dim", output=("dense",)),
    "Marian Bart MBart Whisper OPT": Layout(("q_proj",), "num_heads", "head_dim"),
    "T5 MT5": Layout(("q",), "n_heads", "key_value_proj_dim", ("k",), ("v",), ("o",)),
}
LAYOUTS = {f"{name}Attention": layout for names, layout in _LAYOUTS.items() for name in names.split()}


class Site(NamedTuple):
    """One attention of a model, whose class is in LAYOUTS."""

    name: str
    module: Any

    @property
    def layout(self) -> Layout:
        return LAYOUTS[type(self.module).__name__]

    @property
    def heads(self) -> int:
        """The number of heads before mixing."""
        name = self.layout.heads
        return getattr(self.module, name, None) or getattr(self.module.config, name)

    @property
    def head_dim(self) -> int:
        return getattr(self.module, self.layout.head_dim)

    def group(self, model: nn.Module) -> int:
        """Return how many heads of queries share a head of keys."""
        queries, keys = (model.get_submodule(self.path(kind)) for kind in ("queries", "keys"))
        return getattr(queries, "out_features", 1) // getattr(keys, "out_features", 1)  # GPT-2 has no groups

    def path(self, kind: str) -> str:
        """Return the name in the model of a projection; `kind` is a field of Layout."""
        names = getattr(self.layout, kind)
        found = next((name for name in names if hasattr(self.module, name)), names[0])
        return f"{self.name}.{found}".lstrip(".") if found[0] != "." else self.name.rpartition(".")[0] + found[1:]


def sites_of(model: nn.Module) -> list[Site]:
    """Return the attentions of a model in its order; raise ValueError if there are none."""
    named = ((name, module) for name, module in model.named_modules() if type(module).__name__ in LAYOUTS)
    # A wrapper of an older version may have the name of a row, but none of its projections.
    found = [Site(*each) for each in named if any(hasattr(each[1], name) for name in Site(*each).layout.queries)]
    if not found:
        raise ValueError(
            f"{type(model).__name__}: has none of the attentions of hf.LAYOUTS: {', '.join(LAYOUTS)}; "
            "docs/huggingface.md says how to add a row"
        )
    return found
