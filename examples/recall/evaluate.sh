#!/usr/bin/env bash
# Print the metrics of the model in the folder SAVE, or of the file CHECKPOINT, on test data or of --gen-subset valid.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
require_cpu_alone
run "$PYTHON" "$ROOT/examples/recall/run.py" evaluate "$@"
