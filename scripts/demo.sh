#!/usr/bin/env bash
# Train fairseq's model and the Mixhead one with the same flags, and print both scores.
#   scripts/demo.sh                  translate German to English, on generated text; ends in BLEU
#   DATA=folder scripts/demo.sh      the same on {train,valid,test}.{de,en} of that folder
#   scripts/demo.sh --help           the flags
set -euo pipefail

if [ -n "${DATA:-}" ]; then
  [ -d "$DATA" ] || { echo "demo: DATA=$DATA: no such folder" >&2; exit 2; }
  DATA=$(cd "$DATA" && pwd)
  export DATA
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
exec .venv/bin/python examples/demo/demo.py "$@"
