#!/usr/bin/env bash
# WikiText-2 for fairseq, from its archive: fetched, or taken from the folder ARCHIVES; into DATA. See --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
exec "$PYTHON" -m wikitext2.prepare "$@"
