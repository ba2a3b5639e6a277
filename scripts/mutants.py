#!/usr/bin/env python3
"""Break the code by simple rules, one place at a time, and tell which tests notice.

    scripts/mutants.py mixhead_plugin/ops/masks.py      every fault in these files
    scripts/mutants.py --sample 50                      50 of all faults in the package, drawn by --seed
    scripts/mutants.py --list ...                       print the faults

A fault is one expression that a rule of RULES changes, such as `a + b` to `a - b`. Faults are made in a temporary
worktree of HEAD, never in the user's files. The tests of the file run, which have its name, or else those of its
folder; TESTS has the exceptions. First they run without a fault. A run that takes longer than --limit counts as
noticed. The exit status is 1 if a fault is unnoticed. Some of them change nothing: a person has to look.
"""

import argparse
import ast
import contextlib
import copy
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[1]
NO_TESTS = 5  # pytest's status where nothing is selected
# Files whose tests have other names.
TESTS = {
    "mixhead_plugin/ops/": ("tests/ops/test_attention.py",),
    "mixhead_plugin/ops/blockwise/": ("tests/ops/test_blockwise.py", "tests/ops/test_attention.py"),
    "mixhead_plugin/ops/triton/": ("tests/ops/test_triton.py", "tests/ops/test_triton_verify.py"),
    "mixhead_plugin/parts/": ("tests/modules/test_head_mixing.py", "tests/modules/test_attention.py"),
    "mixhead_plugin/hf/": ("tests/hf/test_definition.py", "tests/hf/test_heads.py", "tests/hf/test_mixing.py"),
    "mixhead_plugin/nn.py": ("tests/test_nn.py",),
    "mixhead_plugin/options.py": ("tests/test_options.py", "tests/models/test_families.py"),
}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
OPERATORS |= {ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
OPERATORS |= {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn}
OPERATORS |= {ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And}


def _operator(node: ast.AST) -> ast.AST | None:
    """Return the expression with another operator."""
    found = node.ops[0] if isinstance(node, ast.Compare) else getattr(node, "op", None)
    if isinstance(node, ast.AugAssign) or type(found) not in OPERATORS:
        return None
    changed, other = copy.deepcopy(node), OPERATORS[type(found)]()
    if isinstance(node, ast.Compare):
        changed.ops[0] = other
    else:
        changed.op = other
    return changed


def _number(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, (bool, int, float)):
        return None
    return ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)


def _negation(node: ast.AST) -> ast.AST | None:
    is_negation = isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.Invert))
    return node.operand if is_negation else None


def _call(node: ast.AST) -> ast.AST | None:
    """Return the object of a method of tensors instead of its result."""
    methods = ("transpose", "t", "detach", "clamp", "clamp_min", "masked_fill", "square", "sqrt", "abs", "flip", "mean")
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods
    return node.func.value if is_method else None


def _keyword(node: ast.AST) -> ast.AST | None:
    """Return a call without its last keyword."""
    if not isinstance(node, ast.Call) or not node.keywords or node.keywords[-1].arg is None:
        return None
    changed = copy.copy(node)
    changed.keywords = node.keywords[:-1]
    return changed


RULES: Sequence[Callable[[ast.AST], ast.AST | None]] = (_operator, _number, _negation, _call, _keyword)


class Fault(NamedTuple):
    file: str
    line: int
    rule: str
    start: int  # bytes of the file
    stop: int
    substitute: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.rule[1:]} {self.substitute}"


def faults(file: str, root: Path = ROOT) -> list[Fault]:
    """Return the faults of a file, which are outside of documentation, annotations and messages."""
    source = (root / file).read_bytes()
    starts = [0, *(found.end() for found in re.finditer(b"\n", source))]
    tree, skipped, found = ast.parse(source), set(), []
    for node in ast.walk(tree):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            skipped |= set() if part is None else set(ast.walk(part))
        if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert)):
            skipped |= set(ast.walk(node))
    for node in ast.walk(tree):
        for change in RULES if isinstance(node, ast.expr) and node not in skipped else ():
            if (changed := change(node)) is not None:
                start, stop = (
                    starts[line - 1] + column
                    for line, column in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
                )
                found.append(Fault(file, node.lineno, change.__name__, start, stop, f"({ast.unparse(changed)})"))
    return sorted(found, key=lambda fault: fault.start)


