"""What docs/extending.md shows works as it stands there.

A block of a whole file begins with its path. A change of a file is a block of a diff, which begins
with the path, too.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.commands import OTHERS, ROOT, SIZES, TRAINING, WHOLE_SETS

PAGE = (ROOT / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"(?ms)^```py\n# (\S+)\n(.*?)^```$", PAGE))
CHANGES = re.findall(r"(?ms)^```diff\n # (\S+)\n(.*?)^```$", PAGE)


def write(name, folder):
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(FILES[name])


def change(name, lines, folder):
    before = "".join(line[1:] for line in lines if not line.startswith("+"))
    after = "".join(line[1:] for line in lines if not line.startswith("-"))
    text = (folder / name).read_text()
    assert text.count(before) == 1, f"{name} has other lines now than the page shows"
    (folder / name).write_text(text.replace(before, after))


def copy_of_the_checkout(folder):
    for name in ("mixhead_plugin", "tests", "examples", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def test_the_repair_is_shown_as_it_is():
    name = "mixhead_plugin/fairseq/repairs/batch_buckets.py"
    assert FILES[name] == (ROOT / name).read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "user_dir, flags",
    [
        ("relu_heads", ["--arch", "mixhead_transformer", "--attention-normalizer", "relu", *SIZES]),
        ("my_models", ["--arch", "my_small_transformer"]),
    ],
    ids=["a normalizer", "an architecture"],
)
def test_a_user_dir_of_ones_own_trains_goes_on_and_decodes(
    user_dir, flags, translation_data, tmp_path
):
    write(f"{user_dir}/__init__.py", tmp_path)
    own = ["--user-dir", user_dir]
    training = [translation_data, *own, *flags, *TRAINING, "--save-dir", tmp_path / "save"]
    last = tmp_path / "save" / "checkpoint_last.pt"
    OTHERS.run("fairseq-train", *training, "--max-update", 1, cwd=tmp_path)
    goes_on = OTHERS.run("fairseq-train", *training, "--max-update", 2, cwd=tmp_path)
    assert f"Loaded checkpoint {last}" in goes_on.stderr + goes_on.stdout

    decoding = [translation_data, "--path", last, "--beam", "2", *WHOLE_SETS]
    assert "BLEU4" in OTHERS.run("fairseq-generate", *decoding, *own, cwd=tmp_path).stdout


@pytest.mark.slow
def test_the_gradient_of_the_normalizer_is_that_of_autograd(tmp_path):
    write("relu_heads/__init__.py", tmp_path)
    write("compare.py", tmp_path)
    subprocess.run([sys.executable, "compare.py"], cwd=tmp_path, check=True)


@pytest.mark.slow
def test_the_command_runs_in_a_copy_of_the_checkout(tmp_path):
    copy_of_the_checkout(tmp_path)
    write("mixhead_plugin/fairseq/analysis/entropy.py", tmp_path)
    write("tests/fairseq/analysis/test_entropy.py", tmp_path)
    for name, block in CHANGES:
        change(name, block.splitlines(keepends=True), tmp_path)
    nodes = ["tests/fairseq/analysis/test_entropy.py", "tests/fairseq/analysis/test_main.py"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", "-k", "entropy or pictures", *nodes],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},  # before the installed one
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]


def test_every_file_and_change_is_tested_here():
    assert list(FILES) == [
        "relu_heads/__init__.py",
        "compare.py",
        "my_models/__init__.py",
        "mixhead_plugin/fairseq/analysis/entropy.py",
        "tests/fairseq/analysis/test_entropy.py",
        "mixhead_plugin/fairseq/repairs/batch_buckets.py",
    ]
    assert len(CHANGES) == 2
