#!/usr/bin/env bash
# IWSLT14 De-En for fairseq, from its archive: fetched, or taken from the folder ARCHIVES; into DATA. See --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
exec "$PYTHON" -m iwslt14_de_en.prepare "$@"
