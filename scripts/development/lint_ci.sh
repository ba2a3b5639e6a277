#!/usr/bin/env bash
# Read what only other machines run: workflows, issue templates and Dockerfiles. It finds wrong keys, actions that are not
# pinned, rights that are too wide, and bad habits in Dockerfiles.
#
# The tools live in build/lint-venv at pinned versions. PYTHON names another interpreter.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

readonly VENV=build/lint-venv PINS=scripts/requirements/lint.txt
if ! cmp --silent "$PINS" "$VENV/installed.txt"; then
    rm -rf "$VENV"
    "${PYTHON:-python3}" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$PINS"
    cp "$PINS" "$VENV/installed.txt"
fi

status=0
schema() { "$VENV/bin/check-jsonschema" --builtin-schema "vendor.$1" "${@:2}" || status=1; }
schema github-workflows .github/workflows/*.yml
schema dependabot .github/dependabot.yml
schema github-issue-forms .github/ISSUE_TEMPLATE/fault.yml .github/ISSUE_TEMPLATE/gpu_report.yml
schema github-issue-config .github/ISSUE_TEMPLATE/config.yml
"$VENV/bin/zizmor" --offline --pedantic .github || status=1
"$VENV/bin/hadolint" docker/*.Dockerfile || status=1
exit "$status"
