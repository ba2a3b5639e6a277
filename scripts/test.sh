#!/usr/bin/env bash
# Run linter, formatter, type checker and tests, as CONTRIBUTING.md says. scripts/setup.sh makes or updates .venv first.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

if [[ ${1-} == --all ]]; then shift; else set -- -m 'not slow' "$@"; fi
scripts/setup.sh

# Everything runs, whatever failed before; pytest runs last, so that its summary is at the end.
status=0
.venv/bin/python -m ruff check . || status=1
.venv/bin/python -m ruff format --check . || status=1
.venv/bin/python -m mypy || status=1
shopt -s globstar nullglob
.venv/bin/shellcheck -S warning scripts/**/*.sh examples/**/*.sh .ci/* || status=1
if ((status)); then echo "test.sh: ruff, mypy or shellcheck found faults (above); the run fails even if tests pass" >&2; fi
# One process more than cores (tests/conftest.py), at most 4 for the memory; idle ones take tests from the others.
# `-n 0`: a single process.
.venv/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal "$@" || status=$?
exit "$status"
