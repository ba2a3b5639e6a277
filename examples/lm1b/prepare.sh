#!/usr/bin/env bash
# Prepare the One Billion Word benchmark in DATA, from archives that are fetched or in the folder ARCHIVES. See --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
exec "$PYTHON" -m lm1b.prepare "$@"
