"""The demo runs, far too short to learn anything."""

import gzip
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo"


def run(*arguments, data=None):
    environment = {key: value for key, value in os.environ.items() if key != "DATA"}
    if data is not None:
        environment["DATA"] = str(data)
    command = [sys.executable, str(DEMO / "demo.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.fixture
def text(tmp_path):
    """Return a folder with a little of the demo's corpus as a user's own text."""
    folder = tmp_path / "text"
    folder.mkdir()
    for language in ("de", "en"):
        with gzip.open(DEMO / "corpus" / f"{language}.gz", "rt", encoding="utf-8") as file:
            lines = file.readlines()
        for split, part in {
            "train": lines[:200],
            "valid": lines[200:220],
            "test": lines[220:241],
        }.items():
            (folder / f"{split}.{language}").write_text("".join(part), encoding="utf-8")
    return folder


def test_the_corpus_is_pairs_of_which_none_is_there_twice():
    files = (DEMO / "corpus" / f"{side}.gz" for side in ("de", "en"))
    sides = [gzip.decompress(file.read_bytes()).decode().splitlines() for file in files]
    assert [len(lines) for lines in sides] == [23_200, 23_200]
    assert [len(set(lines)) for lines in sides] == [23_200, 23_200]


@pytest.mark.slow
def test_it_trains_translates_and_scores_both_models_on_ones_own_text(text, tmp_path):
    result = run("--updates", 2, "--vocabulary", 200, "--folder", tmp_path / "out", data=text)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [
        line.split()
        for line in result.stdout.splitlines()
        if "transformer " in line and " s" in line
    ]
    assert [row[0] for row in rows] == ["transformer", "mixhead_transformer"]
    # 2 layers, attentions of 4 heads of size 32: 6 times 32 * 4 + 4 * 4
    assert rows[1][3] == "864"
    assert result.stdout.count("\nGerman ") == 5
    record = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(record["models"]) == 2
    assert record["data"]["name"] == "text" and len(record["data"]["sha256"]) == 6
    assert (tmp_path / "out" / "training.png").stat().st_size > 10_000


def test_text_that_does_not_fit_is_refused_in_one_line(text, tmp_path):
    (text / "test.de").write_text("Hallo!\n")
    result = run("--folder", tmp_path / "out", data=text)
    assert result.returncode != 0 and len(result.stderr.splitlines()) == 1
    assert result.stderr.endswith("test.de has 1 lines, test.en 21; they must match\n")


def test_empty_text_is_refused_in_one_line(text, tmp_path):
    for language in ("de", "en"):
        (text / f"test.{language}").write_text("")
    result = run("--folder", tmp_path / "out", data=text)
    assert result.stderr.splitlines() == [
        f"demo: error: DATA={text}: test.de and test.en have no lines"
    ]


def test_as_soon_as_one_training_fails_the_others_end():
    """The first training ends by itself only after 30 s."""
    program = """
        import subprocess, sys, demo
        demo.CORES = 2

        def work(arch, row, threads):
            if arch == "fails":
                while not demo.RUNNING:
                    pass
                demo.fail("it failed")
            process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
            demo.RUNNING.append(process)
            process.wait()

        demo.side_by_side(work, ("goes on", "fails"))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=DEMO, timeout=20)
    assert result.stderr == "demo: error: it failed\n"


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(DEMO)
    return importlib.import_module("demo")


def test_a_sentence_without_a_translation_gives_no_score(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "run", lambda *_: (["H-0\t-0.5\tthe first one"], 1.0))
    with pytest.raises(SystemExit) as ended:
        demo.translate(tmp_path, tmp_path / "transformer", ["the first one", "the second one"], 1)
    log = tmp_path / "transformer.generate.log"
    assert ended.value.code == f"demo: error: {log}: translations of 1 sentences, must be 2"


def test_the_checkpoint_is_trained_anew_in_an_empty_folder(demo, tmp_path, monkeypatch):
    pretrained = importlib.import_module("pretrained")
    work = tmp_path / "runs" / "demo" / "pretrained"
    found = []

    def run(*_):
        found.append(sorted(work.iterdir()))
        (work / "checkpoint_last.pt").touch()

    monkeypatch.setattr(pretrained, "ROOT", tmp_path)
    monkeypatch.setattr(pretrained, "run", run)
    for name in ("write_text", "preprocess", "shrink"):
        monkeypatch.setattr(pretrained, name, lambda *_: None)
    pretrained.main()
    pretrained.main()
    assert found == [[], []]


def test_text_of_another_encoding_is_refused_in_one_line(text, tmp_path):
    (text / "valid.de").write_bytes("Tür\n".encode("latin-1") * 20)
    result = run("--folder", tmp_path / "out", data=text)
    assert result.stderr == f"demo: error: {text}/valid.de: is not UTF-8 at byte 1; must be UTF-8\n"


def test_a_sentence_that_is_too_long_is_refused_before_any_training(text, tmp_path):
    lines = (text / "test.de").read_text().splitlines()
    lines[6] = " ".join(["Haus"] * 1100)
    # A lone CR, or another separator of Unicode, ends no line.
    lines[0] = "die Frau\rsieht\u2028den Hund"
    (text / "test.de").write_bytes("".join(f"{line}\n" for line in lines).encode())
    result = run("--vocabulary", 200, "--folder", tmp_path / "out", data=text)
    pattern = (
        r"demo: error: \S+/test.de: line 7 has [\d,]+ pieces; must be at most 1,023, the model's "
        r"positions\n"
    )
    assert re.fullmatch(pattern, result.stderr)
    assert not list((tmp_path / "out").rglob("*.log"))


@pytest.mark.parametrize(
    "words, status, said",
    [
        (["--help"], 0, "usage: scripts/demo.sh"),
        (["--zzz"], 2, "error: unrecognized arguments: --zzz"),
        (
            ["--updates", "0"],
            2,
            "error: argument --updates: 0: must be a whole number of at least 1",
        ),
        (
            ["--folder", "examples"],
            2,
            "error: argument --folder: examples: is there already; must be a new folder",
        ),
        ([], 7, "set up"),
    ],
    ids=["help", "unknown flag", "wrong number", "folder in use", "no flag"],
)
def test_its_flags_are_read_before_anything_is_installed(words, status, said, tmp_path):
    checkout = checkout_of_scripts(tmp_path, "echo set up; exit 7")
    result = subprocess.run(
        [checkout / "scripts" / "demo.sh", *words],
        capture_output=True,
        text=True,
        cwd=DEMO.parents[1],
    )
    assert result.returncode == status
    assert said in result.stdout + result.stderr


def test_its_folders_are_relative_to_that_of_the_caller(tmp_path):
    python = f'exec {shlex.quote(sys.executable)} "$@"'
    checkout = checkout_of_scripts(tmp_path / "checkout", "exit 0", python)
    here = tmp_path / "here"
    (here / "text").mkdir(parents=True)
    result = subprocess.run(
        [checkout / "scripts" / "demo.sh", "--folder", "out"],
        capture_output=True,
        text=True,
        cwd=here,
        env={**os.environ, "DATA": "text"},
    )
    assert result.stderr == "demo: error: DATA=text: train.de is missing\n"
    assert sorted(path.name for path in here.iterdir()) == ["out", "text"]


def checkout_of_scripts(folder, set_up, python="exit 1"):
    """Make a checkout whose setup.sh and Python do this, with the demo; return its folder."""
    demo = (DEMO.parents[1] / "scripts" / "demo.sh").read_text()
    programs = {
        "scripts/demo.sh": demo,
        "scripts/setup.sh": f"#!/usr/bin/env bash\n{set_up}\n",
        ".venv/bin/python": f"#!/usr/bin/env bash\n{python}\n",
    }
    for name, text in programs.items():
        program = folder / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    (folder / "examples").symlink_to(DEMO.parent)
    return folder
