#!/usr/bin/env bash
# Prepare SQuAD 1.1 and a pre-trained BERT in DATA, from archives that are fetched or in the folder ARCHIVES. See
# --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../common/recipe.sh"
exec "$PYTHON" -m bert.squad.prepare "$@"
