#!/usr/bin/env bash
# Trains fairseq's stock model and the Mixhead one with the same flags, and sets their scores side by side.
#   scripts/demo.sh                  German-English translation on a generated corpus; ends in BLEU
#   DATA=folder scripts/demo.sh      the same on {train,valid,test}.{de,en} of that folder
#   scripts/demo.sh lm               language model of the English that every Python carries; ends in perplexity
#   scripts/demo.sh --help           what can be changed
set -euo pipefail

if [ -n "${DATA:-}" ]; then
  [ -d "$DATA" ] || { echo "demo: DATA=$DATA: no such folder" >&2; exit 2; }
  DATA=$(cd "$DATA" && pwd)
  export DATA
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
exec .venv/bin/python examples/demo/demo.py "$@"
