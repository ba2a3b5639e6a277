#!/usr/bin/env bash
# Print the metrics of the model in the folder SAVE on test data, or of --gen-subset valid.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python=$here/../../.venv/bin/python
[[ -x $python ]] || python=python3
exec ${DRY_RUN:+echo} "$python" "$here/run.py" evaluate "$@"
