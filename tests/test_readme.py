"""The README agrees with the code; test_documents.py checks its commands, links and programs."""

import importlib.util
import re
from pathlib import Path

import pytest
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import ARCH_MODEL_REGISTRY

from mixhead_plugin.errors import option_name
from mixhead_plugin.options import FAMILIES, OPTION_NAMES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "scripts" / "readme_tables.py")
readme_tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(readme_tables)


@pytest.mark.parametrize("name", readme_tables.TABLES)
def test_the_tables_are_those_of_the_code(name):
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end -->", README, re.S)
    assert found and found[1] == readme_tables.TABLES[name](), "run scripts/readme_tables.py"


def test_the_files_of_the_tables_exist():
    assert all((ROOT / name).exists() for name in readme_tables.COLUMNS.values())


def test_every_flag_is_in_the_list():
    assert all(f"| `{option_name(name)}` |" in README for name in OPTION_NAMES)


def test_every_criterion_is_in_it():
    names = [name for name in CRITERION_REGISTRY if name.startswith("orthogonal_")]
    assert len(names) == 7
    assert all(f"`{name}`" in README for name in names)


def test_every_architecture_that_it_names_is_registered():
    named = set(re.findall(rf"\b((?:{'|'.join(FAMILIES)})_(?:transformer|roberta|lm)\w*)\b", README))
    assert len(named) >= 4
    assert named <= set(ARCH_MODEL_REGISTRY)
