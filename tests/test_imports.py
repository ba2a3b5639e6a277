"""Which folder imports which: the contracts of pyproject.toml hold, and doors are imported late."""

import subprocess
import sys

from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

from tests.commands import ROOT


def test_every_import_points_down_and_no_door_knows_another(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    status = lint_imports(cache_dir=None)
    assert status == EXIT_STATUS_SUCCESS, capsys.readouterr().out


def test_the_package_and_its_command_import_no_door_before_they_need_one():
    program = "import sys, mixhead_plugin, mixhead_plugin.__main__; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    doors = ("torch", "fairseq", "transformers", "mixhead_plugin.fairseq", "mixhead_plugin.nn")
    assert not set(doors) & set(loaded)
