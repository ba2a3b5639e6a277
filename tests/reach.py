"""What scripts/development/reach.sh installs, for the slow tests that need it."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODELS = ROOT / ".venv" / "reach"

# timm imports torchvision, whose compiled operators do not load beside a CPU torch.
BESIDE_CPU_TORCH = """
import runpy, sys
sys.path.insert(0, "scripts")
from development.libraries_models import define_operators_of_torchvision
define_operators_of_torchvision()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
EXTRACT = "import sys; from all_minilm_l6_v2 import extract_model; extract_model(sys.argv[1])"


def installed() -> None:
    """Install it if it is missing; only one process at a time does so."""
    with (ROOT / ".venv" / "reach.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([ROOT / "scripts" / "development" / "reach.sh"], check=True)


def run(*words: str, environment: dict[str, str] | None = None) -> str:
    """Run Python in this checkout, without fear of its length; return what it prints."""
    found = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


def run_with_models(*words: str) -> str:
    """Run a program of this checkout that imports other people's models."""
    return run("-c", BESIDE_CPU_TORCH, *words, environment={"PYTHONPATH": str(MODELS)})


def extract_minilm(folder: Path) -> Path:
    """Return the folder of the pretrained model, made in `folder`."""
    run("-c", EXTRACT, str(folder), environment={"PYTHONPATH": str(MODELS)})
    return folder / "all-MiniLM-L6-v2"
