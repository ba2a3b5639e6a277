"""README.md says what is true: its programs run and print what it shows, its commands are commands.

test_documents.py parses the commands of fairseq, of `mixhead` and of the scripts, and follows the
links.
"""

import collections
import contextlib
import io
import json
import os
import re
import shlex
import tomllib

import bert
import pytest
import recipes
from development import readme_tables, transformers_results
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import ARCH_MODEL_REGISTRY

from mixhead_plugin.fairseq.options import FAMILIES
from mixhead_plugin.nn import MixedAttention
from tests.test_documents import ROOT

bert.register()  # registers the plugin, too

README = (ROOT / "README.md").read_text()
TEXT = "\n".join(path.read_text() for path in readme_tables.DOCUMENTS)

# A program, and what it prints: the next block.
PROGRAMS = re.findall(r"(?ms)^```python\n(.*?)^```$.*?^```text\n(.*?)^```$", README)
COMMANDS = [
    line
    for block in re.findall(r"(?ms)^```bash\n(.*?)^```$", README)
    for line in block.splitlines()
    if line and not line.startswith("#")
]


def test_the_tables_are_those_of_the_code():
    for document in readme_tables.DOCUMENTS:
        text = document.read_text()
        assert readme_tables.with_tables(text) == text, (
            f"{document.name}: run scripts/development/readme_tables.py"
        )


def test_every_table_stands_somewhere():
    assert set(re.findall(r"<!-- (.+) -->", TEXT)) == {*readme_tables.TABLES, "end"}


def test_every_criterion_is_named():
    names = [name for name in CRITERION_REGISTRY if name.startswith("orthogonal_")]
    assert len(names) == 7
    assert all(f"`{name}`" in TEXT for name in names)


def test_every_architecture_that_is_named_is_registered():
    pattern = (
        rf"(?<![\w/])((?:{'|'.join(FAMILIES)})_(?:transformer|roberta|synthesizer)\w*)\b(?!\*)"
    )
    named = set(re.findall(pattern, TEXT))
    assert len(named) >= 4
    assert named <= set(ARCH_MODEL_REGISTRY)


def printed_by(program):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(program, {"__name__": "README"})
    return out.getvalue()


def test_the_program_of_transformers_prints_what_stands_below_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, shown = PROGRAMS[0]
    printed = printed_by(program)
    losses = []
    for text in (printed, shown):
        lines = dict(line.split(": ") for line in text.splitlines())
        assert lines["plain"] == lines["mixed"] != lines["trained"] == lines["loaded"]
        losses.append({name: float(loss) for name, loss in lines.items()})
    assert losses[0] == pytest.approx(losses[1], abs=0.01)  # rounding depends on the machine


def test_the_program_of_torch_prints_what_stands_below_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, shown = PROGRAMS[1]
    printed = printed_by(program)
    rounding = r"\de-\d\d"  # nothing else depends on the machine
    assert re.sub(rounding, "", printed) == re.sub(rounding, "", shown)
    assert float(re.search(r"differ by (\S+)", printed)[1]) < 1e-5


def test_every_program_shows_what_it_prints():
    assert len(PROGRAMS) == README.count("```python") == 2


def test_the_types_of_transformers_that_can_be_mixed_are_counted():
    results = json.loads(transformers_results.RESULTS.read_text())
    groups = collections.Counter(map(transformers_results.group_of, results["types"]))
    mixed = (
        transformers_results.ALL,
        transformers_results.LEFT_OUT,
        transformers_results.BUT_PRUNE,
    )
    assert f"{sum(groups[group] for group in mixed)} types" in README


def added_parameters(**keywords):
    """Return how many parameters a variant adds to an attention of width 24 with 6 heads."""
    modules = [MixedAttention(24, 6, device="meta", **each) for each in (keywords, {})]
    mixed, plain = (sum(each.numel() for each in module.parameters()) for module in modules)
    return mixed - plain


def test_the_parameters_of_each_variant_are_those_of_its_formula():
    page = (ROOT / "docs" / "variants.md").read_text().split("\n## Cost\n")[1]
    rows = re.findall(r"(?m)^\| `--([\w-]+) ([\w-]+)`[^|]* \| ([^|]+) \|", page.split("\n## ")[0])
    assert len(rows) == 21
    for flag, value, formula in rows:
        python = formula.replace("²", "**2").replace("none", "0")
        python = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", python)  # a space is a product
        expected = eval(python, dict(C=24, H=6, D=4, R=2))
        keyword = "normalizer" if flag == "attention-normalizer" else flag.replace("-", "_")
        assert added_parameters(**{keyword: value}) == expected, (flag, value)


def test_the_recipe_changes_by_nothing_but_the_plugin_the_architecture_and_where_it_saves():
    diff = re.search(r"(?ms)^```diff\n(.*?)^```$", README)[1].splitlines()
    parsed = []
    for left_out in "+-":
        (command,) = (line[1:].replace(" ... ", " ") for line in diff if line[0] != left_out)
        words = shlex.split(command.replace("$(mixhead path)", recipes.PLUGIN.as_posix()))
        parsed.append(vars(recipes.parse(words)))
    before, after = parsed
    new = {name for name, value in after.items() if before.get(name, value) != value}
    assert (before["arch"], after["arch"]) == (
        "transformer_wmt_en_de",
        "mixhead_transformer_wmt_en_de",
    )
    assert new == {"arch", "user_dir", "save_dir"}
    sizes = {
        after[f"{side}_embed_dim"] // after[f"{side}_attention_heads"]
        for side in ("encoder", "decoder")
    }
    assert sizes == {64}  # as README says


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("pip install")])
def test_pip_gets_what_there_is(command):
    target = command.split()[-1].strip('"')
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if target.startswith("."):
        extra = target[1:].strip("[]")
        assert extra in {"", *project["optional-dependencies"]}
    else:
        assert re.fullmatch(r"[\w-]+==[\d.]+", target), "must be at one version"


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("scripts/")])
def test_a_script_is_there_to_be_started(command):
    assert os.access(ROOT / command.split()[0], os.X_OK)


def test_nothing_but_the_address_is_left_to_fill_in():
    clone = r"git clone ADDRESS\S* mixhead && cd mixhead$"
    # here, or in test_documents.py
    parsed = r"pip install|scripts/|python |fairseq-generate| {4}--"
    assert [line for line in COMMANDS if not re.match(f"{clone}|{parsed}", line)] == []
