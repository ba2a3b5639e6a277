"""scripts/development/release.sh installs its tools when their pins change, or after a failure."""

import os
import shutil
import subprocess

import pytest
from recipes import ROOT

# In place of Python: `-m venv FOLDER` makes an environment whose Python writes down its calls.
PYTHON = """#!/usr/bin/env bash
mkdir -p "$3/bin"
cat > "$3/bin/python" <<'END'
#!/usr/bin/env bash
echo "$2" >> calls
[[ $2 != pip || ! -e broken ]]
END
chmod +x "$3/bin/python"
"""


@pytest.fixture
def release(tmp_path):
    """Return a function of words that calls release.sh in a checkout with a false Python."""
    shutil.copytree(ROOT / "scripts" / "requirements", tmp_path / "scripts" / "requirements")
    program = tmp_path / "scripts" / "development" / "release.sh"
    program.parent.mkdir()
    shutil.copy(ROOT / "scripts" / "development" / "release.sh", program)
    (tmp_path / "mixhead_plugin").mkdir()
    (tmp_path / "mixhead_plugin" / "__init__.py").write_text('__version__ = "1.0"\n')
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def release(*words):
        environment = {**os.environ, "PYTHON": str(python)}
        command = [program, *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return release


@pytest.fixture
def upload(release, tmp_path):
    """Return a function that uploads; it returns the calls of Python."""

    def upload():
        release("upload")
        calls = (tmp_path / "calls").read_text().split()
        (tmp_path / "calls").unlink()
        return calls

    return upload


def test_the_tools_are_installed_once(upload):
    assert upload() == ["pip", "twine"]
    assert upload() == ["twine"]


@pytest.mark.parametrize("name", ["release", "runtime"])
def test_the_tools_are_installed_again_when_a_pin_changes(name, upload, tmp_path):
    upload()
    with (tmp_path / "scripts" / "requirements" / f"{name}.txt").open("a") as file:
        file.write("another==1.0\n")
    assert upload() == ["pip", "twine"]


def test_the_tools_are_installed_again_after_an_installation_that_failed(upload, tmp_path):
    (tmp_path / "broken").touch()
    assert upload() == ["pip"]
    (tmp_path / "broken").unlink()
    assert upload() == ["pip", "twine"]


REFUSED = {
    "": "release.sh: takes 'build', 'build TAG' or 'upload', got ''",
    "uploads": "release.sh: takes 'build', 'build TAG' or 'upload', got 'uploads'",
    "upload v1.0": "release.sh: takes 'build', 'build TAG' or 'upload', got 'upload v1.0'",
    "build v1.0 v1.1": "release.sh: takes 'build', 'build TAG' or 'upload', got 'build v1.0 v1.1'",
    "build v1.1": (
        "release.sh: the tag is v1.1, must be v1.0, the version of mixhead_plugin/__init__.py"
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_words_that_cannot_be_meant_are_refused_before_any_work(words, release, tmp_path):
    refused = release(*words.split())
    assert refused.returncode != 0
    assert refused.stderr == f"{REFUSED[words]}\n"
    assert not (tmp_path / "calls").exists()
