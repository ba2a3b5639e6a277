#!/usr/bin/env bash
# Prepare WikiText-2 in DATA, from archives that are fetched or in the folder ARCHIVES. See --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
exec "$PYTHON" -m wikitext2.prepare "$@"
