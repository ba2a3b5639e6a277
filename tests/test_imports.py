"""Which folder imports which: the contracts of pyproject.toml hold, and doors are imported late."""

import subprocess
import sys
import tomllib

from tests.commands import ROOT


def test_every_import_points_down_and_no_door_knows_another():
    # In a process of its own, because import-linter switches off all loggers that there are.
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", program, "--no-cache"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


def test_the_package_and_its_command_import_no_door_before_they_need_one():
    program = "import sys, mixhead_plugin, mixhead_plugin.__main__; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    doors = ("torch", "fairseq", "transformers", "mixhead_plugin.fairseq", "mixhead_plugin.nn")
    assert not set(doors) & set(loaded)


def test_what_a_door_alone_imports_is_forbidden_in_every_other_folder():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    folders = {folder.parent.name for folder in (ROOT / "mixhead_plugin").glob("*/__init__.py")}
    for contract in contracts:
        if contract["type"] == "forbidden":
            sources = {name.removeprefix("mixhead_plugin.") for name in contract["source_modules"]}
            door = contract["name"].split()[0]
            assert folders - sources == {{"transformers": "hf"}.get(door, door)}
