#!/usr/bin/env bash
# Prepare text for BERT's pre-training, WikiText-2 or your own, in DATA. See --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../common/recipe.sh"
exec "$PYTHON" -m bert.pretraining.prepare "$@"
