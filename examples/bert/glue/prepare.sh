#!/usr/bin/env bash
# GLUE and a pre-trained model for fairseq, from the archives: fetched, or taken from the folder ARCHIVES; into DATA. See
# --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../common/recipe.sh"
exec "$PYTHON" -m bert.glue.prepare "$@"
