"""README.md and docs/ agree with the code; test_documents.py checks their commands, links and programs."""

import re

import bert
import readme_tables
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import ARCH_MODEL_REGISTRY

from mixhead_plugin.options import FAMILIES

bert.register()  # registers the plugin, too

TEXT = "\n".join(path.read_text() for path in readme_tables.DOCUMENTS)


def test_the_tables_are_those_of_the_code():
    for document in readme_tables.DOCUMENTS:
        text = document.read_text()
        assert readme_tables.with_tables(text) == text, f"{document.name}: run scripts/readme_tables.py"


def test_every_table_stands_somewhere():
    assert set(re.findall(r"<!-- (.+) -->", TEXT)) == {*readme_tables.TABLES, "end"}


def test_every_criterion_is_named():
    names = [name for name in CRITERION_REGISTRY if name.startswith("orthogonal_")]
    assert len(names) == 7
    assert all(f"`{name}`" in TEXT for name in names)


def test_every_architecture_that_is_named_is_registered():
    pattern = rf"(?<![\w/])((?:{'|'.join(FAMILIES)})_(?:transformer|roberta|synthesizer)\w*)\b(?!\*)"
    named = set(re.findall(pattern, TEXT))
    assert len(named) >= 4
    assert named <= set(ARCH_MODEL_REGISTRY)
