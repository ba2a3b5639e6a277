#!/usr/bin/env bash
# Train on multi-query associative recall; --help lists the flags. The model goes to the folder SAVE.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python=$here/../../.venv/bin/python
[[ -x $python ]] || python=python3
exec ${DRY_RUN:+echo} "$python" "$here/run.py" train "$@"
