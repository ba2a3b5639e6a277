#!/usr/bin/env bash
# Multi30k De-En for fairseq, from its archives: fetched, or taken from the folder ARCHIVES; into DATA. See --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
exec "$PYTHON" -m multi30k_de_en.prepare "$@"
