#!/usr/bin/env bash
# Check every package in .venv for known vulnerabilities, with pip-audit and PyPI's database.
# The exit status is 0 only if every package is in the database and has no known vulnerability.
# Flags are those of pip-audit; `-s osv` names another database.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

scripts/setup.sh
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# pip-audit itself must not be among the audited packages.
.venv/bin/python -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet pip-audit==2.10.1
# The database has neither this project nor suffixes of builds, such as torch 2.13.0+cpu.
.venv/bin/python -m pip list --format=freeze --exclude-editable | sed 's/+.*//' >"$folder/installed.txt"
"$folder/venv/bin/python" -m pip_audit --strict --no-deps --disable-pip -r "$folder/installed.txt" "$@"
