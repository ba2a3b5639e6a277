#!/usr/bin/env bash
# Prepare Multi30k De-En in DATA, from archives that are fetched or in the folder ARCHIVES. See --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
exec "$PYTHON" -m multi30k_de_en.prepare "$@"
