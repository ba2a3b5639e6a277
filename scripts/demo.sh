#!/usr/bin/env bash
# Train fairseq's model and the Mixhead one with the same flags, and print both scores: examples/demo/README.md.
set -euo pipefail

if [[ ${DATA-} ]]; then DATA=$(realpath -- "$DATA"); fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
exec .venv/bin/python examples/demo/demo.py "$@"
