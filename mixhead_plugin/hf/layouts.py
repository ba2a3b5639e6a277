"""The attentions of `transformers` that can be mixed: one row of LAYOUTS each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

# of the implementation, of the options in a config, and of what `mix` notes in an attention
NAME = "mixhead"
# The fields of Layout whose features an attention function gets, in its order.
KINDS = ("queries", "keys", "values")


class Layout(NamedTuple):
    """The attributes of an attention of `transformers`; of several projections, the first one that
    is there.

    A projection that gives several of queries, keys and values must give them in this order, each
    for all heads.
    """

    queries: tuple[str, ...]  # projects to the queries of all heads, before any rotation
    heads: str  # of the attention or of its config
    head_dim: str
    keys: tuple[str, ...] = ("k_proj",)
    values: tuple[str, ...] = ("v_proj",)
    # reads the outputs of all heads; ".." is the module around
    output: tuple[str, ...] = ("o_proj", "out_proj")


_LAYOUTS = {
    "BertSelf BertCross RobertaSelf RobertaCross XLMRobertaSelf XLMRobertaCross ElectraSelf "
    "ElectraCross": Layout(
        ("query",),
        "num_attention_heads",
        "attention_head_size",
        ("key",),
        ("value",),
        ("..output.dense",),
    ),
    "DistilBertSelf": Layout(
        ("q_lin",), "n_heads", "attention_head_size", ("k_lin",), ("v_lin",), ("out_lin",)
    ),
    "GPT2": Layout(
        ("q_attn", "c_attn"), "num_heads", "head_dim", ("c_attn",), ("c_attn",), ("c_proj",)
    ),
    "Llama Mistral Qwen2 Qwen3 Gemma ViT": Layout(("q_proj",), "num_attention_heads", "head_dim"),
    "Phi": Layout(("q_proj",), "num_attention_heads", "head_dim", output=("dense",)),
    "Marian Bart MBart Whisper OPT": Layout(("q_proj",), "num_heads", "head_dim"),
    "T5 MT5": Layout(("q",), "n_heads", "key_value_proj_dim", ("k",), ("v",), ("o",)),
}
LAYOUTS = {
    f"{name}Attention": layout for names, layout in _LAYOUTS.items() for name in names.split()
}


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
        """Return how many heads of queries share a head of keys,
        where nothing is mixed or pruned.
        """
        return self.heads * self.head_dim // self.widths(model)["keys"]

    def path(self, kind: str) -> str:
        """Return the name in the model of a projection; `kind` is a field of Layout."""
        names = getattr(self.layout, kind)
        found = next((name for name in names if hasattr(self.module, name)), names[0])
        return (
            f"{self.name}.{found}".lstrip(".")
            if found[0] != "."
            else self.name.rpartition(".")[0] + found[1:]
        )

    def packed(self) -> dict[str, list[str]]:
        """Return which of queries, keys and values each projection gives,
        by its name in the model.
        """
        found: dict[str, list[str]] = {}
        for kind in KINDS:
            found.setdefault(self.path(kind), []).append(kind)
        return found

    def widths(self, model: nn.Module) -> dict[str, int]:
        """Return how many features queries, keys and values have, as far as the sizes of the
        projections tell.
        """
        widths = {}
        for path, kinds in self.packed().items():
            left, others = out_features(model.get_submodule(path)), list(kinds)
            if len(kinds) > 1 and kinds[0] == "queries":
                widths["queries"] = self.heads * self.head_dim
                left -= widths["queries"]
                others = kinds[1:]
            widths |= dict.fromkeys(others, left // len(others))
        return widths

    def check_names(self, model: nn.Module) -> None:
        """Raise ValueError unless the attention has all that its row names."""
        try:
            for kind in (*KINDS, "output"):
                model.get_submodule(self.path(kind))
            _ = self.heads, self.head_dim
        except AttributeError as error:
            raise ValueError(
                f"{type(self.module).__name__}: does not fit its row of hf.LAYOUTS, {error}"
            ) from None

    def check_sizes(self, model: nn.Module) -> None:
        """Raise ValueError unless the projections have the sizes of heads times head size, for keys
        of fewer heads.
        """
        widths, inner = self.widths(model), self.heads * self.head_dim
        widths["output"] = in_features(model.get_submodule(self.path("output")))
        what = f"{type(self.module).__name__}: cannot be mixed by its row of hf.LAYOUTS,"
        for kind in ("queries", "output"):
            if widths[kind] != inner:
                heads = f"{self.heads} heads of {self.head_dim} have {inner}"
                raise ValueError(
                    f"{what} {self.path(kind)} has {widths[kind]} features, but {heads}"
                )
        keys, values = widths["keys"], widths["values"]
        if keys != values or keys < 1 or keys % self.head_dim or inner % keys:
            raise ValueError(
                f"{what} keys and values have {keys} and {values} features for heads of "
                f"{self.head_dim}"
            )


def out_features(projection: Any) -> int:
    """Return how many outputs a projection has; GPT-2's Conv1D has another name for it."""
    return _size(projection, "out_features", "nf")


def in_features(projection: Any) -> int:
    return _size(projection, "in_features", "nx")


def _size(projection: Any, *names: str) -> int:
    for name in names:
        if hasattr(projection, name):
            return getattr(projection, name)
    raise ValueError(
        f"{type(projection).__name__}: is no projection; a row of hf.LAYOUTS must name an nn.Linear"
    )


def sites_of(model: nn.Module) -> list[Site]:
    """Return the attentions of a model in its order; raise ValueError if there are none, or one has
    other names.
    """
    named = (
        (name, module) for name, module in model.named_modules() if type(module).__name__ in LAYOUTS
    )
    # A wrapper of an older version may have the name of a row, but none of its projections.
    found = [
        Site(*each)
        for each in named
        if any(hasattr(each[1], name) for name in Site(*each).layout.queries)
    ]
    if not found:
        raise ValueError(
            f"{type(model).__name__}: has none of the attentions of hf.LAYOUTS: "
            f"{', '.join(LAYOUTS)}; "
            "docs/huggingface.md says how to add a row"
        )
    for site in found:
        site.check_names(model)
    return found


def left_out(model: nn.Module, sites: Sequence[Site]) -> dict[str, list[str]]:
    """Return the names of attentions that have no row, by their class: other towers may have other
    attentions.
    """
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        # BertAttention is around a BertSelfAttention, which has a row.
        related = any(
            f"{site.name}.".startswith(f"{name}.") or name.startswith(f"{site.name}.")
            for site in sites
        )
        has_projections = any(
            getattr(child, "weight", torch.empty(0)).dim() == 2 for child in module.children()
        )
        if kind.endswith("Attention") and has_projections and not related:
            found.setdefault(kind, []).append(name)
    return found
