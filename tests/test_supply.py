"""The pinned packages are installed, with all that they need.

Those that run code at installation are pinned by hash.
"""

import importlib.metadata
import itertools
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mixhead_plugin

ROOT = Path(mixhead_plugin.__file__).parents[1]
REQUIREMENTS = ROOT / "scripts" / "requirements"
# not installed in .venv
OTHERS = {
    REQUIREMENTS / f"{name}.txt" for name in ("docs", "lint", "notebooks", "reach", "release")
}
FAIRSEQS = {"fairseq-fixed", "ve-fairseq"}  # one of them is installed

# ---- what is installed --------------------------------------------------------------------------


def pins(*names: str) -> dict[str, Requirement]:
    """Return the pins of these files, by default of all."""
    files = [REQUIREMENTS / name for name in names] or sorted(
        {*REQUIREMENTS.glob("*.txt")} - OTHERS
    )
    found = {}
    for file in files:
        for line in file.read_text().splitlines():
            text = re.sub(r"(^|\s)#.*", "", line).strip(" \\")
            if text and not text.startswith("--hash"):
                requirement = Requirement(text)
                found[canonicalize_name(requirement.name)] = requirement
    return found


def venv_of_setup() -> bool:
    return Path(sys.prefix) == ROOT / ".venv" and (ROOT / ".venv" / ".setup").is_dir()


def sees_system_packages() -> bool:
    settings = ROOT / ".venv" / "pyvenv.cfg"
    if not settings.exists():
        return False
    return (
        re.search(r"(?m)^include-system-site-packages *= *true", settings.read_text()) is not None
    )


def test_every_pin_is_one_version():
    for file in REQUIREMENTS.glob("*.txt"):
        for name, requirement in pins(file.name).items():
            (specifier,) = requirement.specifier
            assert specifier.operator == "==" and "*" not in specifier.version, name


def installed() -> dict[str, importlib.metadata.Distribution]:
    """Return the packages of .venv by name."""
    packages = next(
        folder for folder in sys.path if folder.endswith("site-packages") and sys.prefix in folder
    )
    found = importlib.metadata.distributions(path=[packages])
    return {canonicalize_name(each.metadata["Name"]): each for each in found}


def wanted() -> dict[str, Requirement]:
    """Return the pins that this platform installs."""
    return {
        name: pin for name, pin in pins().items() if pin.marker is None or pin.marker.evaluate()
    }


def brought_by_torch(name: str) -> bool:
    """Return True for a package that torch pins itself, or that comes with another torch."""
    asked = ROOT / ".venv" / ".setup" / "asked_torch"
    if asked.exists() and asked.read_text() and name in {*pins("torch.txt"), *pins("triton.txt")}:
        return True
    return name.startswith(("nvidia-", "cuda-", "triton"))


def needs_of(found: importlib.metadata.Distribution) -> set[str]:
    """Return what a package needs, without what its extras need."""
    asked = map(Requirement, found.requires or [])
    return {
        canonicalize_name(each.name)
        for each in asked
        if each.marker is None or each.marker.evaluate({"extra": ""})
    }


needs_venv_of_setup = pytest.mark.skipif(
    not venv_of_setup(), reason="needs the .venv of scripts/setup.sh"
)
needs_own_torch = pytest.mark.skipif(
    sees_system_packages(), reason="the interpreter's own packages are seen too: it brought torch"
)


@needs_venv_of_setup
@needs_own_torch
def test_all_that_is_pinned_is_installed_in_its_version():
    versions = {name: each.version.partition("+")[0] for name, each in installed().items()}
    for name, pin in wanted().items():
        if name in FAIRSEQS - versions.keys() or brought_by_torch(name):
            continue
        assert versions.get(name) in pin.specifier, name


@needs_venv_of_setup
@needs_own_torch
def test_all_that_a_pinned_package_needs_is_pinned():
    """Other packages may be installed, too: a contributor may want ipython."""
    here = installed()
    # fairseq and triton are installed without what they ask for
    with_needs = wanted().keys() & here.keys() - FAIRSEQS - {"triton"}
    for name in sorted(with_needs):
        missing = needs_of(here[name]) & here.keys() - wanted().keys()
        assert not [each for each in missing if not brought_by_torch(each)], name


def test_what_runs_code_when_it_is_installed_has_a_hash():
    """Check source distributions, whose setup.py runs.

    Also fairseq's wheels, which nobody else has looked at.
    """
    for file, fairseq in {
        "fairseq_source.txt": "fairseq-fixed",
        "fairseq_wheel.txt": "ve-fairseq",
    }.items():
        text = (REQUIREMENTS / file).read_text()
        for name in (fairseq, "antlr4-python3-runtime"):
            assert re.search(
                rf"(?m)^{name}==\S+ (\\\n    --hash=sha256:[0-9a-f]{{64}} ?)+$", text
            ), name


def test_the_licence_of_everything_pinned_stands_on_the_page_of_packages():
    table = (ROOT / "docs" / "packages.md").read_text().split("\n## Licences\n")[1]
    rows = re.findall(r"(?m)^\| [^|]+ \| ([^|]+) \|$", table)
    named = {canonicalize_name(name) for row in rows[1:] for name in row.split(", ")}
    assert named == {*pins()}


def test_the_package_asks_for_what_is_pinned():
    project, wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"], pins()
    for text in itertools.chain(
        project["dependencies"], *project["optional-dependencies"].values()
    ):
        requirement = Requirement(text)
        if requirement.name != "mixhead_plugin":  # one of its extras
            (pin,) = wanted[canonicalize_name(requirement.name)].specifier
            assert pin.version in requirement.specifier, text


@pytest.mark.slow
def test_pip_installs_the_package_with_its_documents(tmp_path):
    shutil.copytree(
        ROOT / "mixhead_plugin",
        tmp_path / "mixhead_plugin",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    command = "install --no-deps --no-build-isolation --no-index --target out .".split()
    subprocess.run(
        [sys.executable, "-m", "pip", *command], cwd=tmp_path, check=True, capture_output=True
    )
    out = tmp_path / "out"
    installed = {
        path.relative_to(out)
        for path in (out / "mixhead_plugin").rglob("*")
        if path.suffix in (".py", ".md")
    }
    ours = (path for kind in ("*.py", "*.md") for path in (ROOT / "mixhead_plugin").rglob(kind))
    assert installed == {path.relative_to(ROOT) for path in ours}
