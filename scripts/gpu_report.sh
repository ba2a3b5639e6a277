#!/usr/bin/env bash
# Try everything on this machine's GPU, in at most six minutes: docs/gpus.md.
#
#     scripts/gpu_report.sh                        all parts; results/gpu/<GPU>.json, .md and .log
#     scripts/gpu_report.sh --only check core      some of them
#     TRITON_INTERPRET=1 scripts/gpu_report.sh --quick    a rehearsal without a GPU
#
# It needs a Python with torch and triton and nothing else: PYTHON, or the first of python3 and .venv that has both.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

for python in ${PYTHON:-python3 .venv/bin/python}; do
    if "$python" -c 'import torch, triton' 2>/dev/null; then
        exec "$python" scripts/gpu_report.py "$@"
    fi
done
echo "gpu_report.sh: no torch and triton in ${PYTHON:-python3 and .venv}; name a Python that has them by PYTHON=" >&2
exit 1
