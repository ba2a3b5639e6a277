"""Test the record of all that can be asked of one attention."""

import dataclasses

import numpy as np
import pytest

from mixhead_plugin.fairseq.options import FAMILIES, FLAGS, AttentionOptions
from mixhead_plugin.ops import NORMALIZERS
from mixhead_plugin.parts import OPTIONS, PartError, Variant

MIXINGS = "none, position-independent, position-wise, low-rank, differential, random, average"

KEYWORDS = f"must be one of {', '.join(OPTIONS)}"
LETTERS = "Mixhead A is position-independent, Mixhead B is position-wise"

# The message, and the keywords that it refuses.
REFUSED = {
    f"head_mixing 'best': must be one of {MIXINGS}": {"head_mixing": "best"},
    f"head_mixing '': must be one of {MIXINGS}": {"head_mixing": ""},
    f"head_mixing ['none']: must be one of {MIXINGS}": {"head_mixing": ["none"]},
    "impl 'cuda': must be one of auto, reference, blockwise, triton": {"impl": "cuda"},
    "head_dim 0: must be a whole number of at least 1": {"head_dim": 0},
    "value_head_dim 0: must be a whole number of at least 1": {"value_head_dim": 0},
    "relative_gain 2.5: must be a whole number of at least 0": {"relative_gain": 2.5},
    "head_dim 4.0: must be a whole number of at least 1": {"head_dim": np.float64(4)},
    "head_dim True: must be a whole number of at least 1": {"head_dim": True},
    "relative_gain None: must be a whole number of at least 0": {"relative_gain": None},
    "attention_sink zero: needs one of the normalizers softmax, sigsoftmax, l2, entmax15, "
    "not relu2": {"attention_sink": "zero", "normalizer": "relu2"},
    "mixed_features q: has no effect with feature mixing output; must be qkv, or the feature "
    "mixing heads or shared": {"mixed_features": "q", "feature_mixing": "output"},
    "mixing_start random: has no effect with head mixing none; must be identity, or the head "
    "mixing position-independent or position-wise": {"mixing_start": "random"},
    "mixing_rank 0: must be a whole number of at least 1": {"mixing_rank": 0},
    "mixing_rank 3: has no effect with head mixing position-wise; must be 2, or the head mixing "
    "low-rank": {"mixing_rank": 3, "head_mixing": "position-wise"},
    f"heads: is no keyword; {KEYWORDS}": {"heads": 8},
    # a keyword that is misspelt, and one that is called as the flag of fairseq is
    f"head_mixin: is no keyword; did you mean head_mixing? It {KEYWORDS}": {
        "head_mixin": "average"
    },
    f"attention_normalizer: is no keyword; did you mean normalizer? It {KEYWORDS}": {
        "attention_normalizer": "l2"
    },
    # the letters of the paper
    f"head_mixing 'B': must be one of {MIXINGS}; {LETTERS}": {"head_mixing": "B"},
    f"score_mixing 'a': must be one of none, position-independent, position-wise; {LETTERS}": {
        "score_mixing": "a"
    },
    "mixing_rank '2': must be a whole number of at least 1": {
        "mixing_rank": "2",
        "head_mixing": "low-rank",
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_asked_for_is_refused_where_the_record_is_made(message):
    with pytest.raises(ValueError) as error:
        Variant.of(REFUSED[message])
    assert str(error.value) == message


def test_numbers_and_texts_of_numpy_become_pythons():
    variant = Variant(
        head_mixing=np.str_("low-rank"), head_dim=np.int64(4), mixing_rank=np.uint8(3)
    )
    assert variant == Variant(head_mixing="low-rank", head_dim=4, mixing_rank=3)
    kinds = {name: type(value) for name, value in vars(variant).items()}
    assert kinds.pop("value_head_dim") is type(None)
    assert set(kinds.values()) == {int, str}


WRONG_SIZES = {
    "num_heads 0: must be a whole number of at least 1": ({}, (0, 16), {}),
    "num_heads 4.0: must be a whole number of at least 1": ({}, (16 / 4, 16), {}),
    "embed_dim 0: must be a whole number of at least 1": ({}, (4, 0), {}),
    "embed_dim '16': must be a whole number of at least 1": ({}, (4, "16"), {}),
    "num_heads 3: must divide embed_dim 16, or head_dim be given": ({}, (3, 16), {}),
    "key_heads 3: must divide num_heads 4": ({}, (4, 16), {"key_heads": 3}),
    "num_heads 5: must be a multiple of 2 with differential mixing": (
        {"head_mixing": "differential", "head_dim": 3},
        (5, 16),
        {},
    ),
    "num_mixed_heads 3: must be 4 without head mixing": ({}, (4, 16), {"mixed_heads": 3}),
    "num_mixed_heads 3: must be 4 with low-rank mixing": (
        {"head_mixing": "low-rank"},
        (4, 16),
        {"mixed_heads": 3},
    ),
}


@pytest.mark.parametrize("message", WRONG_SIZES)
def test_sizes_that_do_not_fit_are_refused(message):
    fields, numbers, more = WRONG_SIZES[message]
    with pytest.raises(PartError) as error:
        Variant(**fields).sizes(*numbers, **more)
    assert str(error.value) == message


def test_sizes_are_derived_from_what_is_asked_for():
    usual = Variant().sizes(4, 16)
    assert (usual.head_dim, usual.mixed_heads, usual.value_dim) == (4, 4, 4)
    pairs = Variant(head_mixing="differential", head_dim=5).sizes(4, 16)
    assert (pairs.head_dim, pairs.mixed_heads, pairs.value_dim) == (5, 2, 10)
    values = Variant(head_mixing="differential", value_head_dim=7).sizes(4, 16)
    assert (values.head_dim, values.mixed_heads, values.value_dim) == (4, 2, 14)
    pruned = Variant(head_mixing="position-wise").sizes(4, 16, mixed_heads=3)
    assert (pruned.num_heads, pruned.mixed_heads, pruned.value_dim) == (4, 3, 4)


def test_sizes_of_numpy_become_pythons():
    sizes = Variant(head_mixing="position-wise", head_dim=np.int64(4)).sizes(
        np.int64(4),
        np.int32(16),
        causal=np.bool_(True),
        mixed_heads=np.int64(3),
        key_heads=np.int8(2),
    )
    kinds = {name: type(value) for name, value in sizes._asdict().items()}
    assert kinds.pop("causal") is bool
    assert set(kinds.values()) == {int}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_field_is_a_flag_with_the_same_default(name):
    option = OPTIONS[name]
    assert option.flag in FLAGS
    assert getattr(AttentionOptions(), option.flag) == option.default
    assert option.help in AttentionOptions()._get_help(option.flag)


@pytest.mark.parametrize("family", FAMILIES)
def test_flags_and_keywords_make_the_same_record(family):
    preset = {name: value for name, value in FAMILIES[family].items() if name != "head_dim"}
    fields = {option.flag: name for name, option in OPTIONS.items()}
    keywords = {fields[flag]: value for flag, value in preset.items() if flag in fields}
    assert Variant.of_flags(AttentionOptions(**preset)) == Variant.of(keywords)


def test_a_row_that_is_added_to_a_table_can_be_asked_for(monkeypatch):
    monkeypatch.setitem(NORMALIZERS, "mine", NORMALIZERS["softmax"])
    variant = Variant(normalizer="mine")
    with pytest.raises(dataclasses.FrozenInstanceError):
        variant.normalizer = "softmax"
