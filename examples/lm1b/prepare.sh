#!/usr/bin/env bash
# The One Billion Word benchmark for fairseq, from its archive: fetched, or taken from the folder ARCHIVES; into
# DATA/word and DATA/subword. See --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
exec "$PYTHON" -m lm1b.prepare "$@"
