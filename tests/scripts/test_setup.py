"""scripts/setup.sh and scripts/test.sh run in a copy of the checkout.

Their Python only records its calls.

The probe of the interpreter is real; venv and pip are not, so nothing is installed and nothing is
downloaded.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash")
TOOLS = "bash cat cp cut dirname env flock grep mkdir realpath rm sha256sum tail".split()

# Replaces the interpreter: `-m venv` makes a folder; everything else runs the real one with `patch`
# applied.
PYTHON = """#!{bash}
if [[ " $* " == *" -m venv "* ]]; then
    echo "$*" >>{calls}
    target="${{@: -1}}"
    mkdir -p "$target/bin"
    cp {venv_python} "$target/bin/python"
    cp {venv_python} "$target/bin/shellcheck"
    [[ "$*" == *--system-site-packages* ]] && system=true || system=false
    echo "include-system-site-packages = $system" >"$target/pyvenv.cfg"
else
    FAKE_PYTHON=$0 PYTHONPATH={patches} exec {real} "$@"
fi
"""
# Replaces .venv/bin/python.
VENV_PYTHON = """#!{bash}
[[ "$*" == "-c " ]] && exit
echo "$*" >>{calls}
if [[ "$*" == *"${{FAKE_FAIL-no such}}"* ]]; then echo "${{FAKE_ERROR-}}"; exit 3; fi
"""
# A step of setup.sh, and what its call of Python has.
SIGNS = {
    "venv": "-m venv ",
    "build tools": "build.txt",
    "torch": "torch.txt",
    "fairseq": "requirements/fairseq_",
    "packages": "runtime.txt",
    "project": " -e ",
    "check": "libbleu",
}
ALL_STEPS = [*SIGNS]
LINUX = (
    "import platform; platform.machine = lambda: 'x86_64'; platform.libc_ver = lambda: ('glibc', "
    "'2.28')"
)


class Checkout:
    """A copy of what the scripts touch, with a PATH of fakes and basics.

    Its folder has a space in its name.
    """

    def __init__(self, tmp_path):
        self.root = tmp_path / "a checkout"
        self.bin = tmp_path / "bin"
        self.patches = tmp_path / "patches"
        self.log = tmp_path / "calls"
        for folder in (self.root / "mixhead_plugin", self.bin, self.patches):
            folder.mkdir(parents=True)
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        for name in ("setup.py", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root)
        (self.root / "mixhead_plugin" / "__init__.py").write_text(
            '"""Nothing."""\n\n__version__ = "1.2.3"\n'
        )
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        self.program("c++", "exit 0")
        self.program("venv_python", VENV_PYTHON.format(bash=BASH, calls=f"'{self.log}'"))
        self.interpreter("python3")
        self.patch("")

    def program(self, name, text):
        path = self.bin / name
        path.write_text(text if text.startswith("#!") else f"#!{BASH}\n{text}\n")
        path.chmod(0o755)
        return path

    def interpreter(self, name):
        parts = {
            "calls": self.log,
            "venv_python": self.bin / "venv_python",
            "patches": self.patches,
        }
        quoted = {key: f"'{value}'" for key, value in parts.items()}
        return self.program(name, PYTHON.format(bash=BASH, real=f"'{sys.executable}'", **quoted))

    def patch(self, code):
        """Write Python code that runs in the interpreter before the probe and disguises it."""
        disguise = (
            "import importlib.metadata, os, sys\nsys.executable = os.environ['FAKE_PYTHON']\n"
        )
        no_torch = "importlib.metadata.version = lambda name: '1.0'\n"
        (self.patches / "sitecustomize.py").write_text(disguise + no_torch + code + "\n")

    def start(self, script="setup.sh", *arguments, **environment):
        self.log.write_text("")
        environment.setdefault("FAIRSEQ", "source")
        return subprocess.Popen(
            [BASH, str(self.root / "scripts" / script), *arguments],
            # PIP_NO_INDEX: nothing is downloaded even if a fake is bypassed.
            env={"PATH": str(self.bin), "HOME": str(self.root), "PIP_NO_INDEX": "1", **environment},
            cwd=self.root.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script="setup.sh", *arguments, **environment):
        process = self.start(script, *arguments, **environment)
        try:
            out, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.terminate()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def set_up(self, **environment):
        done = self.run(**environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    @property
    def calls(self):
        return self.log.read_text().splitlines()

    @property
    def steps(self):
        """Return the steps that the last run took, from its calls of Python."""
        return [step for call in self.calls for step, sign in SIGNS.items() if sign in call]


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def assert_refused(done, *words):
    assert done.returncode == 1, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_an_interpreter_or_compiler_that_cannot_serve_is_refused_before_anything_is_touched(
    checkout,
):
    assert_refused(checkout.run(PYTHON="python9"), "PYTHON=python9: not found")
    (checkout.bin / "c++").unlink()
    assert_refused(checkout.run(), "no C++ compiler", "apt-get install g++")
    assert_refused(checkout.run(FAIRSEQ="sources"), "FAIRSEQ=sources: must be source here")
    checkout.patch("sys.version_info = (3, 8, 18, 'final', 0)")
    assert_refused(checkout.run(), "3.8", ">= 3.11", "PYTHON=")
    assert not (checkout.root / ".venv").exists()


def test_an_interpreter_that_was_not_tried_is_named_and_used(checkout):
    checkout.patch("import platform; platform.python_version = lambda: '3.14.0'")
    done = checkout.set_up()
    assert "Python 3.14.0 was not tried; 3.11, 3.12 and 3.13 were" in done.stdout
    assert checkout.steps == ALL_STEPS
    checkout.patch("import platform; platform.python_version = lambda: '3.13.0'")
    assert "not tried" not in checkout.set_up().stdout


def test_a_second_run_does_nothing(checkout):
    first = checkout.set_up()
    assert checkout.steps == ALL_STEPS
    assert [line for line in first.stdout.splitlines() if re.search(r" \d+ s$", line)], (
        "a line with seconds per step"
    )
    second = checkout.set_up()
    assert checkout.calls == []
    assert "up to date" in second.stdout


@pytest.mark.parametrize(
    ("file", "steps"),
    [
        ("scripts/requirements/build.txt", ALL_STEPS),
        ("scripts/requirements/fairseq_source.txt", ALL_STEPS[3:]),
        ("scripts/requirements/test.txt", ALL_STEPS[4:]),
        ("pyproject.toml", ALL_STEPS[5:]),
    ],
)
def test_a_changed_pin_redoes_its_step_and_what_rests_on_it(checkout, file, steps):
    checkout.set_up()
    with open(checkout.root / file, "a") as out:
        out.write("# changed\n")
    checkout.set_up()
    assert checkout.steps == steps


def test_a_failed_step_is_named_and_resumed(checkout):
    failed = checkout.run(FAKE_FAIL="runtime.txt", FAKE_ERROR="Max retries exceeded")
    assert_refused(failed, "what fairseq and the tests need", "Max retries exceeded", "setup.log")
    checkout.set_up()
    assert checkout.steps == ["packages", "project", "check"]


@pytest.mark.parametrize("harm", ["interpreter gone", "moved"])
def test_a_broken_venv_is_rebuilt(checkout, harm):
    checkout.set_up()
    if harm == "moved":
        checkout.root = checkout.root.rename(checkout.root.with_name("elsewhere"))
    else:
        (checkout.root / ".venv/bin/python").unlink()
        (checkout.root / ".venv/bin/python").symlink_to("/no/such/python")
    checkout.set_up()
    assert checkout.steps == ALL_STEPS


@pytest.mark.skipif(not shutil.which("flock"), reason="needs flock(1)")
def test_two_runs_at_once_do_the_work_once(checkout):
    runs = [checkout.start(), checkout.start()]
    outputs = [process.communicate(timeout=60)[0] for process in runs]
    assert [process.returncode for process in runs] == [0, 0]
    assert checkout.steps == ALL_STEPS
    assert sum("up to date" in output for output in outputs) == 1


def test_torch_is_what_was_asked_for(checkout):
    (wheel := checkout.root.parent / "torch 2.whl").touch()
    for asked, installed in (
        ("2.11.0 --index-url I", "torch==2.11.0 --index-url I"),
        ("torch 2.whl", str(wheel)),
    ):
        checkout.set_up(TORCH=asked)
        assert [call for call in checkout.calls if call.endswith(f" {installed}")]
        assert "torch" not in checkout.steps, "not the pin"


def test_another_build_of_fairseq_leaves_torch_alone(checkout):
    checkout.patch(LINUX.replace("2.28", "2.9"))
    assert_refused(checkout.run(FAIRSEQ="wheel"), "FAIRSEQ=wheel: must be source here")
    checkout.set_up()
    checkout.patch(f"{LINUX}; sys.version_info = (3, 12, 1, 'final', 0)")
    checkout.set_up(FAIRSEQ="wheel")
    assert checkout.steps == ALL_STEPS[3:]
    assert any("uninstall" in call and "fairseq-fixed" in call for call in checkout.calls)


def test_choices_are_remembered_until_others_are_made(checkout):
    checkout.interpreter("python3.99")
    checkout.set_up(TORCH="2.11.0", PYTHON="python3.99")
    checkout.set_up()
    assert checkout.steps == []
    checkout.set_up(TORCH="")
    assert checkout.steps == ALL_STEPS
    checkout.set_up(PYTHON="")
    assert checkout.steps == ALL_STEPS


@pytest.mark.parametrize(
    "version, chosen", [((3, 11), "wheel"), ((3, 12), "wheel"), ((3, 13), "source")]
)
def test_fairseq_is_a_wheel_where_there_is_one(checkout, version, chosen):
    checkout.patch(
        f"{LINUX}; sys.version_info = {(*version, 1, 'final', 0)}; os.path.exists = lambda path: "
        "True"
    )
    if chosen == "wheel":
        (checkout.bin / "c++").unlink()
    checkout.set_up(FAIRSEQ="")
    assert any(call.endswith(f"fairseq_{chosen}.txt") for call in checkout.calls)


def test_the_interpreters_own_torch_is_used(checkout):
    checkout.patch(
        "sys.prefix = sys.base_prefix; importlib.metadata.version = lambda name: '2.11.0+local'"
    )
    done = checkout.set_up()
    assert "torch 2.11.0+local of" in done.stdout
    assert "--system-site-packages" in checkout.calls[0]
    assert "torch" not in checkout.steps
    checkout.set_up()
    assert checkout.steps == []


def test_test_sh_leaves_slow_tests_out_and_passes_the_rest_on(checkout):
    checkout.set_up()
    assert checkout.run("test.sh", "tests/ops", "-k", "a b").returncode == 0
    command = "-m pytest -n auto --maxprocesses 4 --dist worksteal"
    lint = ["-m ruff check .", "-m ruff format --check .", "-m mypy", "-S warning scripts/demo.sh"]
    assert [call[: len(expected)] for call, expected in zip(checkout.calls, lint)] == lint
    assert checkout.calls[4:] == [f"{command} -m not slow tests/ops -k a b"]
    assert checkout.run("test.sh", "--all", "-x").returncode == 0
    assert checkout.calls[-1] == f"{command} -x"
    assert checkout.run("test.sh", FAKE_FAIL="ruff check").returncode != 0
    assert checkout.calls[-1].startswith("-m pytest")  # all the same
