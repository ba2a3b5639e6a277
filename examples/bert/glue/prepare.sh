#!/usr/bin/env bash
# Prepare GLUE and a pre-trained model in DATA, from archives that are fetched or in the folder ARCHIVES. See --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../common/recipe.sh"
exec "$PYTHON" -m bert.glue.prepare "$@"
