"""Run test files of torch, transformers or PEFT, plain and with mixed heads; print counts.

    cd scripts/development
    python foreign_tests.py torch CHECKOUT test/nn/test_multihead_attention.py
    python foreign_tests.py peft CHECKOUT tests/test_decoder_models.py -- -k Llama

Other people's tests know cases that ours do not. A mixing starts as the identity, so a test that
passes with the plain model should pass with the mixed one, or be refused in one line. The command
lists each test that passes in the plain run alone, with its message. `foreign_plugin.py` says how
the models of each library get mixed.

CHECKOUT is a source tree of the library. The library that is imported is the installed one, so take
the source of that version. torch's own `conftest.py` needs an older pytest, so its tests run
without it. The tests need packages that are no pins of this project: `expecttest` for torch's,
`parameterized`, `datasets` and `diffusers` for those of transformers and PEFT.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARIES = ("torch", "transformers", "peft")


def main() -> int:
    arguments = _arguments()
    for path in arguments.files:
        plain = _run(arguments, path, mixed=False)
        mixed = _run(arguments, path, mixed=True)
        print(path)
        print(f"  plain: {_counts(plain)}")
        print(f"  mixed: {_counts(mixed)}")
        for test, (outcome, message) in sorted(mixed.items()):
            if outcome == "failed" and plain.get(test, ("", ""))[0] == "passed":
                print(f"  passes in the plain run alone: {test}: {message}")
        sys.stdout.flush()
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Run another library's tests with plain and with mixed models."
    )
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("checkout", type=Path, help="a source tree of that library")
    parser.add_argument("files", nargs="+", help="test files, from the checkout's root")
    parser.add_argument("--head-mixing", default="position-wise", help="default: %(default)s")

    words = sys.argv[1:]
    pytest_words: list[str] = []
    if "--" in words:
        cut = words.index("--")
        words, pytest_words = words[:cut], words[cut + 1 :]

    arguments = parser.parse_args(words)
    arguments.pytest_words = pytest_words
    missing = [name for name in arguments.files if not (arguments.checkout / name).is_file()]
    if missing:
        parser.error(f"{missing[0]}: not found in {arguments.checkout}")
    return arguments


def _run(arguments: argparse.Namespace, path: str, mixed: bool) -> dict[str, tuple[str, str]]:
    """Run one test file; return outcome and message by the name of each test."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        environment = {
            **os.environ,
            "PYTHONPATH": str(HERE),
            "FOREIGN_LIBRARY": arguments.library,
            "FOREIGN_MIXING": arguments.head_mixing if mixed else "",
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, "-P", "-m", "pytest", "-q"]
        # without the settings of their pytest.ini, which ask for plugins and refuse warnings
        command += ["-o", "addopts=", "-o", "filterwarnings="]
        command += ["-p", "foreign_plugin", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", path, *arguments.pytest_words]
        if arguments.library == "torch":
            command.append("--noconftest")
        run = subprocess.run(
            command,
            cwd=arguments.checkout,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        collected = run.returncode in (0, 1)  # all passed; some failed
        if not collected:
            sys.exit(
                f"{path}: pytest ended with status "
                f"{run.returncode}:\n{run.stdout[-2000:]}{run.stderr[-2000:]}"
            )
        return dict(_outcome(case) for case in ElementTree.parse(report).iter("testcase"))


def _outcome(case: ElementTree.Element) -> tuple[str, tuple[str, str]]:
    name = f"{case.get('classname')}.{case.get('name')}"
    for kind, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        element = case.find(kind)
        if element is not None:
            message = (element.get("message") or "").strip()
            return name, (outcome, message.splitlines()[0] if message else "")
    return name, ("passed", "")


def _counts(outcomes: dict[str, tuple[str, str]]) -> str:
    counts = Counter(outcome for outcome, _ in outcomes.values())
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))


if __name__ == "__main__":
    sys.exit(main())
