"""The table of other people's models is what its script finds, and nothing in it is wrong."""

import json

import pytest
import torch
from development import libraries_checks, libraries_models, libraries_results
from development.libraries_results import CHECKS, HOLDS, LACKS, WRONG, outcome

from tests import reach

# They take seconds.
COMPILERS = ("compiled", "exported")
# nanoGPT's attention has none of them.
LACKING = ("masks", "dropout", "cached")


def committed():
    return json.loads(libraries_results.RESULTS.read_text())


def outcomes(found):
    """Return what holds for a model, without numbers, which differ among machines."""
    return {check: outcome(check, found[check]) for check in CHECKS if check in found}


@pytest.mark.parametrize(
    "checks",
    [
        pytest.param([name for name in CHECKS if name not in COMPILERS], id="eager"),
        pytest.param(COMPILERS, id="compilers", marks=pytest.mark.slow),
    ],
)
def test_everything_holds_for_nanogpt(checks):
    (case,) = libraries_models.LIBRARIES["nanogpt"]()
    expected = {name: LACKS if name in LACKING else HOLDS for name in checks}
    assert outcomes(libraries_checks.row(case, checks)) == expected


@pytest.mark.slow
def test_the_committed_results_are_those_of_the_script():
    if committed()["torch"] != torch.__version__.partition("+")[0]:
        pytest.skip("the results are of another version of torch")
    reach.installed()
    program = "scripts/development/libraries_table.py"
    found = json.loads(reach.run(program, environment={"PYTHONPATH": str(reach.MODELS)}))
    names = ("library", "version", "model", "attentions")
    for ours, theirs in zip(committed()["models"], found["models"], strict=True):
        assert [ours[name] for name in names] == [theirs[name] for name in names]
        assert outcomes(ours) == outcomes(theirs), ours["model"]


def test_no_model_is_wrong():
    for found in committed()["models"]:
        assert WRONG not in outcomes(found).values(), found["model"]
