"""The flags of a model, made flat and filled in."""

import copy
from argparse import Namespace

import pytest
from omegaconf import OmegaConf

from mixhead_plugin.fairseq.config import fill_in, flat_copy
from mixhead_plugin.fairseq.models.transformer_lm import MixheadLanguageModelConfig

GIVEN = {
    "a Namespace": Namespace(arch="transformer", dropout=0.1),
    # Some of its defaults are references such as ${task.tokens_per_sample}, which become None.
    "a dataclass": MixheadLanguageModelConfig(dropout=0.1),
    "a config": OmegaConf.create({"_name": "transformer", "dropout": 0.1}),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_what_is_filled_in_is_a_copy(kind):
    given = GIVEN[kind]
    before = copy.deepcopy(given)
    flags = flat_copy(given)
    fill_in(flags, "mixhead")
    assert flags.dropout == 0.1 and flags.attention_scope == "all"
    assert given == before
