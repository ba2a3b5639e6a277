"""The table of types of `transformers` is what its script finds, and no type in it is wrong."""

import json

import pytest

pytest.importorskip("transformers")
from development import transformers_results, transformers_table
from development.transformers_results import (
    A_PART,
    A_PART_BUT_PRUNE,
    ALL,
    BUT_PRUNE,
    CHECKS,
    WRONG,
    group_of,
)

# Attentions of different names, one packed projection, sinks, two towers, masks of eager alone.
FEW = ["starcoder2", "phi3", "gpt_oss", "clip", "nllb-moe"]


@pytest.mark.parametrize("model_type", FEW)
def test_everything_holds_for_a_type(model_type):
    found = transformers_table.try_type(model_type)
    assert {check: found[check] for check in CHECKS if found[check] not in (True, None)} == {}
    assert found["left out"] == []


def test_the_tower_of_an_attention_is_no_other_one_whose_name_begins_alike():
    towers = ["", "vision", "vision_2"]
    assert transformers_table.tower_of("vision.layer", towers) == "vision"
    assert transformers_table.tower_of("vision_2.layer", towers) == "vision_2"
    assert transformers_table.tower_of("vision_2.layer", ["", "vision"]) == ""


@pytest.mark.slow
def test_the_committed_results_are_those_of_the_script():
    committed = json.loads(transformers_results.RESULTS.read_text())
    if committed["transformers"] != transformers_table.transformers.__version__:
        pytest.skip("the results are of another version of transformers")
    assert transformers_table.types() == [found["type"] for found in committed["types"]]
    for found in committed["types"]:
        assert group_of(transformers_table.try_type(found["type"])) == group_of(found)


def test_no_type_is_wrong():
    committed = json.loads(transformers_results.RESULTS.read_text())
    assert [found["type"] for found in committed["types"] if group_of(found) == WRONG] == []


NOT_CALLED = "2 of 4 attentions are not called"
GROUPS = {
    "all": ({}, ALL),
    "not called": ({"trained": NOT_CALLED}, A_PART),
    "refused": ({"pruned": "refuses: must have all heads"}, BUT_PRUNE),
    "both": ({"trained": NOT_CALLED, "pruned": "refuses: must have all heads"}, A_PART_BUT_PRUNE),
    "not called, and loaded wrongly": ({"trained": NOT_CALLED, "loaded": False}, WRONG),
    "not called, and cut wrongly": ({"trained": NOT_CALLED, "pruned": "0.3"}, WRONG),
    "not trained": ({"trained": False}, WRONG),
    "a refusal of what must work": ({"ablated": "refuses: must have all heads"}, WRONG),
}


@pytest.mark.parametrize("case", GROUPS)
def test_a_type_is_wrong_if_any_check_is_not_explained(case):
    found, group = GROUPS[case]
    result = {**dict.fromkeys(CHECKS, True), "cached": None, "left out": [], **found}
    assert group_of(result) == group
