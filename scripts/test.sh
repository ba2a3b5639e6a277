#!/usr/bin/env bash
# Lint, format and tests, in an environment that scripts/setup.sh makes where it is missing or out of date.
#
#   scripts/test.sh                  all tests but those marked slow
#   scripts/test.sh --all            those too
#   scripts/test.sh tests/ops -x     anything else is pytest's (paths from the top of the checkout)
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

marks=(-m 'not slow')
arguments=()
for argument in "$@"; do
    case "$argument" in
        --all) marks=() ;;
        *) arguments+=("$argument") ;;
    esac
done

scripts/setup.sh

# The tests start processes of their own: with a thread per core in each, they would wait for one another. What the
# caller exports (clusters set OMP_NUM_THREADS) does not count.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

# Everything runs whatever failed before, and pytest last: its summary is what the reader looks for.
status=0
.venv/bin/python -m ruff check . || status=1
.venv/bin/python -m ruff format --check . || status=1
if ((status)); then echo "test.sh: ruff found faults (above); this run fails, whatever the tests below say" >&2; fi
# ${x[@]+...}: an empty array counts as unset before bash 4.4.
# A process per core and one more (tests/conftest.py), each of some hundred MB, and of the tests what the others have not
# begun; `-n 0`: all in this one.
.venv/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal \
    ${marks[@]+"${marks[@]}"} ${arguments[@]+"${arguments[@]}"} || status=$?
exit "$status"
