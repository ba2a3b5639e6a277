#!/usr/bin/env bash
# Prepare IWSLT14 De-En in DATA, from archives that are fetched or in the folder ARCHIVES. See --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
exec "$PYTHON" -m iwslt14_de_en.prepare "$@"
