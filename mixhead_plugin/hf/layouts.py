"""How attentions of `transformers` name their projections, numbers and sizes: rows of names."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from mixhead_plugin.errors import wrong_argument
from mixhead_plugin.parts import AttentionSizes

# of the implementation, of the options in a config, and of what `mix` notes in an attention
MIXHEAD = "mixhead"
# The fields of Layout whose features an attention function gets, in its order.
ROLES = ("queries", "keys", "values")


class Layout(NamedTuple):
    """The attributes of an attention of `transformers`; of several names, the first that it has.

    A projection that gives several of queries, keys and values must give them in this order, each
    for all heads.

    Attributes:
        queries: the projection to the queries of all heads, before any rotation
        heads: the number of heads, of the attention or of its config
        head_dim: the size of a head, of the attention or of its config
        keys: the projection to the keys of all heads
        values: the projection to the values of all heads
        output: the projection that reads the outputs of all heads; ".." is the module around
    """

    queries: str | tuple[str, ...]
    heads: str | tuple[str, ...]
    head_dim: str | tuple[str, ...]
    keys: str | tuple[str, ...] = "k_proj"
    values: str | tuple[str, ...] = "v_proj"
    output: str | tuple[str, ...] = ("o_proj", "out_proj")


# The row of all attentions that go through the AttentionInterface.
# Projections of queries alone come before packed ones: GPT-2 has both where it looks at an encoder.
_PACKED = ("qkv_proj", "qkv", "c_attn", "Wqkv", "query_key_value")
USUAL = Layout(
    queries=("q_proj", "query", "q", "q_lin", "linear_q", "Wq", "q_attn", *_PACKED),
    heads=("num_heads", "num_attention_heads", "n_heads"),
    head_dim=("head_dim", "attention_head_size", "head_size", "key_value_proj_dim"),
    keys=("k_proj", "key", "k", "k_lin", "linear_k", "Wk", *_PACKED),
    values=("v_proj", "value", "v", "v_lin", "linear_v", "Wv", *_PACKED),
    output=(
        "o_proj",
        "out_proj",
        "o",
        "out_lin",
        "linear_out",
        "c_proj",
        "dense",
        "Wo",
        "proj",
        "projection",
        "projection_layer",
        "output",
        "..output.dense",
    ),
)

# Rows for classes that differ from USUAL, by the name of the class; None leaves them as they are.
LAYOUTS: dict[str, Layout | None] = {}


def check_rows() -> None:
    """Raise ValueError if an entry of LAYOUTS is not a name with a row of names."""
    for name, row in LAYOUTS.items():
        if not isinstance(name, str):
            raise ValueError(f"hf.LAYOUTS: has a row for {name!r}, must be the name of a class")
        where = f"hf.LAYOUTS[{name!r}]"
        if row is None:
            continue
        if not isinstance(row, Layout):
            wanted = "an hf.Layout, or None to leave the class as it is"
            raise ValueError(wrong_argument(where, row, wanted))
        for field, names in row._asdict().items():
            listed = several(names)
            is_list = isinstance(listed, Sequence) and len(listed) > 0
            if not is_list or not all(isinstance(each, str) for each in listed):
                raise ValueError(
                    f"{where}: has {field} {names!r}, must be the name of an attribute, or several "
                    "in a tuple"
                )


class FoundAttention(NamedTuple):
    """One attention of a model, as `find_attentions` found it.

    Attributes:
        name: the name of its module in the model
        module: a module of transformers
        layout: its row
        paths: the names in the model of its projections, by field of Layout
    """

    name: str
    module: Any
    layout: Layout
    paths: dict[str, str]

    @property
    def class_name(self) -> str:
        """The name of its class."""
        return type(self.module).__name__

    @property
    def heads(self) -> int:
        """The number of heads before mixing."""
        return self._number("heads")

    @property
    def head_dim(self) -> int:
        return self._number("head_dim")

    def _number(self, field: str) -> int:
        number = _number_of(self.module, getattr(self.layout, field))
        assert number is not None  # `find_attentions` returns no attention that lacks it
        return number

    def sizes(self, model: nn.Module) -> AttentionSizes:
        """Return its sizes without mixing, before any head is cut off."""
        return AttentionSizes(
            num_heads=self.heads,
            head_dim=self.head_dim,
            mixed_heads=self.heads,
            value_dim=self.head_dim,
            embed_dim=in_features(model.get_submodule(self.paths["queries"])),
            key_heads=self.widths(model)["keys"] // self.head_dim,
        )

    def packed(self) -> dict[str, list[str]]:
        """Return which of queries, keys and values each projection gives, by its name."""
        roles_of: dict[str, list[str]] = {}
        for role in ROLES:
            roles_of.setdefault(self.paths[role], []).append(role)
        return roles_of

    def widths(self, model: nn.Module) -> dict[str, int]:
        """Return how many features queries, keys and values have.

        They are known as far as the sizes of the projections tell.
        """
        widths = {}
        for path, roles in self.packed().items():
            features = out_features(model.get_submodule(path))
            sharing = roles
            if len(roles) > 1 and roles[0] == "queries":
                # A packed projection: its queries have the features of all heads. Keys and values
                # may have fewer heads, but both as many, so they share the rest.
                widths["queries"] = self.heads * self.head_dim
                features -= widths["queries"]
                sharing = roles[1:]
            for role in sharing:
                widths[role] = features // len(sharing)
        return widths

    def lacks(self, model: nn.Module) -> str:
        """Return what the row names and the attention does not have, '' for nothing."""
        for field in (*ROLES, "output"):
            if not is_projection(model, self.paths[field]):
                names = several(getattr(self.layout, field))
                return f"no projection of {field} named {' or '.join(names)}"
        for field in ("heads", "head_dim"):
            names = several(getattr(self.layout, field))
            if _number_of(self.module, names) is None:
                return f"no number {field} named {' or '.join(names)}"
        return ""

    def check_sizes(self, model: nn.Module) -> None:
        """Raise ValueError unless the projections have the sizes of heads times head size.

        Keys may have fewer heads.
        """
        widths = self.widths(model)
        widths["output"] = in_features(model.get_submodule(self.paths["output"]))
        heads = self.heads
        size = self.head_dim
        inner = heads * size
        for role in ("queries", "output"):
            if widths[role] != inner:
                raise ValueError(
                    f"{self.class_name}: cannot be mixed, {self.paths[role]} has {widths[role]} "
                    f"features, but {heads} heads of {size} have {inner}"
                )

        keys = widths["keys"]
        values = widths["values"]
        if keys != values:
            raise ValueError(
                f"{self.class_name}: cannot be mixed, keys have {keys} features, but values "
                f"{values}"
            )
        if keys < 1 or keys % size != 0:
            raise ValueError(
                f"{self.class_name}: cannot be mixed, keys have {keys} features, must be heads of "
                f"{size}"
            )
        if inner % keys != 0:
            raise ValueError(
                f"{self.class_name}: cannot be mixed, {heads} heads of queries do not share "
                f"{keys // size} heads of keys evenly"
            )


def several(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def slices(roles: Sequence[str], widths: Mapping[str, int]) -> dict[str, slice]:
    """Return where queries, keys and values are among the outputs of one projection.

        c_attn of GPT-2    | queries      | keys         | values       |
                           0              H D            2 H D          3 H D

    Args:
        roles: what it gives, in this order, as `FoundAttention.packed` returns it
        widths: how many features queries, keys and values have
    """
    where = {}
    start = 0
    for role in roles:
        where[role] = slice(start, start + widths[role])
        start += widths[role]
    return where


def _number_of(module: nn.Module, names: str | tuple[str, ...]) -> int | None:
    """Return the first number of some names that an attention has, or else its config; or None."""
    for owner in (module, getattr(module, "config", None)):
        for name in several(names):
            number = getattr(owner, name, None)
            if isinstance(number, int):
                return number
    return None


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


def is_projection(model: nn.Module, path: str) -> bool:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return False
    return hasattr(module, "out_features") or hasattr(module, "nf")
