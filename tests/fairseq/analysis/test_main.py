"""Test the command line: its help, and how a command ends."""

import pytest

from mixhead_plugin.fairseq.analysis import mixing
from mixhead_plugin.fairseq.analysis.command import COMMANDS, main


def test_the_overview_names_every_command(analysis):
    status, printed, _ = analysis("--help")
    assert status == 0
    assert all(f"\n    {name} " in printed or f"\n    {name}\n" in printed for name in COMMANDS)
    assert analysis()[0] == analysis("spektrum")[0] == 2


@pytest.mark.parametrize(
    "arguments, status",
    [
        (["spectrum"], 2),
        (["spectrum", "x.pt", "--lenght", "3"], 2),
        (["mixing", "x.pt", "--max-tokens", "0"], 2),
        (["mixing", "x.pt", "--batch-size", "2", "--max-tokens", "9"], 2),
        (["mixing", "x.pt", "--model-overrides", "__import__('os')"], 2),
        (["mixing", "x.pt", "--model-overrides", "{"], 2),
        (["spectrum", "x.pt"], 1),
        (["mixing", "x.pt", "--user-dir", "nowhere"], 1),
        (["view", "x.pt", "--sentencepiece", "nowhere.model"], 1),
    ],
)
def test_the_last_line_names_what_is_wrong(arguments, status, analysis, tmp_path):
    found, _, errors = analysis(*arguments, "--output", tmp_path / "new")
    line = errors.splitlines()[-1]
    assert found == status and ": error: " in line
    assert any(word in line for word in arguments[1:]) or "CHECKPOINT" in line
    assert len(errors.splitlines()) == status  # mistyped flags have the usage in front
    assert not (tmp_path / "new").exists()


def test_a_reader_that_has_ended_is_no_fault_of_a_flag(monkeypatch):
    def run(args):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(mixing, "run", run)
    with pytest.raises(BrokenPipeError):
        main(["mixing", "x.pt"])


DRAWING = [name for name in COMMANDS if name != "view"]  # view writes a page


@pytest.mark.parametrize("name", DRAWING)
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_computed(
    name, analysis, monkeypatch, tmp_path
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(
        f"mixhead_plugin.fairseq.analysis.{name}.run", lambda args: pytest.fail("has begun")
    )
    for folder in (tmp_path / "file", tmp_path / "file" / "sub"):
        status, _, errors = analysis(name, "x", "--output", folder)
        assert status == 2
        assert "argument --output: " in errors and str(folder) in errors


PICTURES = {
    "spectrum": ["spectrum", "effective_rank", "log_and_heads"],
    "mixing": ["mixing", "mixing_spread"],
    "importance": ["importance"],
    "ablate": ["ablate-single-loss", "ablate-only-loss"],
    "prune": ["prune"],
}


def test_the_pictures_of_every_command_are_tested():
    assert list(PICTURES) == DRAWING


@pytest.mark.slow
@pytest.mark.parametrize("command", DRAWING)
def test_pictures_and_numbers_are_written_and_named(command, lm_checkpoint, analysis, tmp_path):
    status, printed, _ = analysis(command, lm_checkpoint, "--output", tmp_path)
    assert status == 0
    files = [f"{picture}.{suffix}" for picture in PICTURES[command] for suffix in ("png", "svg")]
    assert all((tmp_path / file).stat().st_size > 5000 for file in files)
    named = [line for line in printed.splitlines() if line.startswith("wrote ")]
    assert named == [f"wrote {tmp_path / file}" for file in [*files, f"{command}.json"]]
