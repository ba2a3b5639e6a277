"""The example of docs/python.md prints what the page says, and nanoGPT's own code needs no more."""

import contextlib
import io
import re

import pytest
import torch
from torch import nn

from mixhead_plugin.nn import mix, mixing_parameters
from tests.test_documents import FENCED, ROOT


@pytest.fixture(scope="module")
def page():
    """Return the program of the page, and what the page says that it prints."""
    found = FENCED.findall((ROOT / "docs" / "python.md").read_text())
    (place,) = [
        number
        for number, (kind, block) in enumerate(found)
        if kind == "python" and "class CausalSelfAttention" in block
    ]
    kind, output = found[place + 1]
    assert kind == "text"
    return found[place][1], output


def test_the_example_prints_what_the_page_says(page):
    program, output = page
    names = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, names)
    # The error of rounding differs among machines.
    rounding = re.compile(r"\de-0\d")
    assert rounding.sub("", printed.getvalue()) == rounding.sub("", output)


def test_the_init_of_nanogpt_leaves_the_mixing_at_the_identity(page):
    """nanoGPT draws every nn.Linear and nn.Embedding anew."""
    names = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(page[0], names)
    model = mix(names["Model"](), "position-wise", example=(torch.zeros(2, 8, dtype=torch.long),))
    before = {name: p.clone() for name, p in mixing_parameters(model).items()}

    def draw(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    model.apply(draw)
    torch.testing.assert_close(dict(mixing_parameters(model)), before)
