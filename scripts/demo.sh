#!/usr/bin/env bash
# Train fairseq's model and the Mixhead one with the same flags, and print both scores.
#   scripts/demo.sh                  translate German to English, on generated text; ends in BLEU
#   DATA=folder scripts/demo.sh      the same on {train,valid,test}.{de,en} of that folder
#   scripts/demo.sh --help           the flags
set -euo pipefail

if [[ ${DATA-} ]]; then DATA=$(realpath -- "$DATA"); fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
exec .venv/bin/python examples/demo/demo.py "$@"
