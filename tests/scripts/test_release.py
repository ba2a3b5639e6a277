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
def upload(tmp_path):
    """Return a function that uploads in a checkout with a false Python; it returns the calls."""
    shutil.copytree(ROOT / "scripts" / "requirements", tmp_path / "scripts" / "requirements")
    program = tmp_path / "scripts" / "development" / "release.sh"
    program.parent.mkdir()
    shutil.copy(ROOT / "scripts" / "development" / "release.sh", program)
    (tmp_path / "mixhead_plugin").mkdir()
    (tmp_path / "mixhead_plugin" / "__init__.py").write_text('__version__ = "1.0"\n')
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def upload():
        environment = {**os.environ, "PYTHON": str(python)}
        subprocess.run([program, "upload"], env=environment, capture_output=True, check=False)
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