def broken(fault: Fault, root: Path) -> bytes:
    """Return the fault's file with the fault."""
    source = (root / fault.file).read_bytes()
    return source[: fault.start] + fault.substitute.encode() + source[fault.stop :]


def tests_of(file: str) -> tuple[str, ...]:
    """Return the tests of a file."""
    path = Path(file)
    own = Path("tests", *path.parts[1:-1], f"test_{path.name}")
    named = (str(own),) if (ROOT / own).exists() else ()
    fitting = [prefix for prefix in TESTS if file.startswith(prefix)]
    if fitting:
        return tuple(dict.fromkeys((*named, *TESTS[max(fitting, key=len)])))
    return named or (str(own.parent),)


def fail(message: str) -> NoReturn:
    print(f"mutants: error: {message}", file=sys.stderr)
    sys.exit(2)


def git(*words: str) -> None:
    subprocess.run(["git", "-C", str(ROOT), *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def worktree() -> Iterator[Path]:
    """Yield a worktree of HEAD that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        git("worktree", "add", "--detach", str(tree), "HEAD")
        try:
            if (ROOT / ".venv").exists():
                (tree / ".venv").symlink_to((ROOT / ".venv").resolve())
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def write(path: Path, content: bytes) -> None:
    """Write a module; Python would take an old .pyc for one of the same size and second."""
    path.write_bytes(content)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def failing_test(tree: Path, tests: Sequence[str], limit: float) -> str | None:
    """Return the first test that fails, 'timeout', or None if all pass."""
    own = ROOT / ".venv" / "bin" / "python"
    command = [str(own if own.exists() else sys.executable), "-m", "pytest", "-x", "-q", "-n", "0", "-m", "not slow"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        ended = subprocess.run(
            [*command, "-p", "no:cacheprovider", *tests], cwd=tree, env=environment, text=True, timeout=limit,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace", check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:  # the launcher of tests/launcher.py ends its commands when pytest is killed
        return "timeout"
    if ended.returncode in (0, NO_TESTS):
        return None
    named = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", ended.stdout, re.MULTILINE)
    return named[1] if named else f"pytest ended with status {ended.returncode}"


def noticed(fault: Fault, tree: Path, limit: float) -> str:
    """Return the first test that notices the fault, or UNNOTICED."""
    path = tree / fault.file
    whole = path.read_bytes()
    write(path, broken(fault, tree))
    try:
        return failing_test(tree, tests_of(fault.file), limit) or "UNNOTICED"
    finally:
        write(path, whole)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="files of the package (default: all)")
    parser.add_argument("--list", action="store_true", help="print the faults")
    parser.add_argument("--sample", type=int, metavar="N", help="try this many of the faults")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=900, help="seconds of a run (default: %(default)s)")
    args = parser.parse_args(words)
    files = args.files or sorted(str(path.relative_to(ROOT)) for path in (ROOT / "mixhead_plugin").rglob("*.py"))
    if unknown := [file for file in files if not (ROOT / file).is_file()]:
        fail(f"{unknown[0]}: no such file")
    chosen = [fault for file in files for fault in faults(file)]
    if args.sample is not None:
        chosen = random.Random(args.seed).sample(chosen, min(args.sample, len(chosen)))
    if args.list:
        for fault in chosen:
            print(f"{fault.name}: {' '.join(tests_of(fault.file))}")
        return 0
    for stop in (signal.SIGINT, signal.SIGTERM):  # as an exception, so that the worktree is removed
        signal.signal(stop, lambda number, _: sys.exit(128 + number))
    unnoticed = []
    with worktree() as tree:
        for tests in dict.fromkeys(tests_of(fault.file) for fault in chosen):
            print(f"without a fault: {' '.join(tests)}", flush=True)
            if test := failing_test(tree, tests, args.limit):
                fail(f"{test}: fails without a fault")
        for number, fault in enumerate(chosen, 1):
            test = noticed(fault, tree, args.limit)
            print(f"[{number}/{len(chosen)}] {fault.name}: {test}", flush=True)
            unnoticed += [fault.name] * (test == "UNNOTICED")
    print(f"\n{len(unnoticed)} of {len(chosen)} unnoticed", *unnoticed, sep="\n")
    return int(bool(unnoticed))


if __name__ == "__main__":
    sys.exit(main())
