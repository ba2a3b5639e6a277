#!/usr/bin/env bash
# Train on multi-query associative recall; --help lists the flags. The model goes to the folder SAVE.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
require_cpu_alone
run "$PYTHON" "$ROOT/examples/recall/run.py" train "$@"
