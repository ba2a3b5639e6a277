"""What is installed is what is pinned, and nothing in the repository runs what a file says."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Iterator

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mixhead_plugin
from mixhead_plugin.repairs import safe_globals

ROOT = Path(mixhead_plugin.__file__).parents[1]
REQUIREMENTS = ROOT / "scripts" / "requirements"
SECURITY = (ROOT / "SECURITY.md").read_text()

# ---- what is installed -----------------------------------------------------------------------------------------------


def pins(*names: str) -> dict[str, Requirement]:
    """The pins of these files, all by default."""
    files = [REQUIREMENTS / name for name in names] or sorted(REQUIREMENTS.glob("*.txt"))
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


def test_every_pin_is_one_version():
    for name, requirement in pins().items():
        (specifier,) = requirement.specifier
        assert specifier.operator == "==" and "*" not in specifier.version, name


@pytest.mark.skipif(not venv_of_setup(), reason="needs the .venv of scripts/setup.sh")
def test_all_that_is_installed_is_pinned_and_all_that_is_pinned_is_installed():
    settings = (ROOT / ".venv" / "pyvenv.cfg").read_text()
    if re.search(r"(?m)^include-system-site-packages *= *true", settings):
        pytest.skip("the interpreter's own packages are seen too: it brought torch")
    packages = next(folder for folder in sys.path if folder.endswith("site-packages") and sys.prefix in folder)
    installed = {
        canonicalize_name(found.metadata["Name"]): found.version.partition("+")[0]
        for found in importlib.metadata.distributions(path=[packages])
    }
    del installed["mixhead-plugin"]
    wanted = {name: pin for name, pin in pins().items() if pin.marker is None or pin.marker.evaluate()}
    free = set()
    asked = ROOT / ".venv" / ".setup" / "asked_torch"
    if asked.exists() and asked.read_text():  # another torch, and what that one wants
        free = {*pins("torch.txt"), *pins("triton.txt")}
    brought = {name for name in installed if name.startswith(("nvidia-", "cuda-", "triton"))}  # torch pins each of them
    assert set(installed) - set(wanted) - free - brought == set()
    assert set(wanted) - set(installed) - free == set()
    wrong = {
        name: found
        for name, found in installed.items()
        if name in wanted and name not in free | brought and found not in wanted[name].specifier
    }
    assert wrong == {}


@pytest.mark.skipif(not venv_of_setup(), reason="needs the .venv of scripts/setup.sh")
def test_what_the_pins_need_is_pinned():
    """Also where it is not installed: a requirement of a pinned package that has no pin."""
    wanted = pins()
    missing = set()
    for name in wanted:
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # of another machine
            continue
        for requirement in map(Requirement, requires):
            needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if needed and canonicalize_name(requirement.name) not in wanted:
                missing.add((name, requirement.name))
    # text models need no torchaudio; see fairseq.txt
    ours = {found for found in missing if not found[1].startswith(("nvidia-", "cuda-", "triton"))}
    assert ours == {("fairseq-fixed", "torchaudio")}


def test_what_installs_is_pinned_too():
    assert {"pip", "setuptools", "wheel"} <= set(pins("build.txt"))


def test_what_runs_code_when_it_is_installed_has_a_hash():
    """Source distributions run their setup.py; there is one file of each, so one hash says which."""
    text = (REQUIREMENTS / "fairseq.txt").read_text()
    for name in ("fairseq-fixed", "antlr4-python3-runtime"):
        assert re.search(rf"(?m)^{name}==\S+ \\\n    --hash=sha256:[0-9a-f]{{64}}$", text), name


def test_setup_py_asks_for_what_is_pinned():
    wanted = pins()
    asked = re.findall(r'"([A-Za-z][\w.-]*(?:[=<>~!]=?[\w.]+)?)",', (ROOT / "setup.py").read_text())
    assert len(asked) > 5
    for text in asked:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name in wanted:
            (pin,) = wanted[name].specifier
            assert pin.version in requirement.specifier, text


# ---- what SECURITY.md says of it -------------------------------------------------------------------------------------


def table_of(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, row by row."""
    text = re.search(rf"(?ms)^### {heading}.*?^\|---[-|]*\n(.*?)\n\n", SECURITY)[1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_the_document_lists_what_is_pinned_in_these_versions_and_nothing_else():
    rows = table_of("Every package")
    listed = [f"{canonicalize_name(name)}=={version}" for name, version, *_ in rows]
    assert sorted(listed) == sorted(f"{name}{requirement.specifier}" for name, requirement in pins().items())
    assert all(len(row) == 4 and all(row) for row in rows)


def test_the_review_is_of_the_versions_that_are_pinned():
    found = [row[0] for row in table_of("Review of")]
    wanted = {f"{canonicalize_name(name)} {next(iter(pin.specifier)).version}" for name, pin in pins().items()}
    assert len(found) >= 5 and set(found) <= wanted
    (auditor,) = re.findall(r"pip-audit==(\S+)", (ROOT / "scripts" / "audit.sh").read_text())
    assert f"pip-audit {auditor} " in SECURITY


@pytest.mark.skipif(not venv_of_setup(), reason="needs the .venv of scripts/setup.sh")
def test_the_document_says_what_the_packages_say_of_licences_and_needs():
    wrong = []
    for name, _, purpose, licence in table_of("Every package"):
        try:
            stated = importlib.metadata.metadata(name)["License-Expression"]  # older packages have free text
        except importlib.metadata.PackageNotFoundError:  # of another machine
            continue
        if stated not in (None, licence):
            wrong.append((name, licence))
        for other in purpose.removeprefix("needed by ").split(", ") if purpose.startswith("needed by ") else []:
            needs = {canonicalize_name(Requirement(text).name) for text in importlib.metadata.requires(other) or []}
            if canonicalize_name(name) not in needs:
                wrong.append((name, other))
    assert wrong == []


@pytest.mark.slow
def test_pip_installs_the_package_with_its_documents(tmp_path):
    shutil.copytree(ROOT / "mixhead_plugin", tmp_path / "mixhead_plugin", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    command = "install --no-deps --no-build-isolation --no-index --target out .".split()
    subprocess.run([sys.executable, "-m", "pip", *command], cwd=tmp_path, check=True, capture_output=True)
    out = tmp_path / "out"
    installed = {path.relative_to(out) for path in (out / "mixhead_plugin").rglob("*") if path.suffix in (".py", ".md")}
    ours = (path for kind in ("*.py", "*.md") for path in (ROOT / "mixhead_plugin").rglob(kind))
    assert installed == {path.relative_to(ROOT) for path in ours}


# ---- scripts/audit.sh ------------------------------------------------------------------------------------------------

# The environment's Python: it makes one like itself, lists two packages, and audits as the test says.
PYTHON = """#!/usr/bin/env bash
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip install "*) ;;
    "-m pip list "*) printf 'torch==2.13.0+cpu\\nnumpy==2.4.6\\n' ;;
    "-m pip_audit "*) echo "$*"; cat "${@: -1}"; exit "$AUDIT" ;;
    *) exit 9 ;;
esac
"""


@pytest.mark.parametrize("status", [0, 1])
def test_an_audit_that_could_not_ask_fails(status, tmp_path):
    for name in ("scripts", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "audit.sh", tmp_path / "scripts")
    for name, text in {"scripts/setup.sh": "#!/bin/sh\n", ".venv/bin/python": PYTHON}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "AUDIT": str(status), "TMPDIR": str(tmp_path)}
    done = subprocess.run([tmp_path / "scripts" / "audit.sh"], capture_output=True, text=True, env=environment)
    assert done.returncode == status, done.stderr
    words = done.stdout.splitlines()[0].split()
    assert {"--strict", "--no-deps", "--disable-pip"} <= set(words)  # strict: what is not in the database is an error
    assert done.stdout.splitlines()[1:] == ["torch==2.13.0", "numpy==2.4.6"]
    assert not list(tmp_path.glob("tmp.*"))


# ---- what is loaded --------------------------------------------------------------------------------------------------

SOURCES = [path for name in ("mixhead_plugin", "examples", "scripts") for path in sorted((ROOT / name).rglob("*.py"))]
SOURCES.append(ROOT / "setup.py")
UNPICKLING = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open", "dill.load"),
    *("joblib.load", "pandas.read_pickle", "cloudpickle.load", "cloudpickle.loads"),
}
CODE = {"eval", "exec", "os.system", "os.popen", "compile", "__import__"}
YAML = {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"}


def faults(source: str) -> Iterator[str]:
    """What in a program runs, or may run, what a file says."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        values = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in UNPICKLING | CODE | YAML:
            yield f"line {node.lineno}: {name}"
        elif name == "torch.load" and values.get("weights_only") != "True":
            yield f"line {node.lineno}: torch.load without weights_only=True"
        elif name.endswith("load") and values.get("allow_pickle", "False") != "False":
            yield f"line {node.lineno}: {name} with allow_pickle"
        elif values.get("shell", "False") != "False":
            yield f"line {node.lineno}: {name} with shell"
        elif name.endswith((".extractall", ".extract", "unpack_archive")):
            yield f"line {node.lineno}: {name} writes where the archive says"
        elif name.endswith("from_pretrained") or name.startswith("torch.hub."):
            yield f"line {node.lineno}: {name} may fetch and run code"


@pytest.mark.parametrize("path", [str(path.relative_to(ROOT)) for path in SOURCES])
def test_nothing_runs_what_a_file_says(path):
    assert [fault.partition(": ")[2] for fault in faults((ROOT / path).read_text())] == []


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=safe)",
        "pickle.load(file)",
        "yaml.load(text, Loader=yaml.FullLoader)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(line, shell=True)",
        "os.system(line)",
        "tarfile.open(path).extractall(folder)",
        "eval(text)",
        "BertModel.from_pretrained(name)",
    ],
)
def test_each_of_these_would_be_found(source):
    assert len(list(faults(source))) == 1


@pytest.mark.parametrize("source", ["torch.load(path, weights_only=True)", "model.eval()", "np.load(path)"])
def test_none_of_these_is_a_fault(source):
    assert list(faults(source)) == []


def test_the_list_of_classes_in_checkpoints_is_that_of_the_document(monkeypatch):
    """A class that is allowed without a word in SECURITY.md fails here."""
    allowed = []
    monkeypatch.setattr(torch.serialization, "add_safe_globals", allowed.extend)
    safe_globals.apply()
    assert len(allowed) == len(set(allowed)) > 15
    table = re.search(r"(?s)### Safe loading\n(.*?)\n\n[^|\n]*What that means", SECURITY)[1]
    assert {name.__name__ for name in allowed} == set(
        re.findall(r"`(\w+)`", "".join(re.findall(r"(?m)^\|([^|]*)\|", table)))
    )
