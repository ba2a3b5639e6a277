"""The notebooks run from top to bottom.

By default their cells run here, on a tiny random model and little data, without Jupyter. The slow
test runs them as Jupyter does, in full.
"""

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from development import run_notebooks

from tests import commands, reach
from tests.sentence_encoder import save_small_sentence_encoder

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells(file, kind):
    return [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == kind]


def run_cells(file, **parameters):
    """Run the cells in one namespace, with other values for its cell of parameters.

    Return what they print.
    """
    names = {"__name__": "notebook"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for cell in cells(file, "code"):
            exec("".join(cell["source"]), names)
            if "parameters" in cell["metadata"].get("tags", []):
                assert parameters.keys() <= names.keys()
                names.update(parameters)
    return printed.getvalue()


@pytest.fixture
def folder(tmp_path):
    """Return a folder that has beside it what a notebook finds beside notebooks/."""
    for name in ("examples", "mixhead_plugin"):
        (tmp_path / name).symlink_to(ROOT / name)
    found = tmp_path / "notebooks"
    found.mkdir()
    return found


def test_the_cells_for_a_pretrained_model_run(folder, monkeypatch):
    monkeypatch.chdir(folder)
    save_small_sentence_encoder(folder / "small")
    file = ROOT / "notebooks" / "pretrained_model.ipynb"
    printed = run_cells(file, FOLDER="small", STEPS=2, HELD_OUT=32)
    assert "1,152 new parameters" in printed  # 6 attentions with 12 heads of 4: 12 * 4 + 12 * 12
    assert re.search(r"the loaded model differs by [01]e[+-]\d\d\n$", printed)
    assert (folder / "heads.html").is_file()


@pytest.mark.slow  # two trainings and eight commands, each of which has tests of its own
def test_the_cells_for_fairseq_run(folder, monkeypatch):
    def forked(command, **settings):
        """Run a command of fairseq without the seconds of its imports."""
        program, *words = map(str, command)
        if Path(program).name == "python":
            return commands.run(f"-m {words[1]}", *words[2:], check=False)
        return commands.run(Path(program).name, *words, check=False)

    monkeypatch.chdir(folder)
    monkeypatch.setattr(subprocess, "run", forked)
    file = ROOT / "notebooks" / "fairseq_recipe.ipynb"
    printed = run_cells(file, FOLDER="out", UPDATES=1, PAIRS=120, VOCABULARY=200, HELD_OUT=10)
    assert printed.count("BLEU4 = ") == 2
    assert (folder / "out" / "analysis" / "mixing.png").is_file()
    assert (folder / "out" / "heads.html").is_file()


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_its_outputs_are_kept_whole_and_small(file):
    """A run leaves its cells numbered from 1, without an error; git keeps the file for good."""
    code = cells(file, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = {output["output_type"] for cell in code for output in cell["outputs"]}
    assert kinds == {"stream", "display_data"} or kinds == {"stream", "execute_result"}
    assert not [o for cell in code for o in cell["outputs"] if o.get("name") == "stderr"]
    assert file.stat().st_size < 200_000


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_its_links_lead_to_files(file):
    text = "\n".join("".join(cell["source"]) for cell in cells(file, "markdown"))
    targets = re.findall(r"\]\(([^)#]+)", text)
    assert targets
    assert [target for target in targets if not (file.parent / target).is_file()] == []


def test_a_misspelt_name_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run_notebooks.py", "fairseq_recipes"])
    with pytest.raises(SystemExit) as ended:
        run_notebooks.main()
    assert ended.value.code == 2
    said = "error: fairseq_recipes: must be among fairseq_recipe, pretrained_model\n"
    assert capsys.readouterr().err.endswith(said)


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_in_jupyter_it_runs_in_full(file, folder):
    reach.installed()
    if file.stem == "pretrained_model":
        reach.extract_minilm(folder)
    reach.run("-c", IN_JUPYTER, str(file), str(folder))


IN_JUPYTER = """
import sys
from pathlib import Path
sys.path.insert(0, "scripts")
from development.run_notebooks import run
run(Path(sys.argv[1]), Path(sys.argv[2]))
"""
