#!/usr/bin/env bash
# Run the default suite with another torch and other transformers than the pinned ones:
#
#     scripts/development/other_versions.sh newest    the newest that pip finds, and the newest PEFT beside it
#     scripts/development/other_versions.sh lowest    the lowest that pyproject.toml allows
#
# Words after it go to pytest. TORCH_INDEX names an index for torch alone, such as that of its builds without CUDA.
#
# It changes .venv: `rm -r .venv` and scripts/setup.sh bring the pinned versions back.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

lowest() { # NAME: the lower bound of a package in pyproject.toml
    sed -n "s/.*\"$1>=\([0-9.]*\)\".*/\1/p" pyproject.toml
}

case "${1-}" in
    # transformers refuses a PEFT that is too old for it.
    newest) torch=torch hugging_face=(transformers peft) ;;
    lowest) torch="torch==$(lowest torch)" hugging_face=("transformers==$(lowest transformers)") ;;
    *)
        echo "other_versions.sh: takes 'newest' or 'lowest', got '${1-}'" >&2
        exit 2
        ;;
esac
shift

TORCH="$torch${TORCH_INDEX:+ --index-url $TORCH_INDEX}" scripts/setup.sh
.venv/bin/python -m pip install --quiet --upgrade "${hugging_face[@]}"
.venv/bin/python -m pip list | grep -E '^(torch|transformers|tokenizers|huggingface_hub|accelerate|peft|triton) '

# test_supply.py compares .venv with the pins, which this script has just left.
.venv/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal -m 'not slow' --ignore tests/test_supply.py "$@"
