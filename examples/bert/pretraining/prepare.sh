#!/usr/bin/env bash
# Text for BERT's pre-training, WikiText-2 or your own, in WordPiece; into DATA. See --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../common/recipe.sh"
exec "$PYTHON" -m bert.pretraining.prepare "$@"
