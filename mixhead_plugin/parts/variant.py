"""The record `Variant`: all that can be asked of one attention.

Its fields are the only table of what may be asked of one attention. fairseq's flags, their help and
their choices, the keywords of `nn` and `hf`, and the checks of all three doors are read from it.
docs/extending.md says how a field is added. fairseq has flags of a whole model beside them, such as
--attention-scope: `AttentionOptions` in `fairseq/options.py`.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any, NamedTuple

from mixhead_plugin.ops import IMPLEMENTATIONS, NORMALIZERS
from mixhead_plugin.ops.normalizers import sink_problem
from mixhead_plugin.parts.head_mixing import LETTERS, MIXING_STARTS
from mixhead_plugin.parts.kinds import AttentionSizes, PartError, PartKind
from mixhead_plugin.parts.tables import PARTS


class Option(NamedTuple):
    """Describe one field of `Variant`."""

    default: Any
    help: str
    # The name of its flag in fairseq, without dashes. Empty if it is the field's.
    flag: str = ""
    # The values of a field that is a text. The table itself, so that it may still grow.
    choices: Collection[str] = ()
    # The smallest value of a field that is a whole number.
    least: int = 0
    # Whether a module must have the value that a saved one was trained with, so that the metadata
    # of its state dict have it.
    in_record: bool = True
    # Whether it is for attentions alone that project their inputs themselves. The attention of
    # another model, which `mix` takes as it is, has its own.
    of_projections: bool = False
    # Whether it does not fit an attention to other keys than its own.
    of_self_attention: bool = False


def _field(default: Any, text: str, **rest: Any) -> Any:
    """Return a field of `Variant`; `text` is the help of its flag in fairseq."""
    return field(default=default, metadata={"option": Option(default, text, **rest)})


@dataclass(frozen=True, kw_only=True)
class Variant:
    """All that can be asked of one attention; the defaults are fairseq's own softmax attention.

    It is made from flags, from keywords, or from a saved config. What cannot work is refused where
    it is made, and nothing changes it later.

    Raises:
        PartError: a value that no table has, or fields that do not go together. It is a ValueError.
    """

    normalizer: str = _field(
        "softmax",
        "how a row of scores becomes weights",
        flag="attention_normalizer",
        choices=NORMALIZERS,
    )
    head_mixing: str = _field(
        "none",
        "where the matrix that mixes the heads comes from",
        choices=PARTS["head_mixing"],
    )
    score_mixing: str = _field(
        "none",
        "where the matrix comes from that mixes the heads' scores",
        choices=PARTS["score_mixing"],
    )
    feature_mixing: str = _field(
        "none",
        "how heads share queries, keys and values, or outputs",
        choices=PARTS["feature_mixing"],
    )
    mixed_features: str = _field(
        "qkv",
        "what --feature-mixing heads or shared mixes: q, k, v",
        choices=("qkv", "qk", "qv", "kv", "q", "k", "v"),
    )
    attention_sink: str = _field(
        "none",
        "the score of one more key in each row, which has no value",
        choices=PARTS["attention_sink"],
    )
    attention_gate: str = _field(
        "none",
        "what scales the outputs of heads before out_proj",
        choices=PARTS["attention_gate"],
    )
    head_dim: int | None = _field(
        None,
        "size of one head, independent of embedding and number of heads",
        least=1,
        of_projections=True,
    )
    value_head_dim: int | None = _field(
        None,
        "size of the values of one source head; a mixed head has as much, with --head-mixing "
        "differential twice it",
        least=1,
        of_projections=True,
    )
    impl: str = _field(
        "auto",
        "which code computes the attention",
        flag="attention_impl",
        choices=("auto", *IMPLEMENTATIONS),
        in_record=False,  # it belongs to the machine
    )
    mixing_start: str = _field(
        "identity",
        "what M starts as in a new model, with --head-mixing position-independent, or its part b "
        "with position-wise: identity; random, normal with deviation 1/sqrt(H); uniform, 1/H "
        "everywhere. A checkpoint without M still becomes the identity",
        choices=MIXING_STARTS,
        in_record=False,  # what M started as is of no use where M is loaded
    )
    mixing_rank: int = _field(
        2,
        "R, the columns of U and V of --head-mixing low-rank",
        least=1,
    )
    relative_position: str = _field(
        "none",
        "how self-attention sees distances; fairseq's positions are added too, "
        "except with --no-token-positional-embeddings",
        choices=PARTS["relative_position"],
        of_projections=True,
        of_self_attention=True,
    )
    relative_gain: int = _field(
        0,
        "learn factors on the weights of self-attention, one for each head and distance up to this "
        "number; 0 is off",
        of_projections=True,
        of_self_attention=True,
    )

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> "Variant":
        """Return the variant of Python keywords or of a saved config.

        Raise ValueError for an unknown keyword, in one line with those that exist.
        """
        check_keywords(keywords)
        return cls(**keywords)

    @classmethod
    def of_flags(cls, flags: Any) -> "Variant":
        """Return the variant of complete flags, an object with one attribute for each flag."""
        return cls(**{name: getattr(flags, option.flag) for name, option in OPTIONS.items()})

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            value = _checked(name, option, getattr(self, name))
            object.__setattr__(self, name, value)  # the record is frozen only once it is made
        if self.attention_sink != "none":
            problem = sink_problem(self.normalizer)
            if problem:
                raise PartError.of("attention_sink", self.attention_sink, problem)
        self._check_effects()

    def _check_effects(self) -> None:
        """Refuse a field that only some parts read, where none of them is there."""
        read: set[str] = set()
        for row in self.part_kinds().values():
            read.update(row.options)

        for part, table in PARTS.items():
            for name, readers in _readers(table).items():
                value = getattr(self, name)
                default = OPTIONS[name].default
                if name in read or value == default:
                    continue
                words = part.replace("_", " ")
                raise PartError.of(
                    name,
                    value,
                    f"has no effect with {words} {getattr(self, part)}; must be {default}, or the "
                    f"{words} {' or '.join(readers)}",
                )

    def part_kinds(self) -> dict[str, PartKind]:
        """Return the row of each table in PARTS that is asked for, by the name of its field."""
        return {name: table[getattr(self, name)] for name, table in PARTS.items()}

    def value_size(self, head_dim: int) -> int:
        """Return the size of the values of a source head.

        Args:
            head_dim: the size of its queries
        """
        return head_dim if self.value_head_dim is None else self.value_head_dim

    def sizes(
        self,
        num_heads: int,
        embed_dim: int,
        *,
        causal: bool = False,
        mixed_heads: int | None = None,
        key_heads: int = 0,
    ) -> AttentionSizes:
        """Return the sizes of an attention of this variant.

        Numbers of NumPy become Python's. A module takes its own from here, because some go into the
        metadata of its state dict, where `torch.load` refuses those of NumPy.

        Args:
            num_heads: H, the source heads
            embed_dim: C, the size of the attention's query input
            causal: whether no query sees later keys
            mixed_heads: H' of a pruned attention; None for the usual number, which is H, or H / 2
                with differential mixing
            key_heads: how many heads of keys and values the heads of queries share; 0 where each
                has its own

        Raises:
            PartError: a number that is too small, or that does not fit another one or the mixing
        """
        num_heads = whole_number("num_heads", num_heads, least=1)
        embed_dim = whole_number("embed_dim", embed_dim, least=1)
        key_heads = whole_number("key_heads", key_heads, least=0)
        if key_heads > 0 and num_heads % key_heads != 0:
            raise PartError.of("key_heads", key_heads, f"must divide num_heads {num_heads}")

        head_dim = self.head_dim
        if head_dim is None:
            if embed_dim % num_heads != 0:
                problem = f"must divide embed_dim {embed_dim}, or head_dim be given"
                raise PartError.of("num_heads", num_heads, problem)
            head_dim = embed_dim // num_heads

        mixing = PARTS["head_mixing"][self.head_mixing]
        if num_heads % mixing.heads_per_mixed != 0:
            factor = mixing.heads_per_mixed
            problem = f"must be a multiple of {factor} with {self.head_mixing} mixing"
            raise PartError.of("num_heads", num_heads, problem)

        usual = num_heads // mixing.heads_per_mixed
        if mixed_heads is None:
            mixed_heads = usual
        mixed_heads = whole_number("num_mixed_heads", mixed_heads, least=1)
        # Only a mixing whose matrix may lose columns has another number of mixed heads.
        if mixed_heads != usual and mixing.build is None:
            problem = f"must be {usual} without head mixing"
            raise PartError.of("num_mixed_heads", mixed_heads, problem)
        if mixed_heads != usual and mixing.why_not_cut:
            problem = f"must be {usual} with {self.head_mixing} mixing"
            raise PartError.of("num_mixed_heads", mixed_heads, problem)

        return AttentionSizes(
            num_heads=num_heads,
            head_dim=head_dim,
            mixed_heads=mixed_heads,
            value_dim=self.value_size(head_dim) * mixing.heads_per_mixed,
            embed_dim=embed_dim,
            causal=bool(causal),
            key_heads=key_heads,
        )


def _readers(table: Mapping[str, PartKind]) -> dict[str, list[str]]:
    """Return for each field that parts of a table are built with the values that have such parts.

    For the table of head mixings this is {"mixing_start": ["position-independent",
    "position-wise"], "mixing_rank": ["low-rank"]}.
    """
    readers: dict[str, list[str]] = {}
    for value, row in table.items():
        for name in row.options:
            readers.setdefault(name, []).append(value)
    return readers


def _options() -> dict[str, Option]:
    options = {}
    for each in fields(Variant):
        option = each.metadata["option"]
        options[each.name] = option._replace(flag=option.flag or each.name)
    return options


# What `_field` was told, by the names of the fields.
OPTIONS = _options()


def _checked(name: str, option: Option, value: Any) -> Any:
    """Return a value as the record keeps it; refuse one that its table does not have.

    Numbers and texts of NumPy become Python's: a config.json takes no others, and a checkpoint with
    them would not load.
    """
    if option.choices:
        # A tuple, because a YAML file may hold a list here, which no dictionary looks up.
        choices = tuple(option.choices)
        if value not in choices:
            problem = f"must be one of {', '.join(choices)}"
            if str(value).upper() in LETTERS and set(LETTERS.values()) <= set(choices):
                names = [f"Mixhead {letter} is {mixing}" for letter, mixing in LETTERS.items()]
                problem = f"{problem}; {', '.join(names)}"
            # In quotes, because it may be empty or end with a space.
            raise PartError.of(name, value, problem, shown=repr(value))
        return choices[choices.index(value)]
    if value is None and option.default is None:
        return None
    return whole_number(name, value, option.least)


def whole_number(name: str, value: Any, least: int) -> int:
    """Return a number as an int of Python; refuse another value, or one that is too small."""
    # YAML's `true` is a whole number to Python.
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or value < least:
        # In quotes, a text does not look like the number that it spells.
        shown = repr(value) if isinstance(value, str) else None
        raise PartError.of(name, value, f"must be a whole number of at least {least}", shown)
    return int(value)


def check_keywords(asked: Iterable[str], others: Iterable[str] = ()) -> None:
    """Raise ValueError for a keyword that nothing takes, with those that exist.

    Args:
        asked: names of keywords
        others: those that a function takes beside the fields of a variant
    """
    known = [*OPTIONS, *others]
    # Whoever knows the flags of fairseq may write `attention_impl`, which is `impl` in Python.
    meant = {option.flag: name for name, option in OPTIONS.items()}
    meant |= {name: name for name in known}
    for name in asked:
        if name in known:
            continue
        near = difflib.get_close_matches(name, meant, 1, cutoff=0.75)
        remedy = f"did you mean {meant[near[0]]}? It " if near else ""
        raise ValueError(f"{name}: is no keyword; {remedy}must be one of {', '.join(known)}")


def check_any_given(asked: Mapping[str, object]) -> None:
    """Raise ValueError if no keyword of a variant is given: plain attention has to be asked for."""
    if asked:
        return
    others = [name for name in OPTIONS if name not in ("head_mixing", "impl")]
    raise ValueError(
        "head_mixing: must be given, as 'position-wise' or 'position-independent', or another of "
        f"{', '.join(others)}"
    )
