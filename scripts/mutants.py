#!/usr/bin/env python3
"""Break a file by simple rules, one place at a time, and tell which test notices.

    scripts/mutants.py mixhead_plugin/ops/masks.py                              with the tests of that name, or folder
    scripts/mutants.py mixhead_plugin/ops/masks.py tests/ops/test_attention.py  with these
    scripts/mutants.py mixhead_plugin/ops/masks.py --sample 20                  20 of the faults, always the same

A fault is one expression that a rule of RULES changes, such as `a + b` to `a - b`. It is made in a copy of the
checkout. Slow tests do not run. A run that takes longer than 15 minutes counts as noticed. The exit status is 1 if a
fault is unnoticed. Some faults change nothing: a person has to look.
"""

import argparse
import ast
import copy
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 900  # seconds of a run
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "data", "runs", "checkpoints")
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
OPERATORS |= {ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
OPERATORS |= {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn}
OPERATORS |= {ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And}


def operator(node: ast.AST) -> ast.AST | None:
    """Return the expression with another operator."""
    found = node.ops[0] if isinstance(node, ast.Compare) else getattr(node, "op", None)
    if type(found) not in OPERATORS:
        return None
    changed, other = copy.deepcopy(node), OPERATORS[type(found)]()
    if isinstance(node, ast.Compare):
        changed.ops[0] = other
    else:
        changed.op = other
    return changed


def number(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, (bool, int, float)):
        return None
    return ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)


def negation(node: ast.AST) -> ast.AST | None:
    is_negation = isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.Invert))
    return node.operand if is_negation else None


def call(node: ast.AST) -> ast.AST | None:
    """Return the object of a method of tensors instead of its result."""
    methods = ("transpose", "t", "detach", "clamp", "clamp_min", "masked_fill", "square", "sqrt", "abs", "flip", "mean")
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods
    return node.func.value if is_method else None


def keyword(node: ast.AST) -> ast.AST | None:
    """Return a call without its last keyword."""
    if not isinstance(node, ast.Call) or not node.keywords or node.keywords[-1].arg is None:
        return None
    changed = copy.copy(node)
    changed.keywords = node.keywords[:-1]
    return changed


RULES: Sequence[Callable[[ast.AST], ast.AST | None]] = (operator, number, negation, call, keyword)


def faults(source: bytes) -> dict[str, bytes]:
    """Return the source with each fault, by its name; documentation, annotations and messages have none."""
    starts = [0, *(found.end() for found in re.finditer(b"\n", source))]
    tree, skipped, found = ast.parse(source), set(), {}
    for node in ast.walk(tree):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            skipped |= set() if part is None else set(ast.walk(part))
        if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert)):
            skipped |= set(ast.walk(node))
    for node in ast.walk(tree):
        for rule in RULES if isinstance(node, ast.expr) and node not in skipped else ():
            if (changed := rule(node)) is not None:
                start, stop = (
                    starts[node.lineno - 1] + node.col_offset,
                    starts[node.end_lineno - 1] + node.end_col_offset,
                )
                text = f"({ast.unparse(changed)})"
                found[f"{node.lineno}:{node.col_offset} {text}"] = source[:start] + text.encode() + source[stop:]
    return found


def failing_test(tree: Path, tests: Sequence[str]) -> str | None:
    """Return the first test that fails, 'timeout', or None if all pass."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-n",
        "0",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    # Python would take an old .pyc for a file of the same size and second
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, errors="replace", timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    named = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", ended.stdout, re.MULTILINE)
    return (named[1] if named else f"pytest ended with status {ended.returncode}") if ended.returncode else None


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="a file of the package")
    parser.add_argument("tests", nargs="*", metavar="TEST", help="files or folders of tests")
    parser.add_argument("--sample", type=int, metavar="N", help="try this many of the faults")
    args = parser.parse_args(words)
    found = faults((ROOT / args.file).read_bytes())
    chosen = random.Random(1).sample(sorted(found), min(args.sample or len(found), len(found)))
    folder = Path("tests", *Path(args.file).parts[1:-1])
    own = folder / f"test_{Path(args.file).name}"
    tests, unnoticed = args.tests or [str(own if (ROOT / own).exists() else folder)], []
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        tree = shutil.copytree(ROOT, Path(temporary) / "tree", ignore=NOT_COPIED)
        if test := failing_test(tree, tests):
            sys.exit(f"mutants: error: {test}: fails without a fault")
        for name in chosen:
            (tree / args.file).write_bytes(found[name])
            test = failing_test(tree, tests)
            print(f"{args.file}:{name}: {test or 'UNNOTICED'}", flush=True)
            unnoticed += [name] * (test is None)
    print(f"{len(unnoticed)} of {len(chosen)} unnoticed")
    return int(bool(unnoticed))


if __name__ == "__main__":
    sys.exit(main())
