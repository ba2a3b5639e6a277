#!/usr/bin/env bash
# Asks PyPI's database of known vulnerabilities, by pip-audit, about everything that is installed in .venv.
# Ends with 0 only if each package was found there and none has a known one; what could not be asked is an error.
#
#   scripts/audit.sh                 needs the network
#   scripts/audit.sh -s osv          anything else is pip-audit's: another database
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# In a folder of its own: what audits is not among what is audited.
.venv/bin/python -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet pip-audit==2.10.1
# No database has this project itself, nor a build's suffix: torch 2.13.0+cpu.
.venv/bin/python -m pip list --format=freeze --exclude-editable | sed 's/+.*//' >"$folder/installed.txt"
"$folder/venv/bin/python" -m pip_audit --strict --no-deps --disable-pip -r "$folder/installed.txt" "$@"
