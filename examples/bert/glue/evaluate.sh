#!/usr/bin/env bash
# The metrics of a GLUE task on its validation set (--valid-subset valid1: MNLI's mismatched one), the last line being the
# papers'; with --valid-subset test (test1, diagnostic: MNLI's others) the file for the evaluation server.
# VARIANT and MODEL as in training; of the folder SAVE or the file CHECKPOINT.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../common/recipe.sh"
source "$ROOT/examples/bert/glue/task.sh"

checkpoint=$(checkpoint "$default_arch")
machine=$(machine)

# shellcheck disable=SC2086 # $machine is no flag or one
set -- "$data" --user-dir "$ROOT/examples/bert" --task sentence_prediction --path "$checkpoint" $machine \
    --valid-subset valid --batch-size 64 --required-batch-size-multiple 1 "$@"
if [[ ${DRY_RUN:-} ]]; then
    run fairseq-validate "$@"
else # the same, which keeps the predictions
    run "$PYTHON" -m bert.glue.evaluate "$@"
fi
