#!/usr/bin/env bash
# Build the site into build/site, or show it while you write.
#
#     scripts/docs.sh          build/site/index.html; a browser opens it without a server, but then search does not work
#     scripts/docs.sh serve    http://localhost:8000, with search; it follows what you write
#
# zensical.toml has the navigation. The tools live in build/docs-venv, an environment of their own at pinned versions. It
# needs neither torch nor fairseq, because docstrings are read and nothing is imported. PYTHON names another interpreter.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

if (($# > 1)) || [[ ${1-} != "" && ${1-} != serve ]]; then
    echo "docs.sh: takes 'serve' or nothing, got '$*'" >&2
    exit 2
fi

readonly VENV=build/docs-venv PINS=scripts/requirements/docs.txt
if ! cmp --silent "$PINS" "$VENV/installed.txt"; then
    echo "docs.sh: installing what builds the site into $VENV"
    rm -rf "$VENV"
    "${PYTHON:-python3}" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$PINS"
    cp "$PINS" "$VENV/installed.txt"
fi

collect_pages() { "$VENV/bin/python" scripts/development/site_pages.py build/pages; }

# Made anew: site_pages.py or mdformat may be another than in the last build, and only pages that changed are written.
rm -rf build/pages
collect_pages
if [[ ${1-} == serve ]]; then
    # A page that is half written may fail; the next look has it whole.
    while sleep 2; do collect_pages || true; done &
    trap 'kill %1' EXIT
    "$VENV/bin/zensical" serve
    exit
fi

rm -rf build/site
# --clean: without it, pages that did not change are not read again, and their faults not told.
"$VENV/bin/zensical" build --clean --strict 2>&1 | tee build/docs.log
# These faults of docstrings do not end a strict build.
if grep -q '^griffe: ' build/docs.log; then
    echo "docs.sh: docstrings name arguments that their functions do not have (above)" >&2
    exit 1
fi
echo "docs.sh: build/site/index.html"
