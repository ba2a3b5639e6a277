#!/usr/bin/env bash
# Make or update .venv/reach, other people's models, and .venv/jupyter, what runs notebooks. `scripts/test.sh --all` needs
# them, and nothing else does. A program sees such a folder if PYTHONPATH names it. They are two because transformers
# imports the torchvision of the first one, which does not load beside a CPU torch.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

install() {
    local file=$1 folder=$2 wanted
    wanted=$(cat "$file" && .venv/bin/python --version)
    if [[ -f $folder/.made && $(<"$folder/.made") == "$wanted" ]]; then return; fi

    # --no-deps: reach.txt says why. The note is written last, so a broken installation begins anew.
    rm -rf -- "$folder"
    .venv/bin/python -m pip install --quiet --no-deps --target "$folder" -r "$file"
    printf '%s\n' "$wanted" >"$folder/.made"
}

install scripts/requirements/reach.txt .venv/reach
install scripts/requirements/notebooks.txt .venv/jupyter
