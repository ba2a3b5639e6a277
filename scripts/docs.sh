#!/usr/bin/env bash
# Build the site into build/site, or show it while you write.
#
#     scripts/docs.sh          build/site/index.html; it opens without a server, but then search does not work
#     scripts/docs.sh serve    http://localhost:8000, with search; pages are built again when this is run again
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
    "$VENV/bin/python" -m pip install --quiet --no-deps -r "$PINS"
    cp "$PINS" "$VENV/installed.txt"
fi

"$VENV/bin/python" scripts/development/site_pages.py build/pages
if [[ ${1-} == serve ]]; then exec "$VENV/bin/zensical" serve; fi

rm -rf build/site
"$VENV/bin/zensical" build --clean --strict 2>&1 | tee build/docs.log
# These faults of docstrings do not end a strict build.
if grep -q '^griffe: ' build/docs.log; then
    echo "docs.sh: docstrings name arguments that their functions do not have (above)" >&2
    exit 1
fi
echo "docs.sh: build/site/index.html"
