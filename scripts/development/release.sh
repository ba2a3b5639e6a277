#!/usr/bin/env bash
# Build a release into dist/ and check it, or upload what is there: docs/releasing.md.
#
#     scripts/development/release.sh build           a wheel and a source distribution
#     scripts/development/release.sh build v0.2.0    as above; fails unless the version is that of the tag
#     scripts/development/release.sh upload          to PyPI; in a release workflow by trusted publishing, without a password
#
# The tools live in build/release-venv at pinned versions. PYTHON names another interpreter.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

readonly VENV=build/release-venv PINS=scripts/requirements
readonly PACKAGES=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check)

usage() {
    echo "release.sh: takes 'build', 'build TAG' or 'upload', got '$*'" >&2
    exit 2
}

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' mixhead_plugin/__init__.py)
case "$# ${1-}" in
    '1 build' | '2 build' | '1 upload') ;;
    *) usage "$@" ;;
esac
if [[ $# == 2 && $2 != "v$version" ]]; then
    echo "release.sh: the tag is $2, must be v$version, the version of mixhead_plugin/__init__.py" >&2
    exit 1
fi

# test.txt and runtime.txt have the versions of what the tools need in turn.
pins() { cat "$PINS"/{build,release,test,runtime}.txt; }
if ! cmp --silent <(pins) "$VENV/installed.txt"; then
    echo "release.sh: installing the tools into $VENV"
    rm -rf "$VENV"
    "${PYTHON:-python3}" -m venv "$VENV"
    "${PACKAGES[@]}" -r "$PINS/build.txt" -r "$PINS/release.txt" -c "$PINS/test.txt" -c "$PINS/runtime.txt"
    pins >"$VENV/installed.txt" # last, so that a run that broke off is not taken for a whole one
fi

if [[ $1 == upload ]]; then
    exec "$VENV/bin/python" -m twine upload --non-interactive dist/*
fi
# Files in the wheel get the time of the commit, so that two builds of a commit give the same wheel.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
rm -rf dist
"$VENV/bin/python" -m build --no-isolation .
"$VENV/bin/python" -m twine check --strict dist/*
sha256sum dist/*
