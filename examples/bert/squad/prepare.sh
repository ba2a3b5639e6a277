#!/usr/bin/env bash
# SQuAD 1.1 and a pre-trained BERT for fairseq: fetched, or taken from the folder ARCHIVES; into DATA. See --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../common/recipe.sh"
exec "$PYTHON" -m bert.squad.prepare "$@"
