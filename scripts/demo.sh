#!/usr/bin/env bash
# Train fairseq's model and the Mixhead one with the same flags, and print both scores: examples/demo/README.md.
set -euo pipefail

# No cd: DATA, --folder and PYTHON may be relative to the caller's folder.
root=$(dirname -- "${BASH_SOURCE[0]}")/..

# Setting up takes minutes, so --help and a wrong flag answer before. Without a Python, setup.sh says what it needs.
python=${PYTHON:-python3}
if command -v -- "$python" >/dev/null; then
    "$python" "$root/examples/demo/demo_flags.py" "$@"
    for argument in "$@"; do
        if [[ $argument == -h || $argument == --help ]]; then exit; fi
    done
fi

"$root/scripts/setup.sh"
exec "$root/.venv/bin/python" "$root/examples/demo/demo.py" "$@"
