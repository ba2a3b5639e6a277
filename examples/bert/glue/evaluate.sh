#!/usr/bin/env bash
# Print the metrics of a GLUE task on its validation set; the papers' metric is last. --valid-subset valid1 is MNLI's
# mismatched set. With --valid-subset test (MNLI also test1, diagnostic) write the file for the evaluation server.
# VARIANT and MODEL as in training; the model is in the folder SAVE or the file CHECKPOINT.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../common/recipe.sh"
source "$ROOT/examples/bert/glue/task.sh"

checkpoint=$(find_checkpoint "$default_arch")
machine=$(machine_flags)

# shellcheck disable=SC2086 # $machine is no flag or one
set -- "$data" --user-dir "$ROOT/examples/bert" --task sentence_prediction --path "$checkpoint" $machine \
    --valid-subset valid --batch-size 64 --required-batch-size-multiple 1 "$@"
if [[ ${DRY_RUN:-} ]]; then
    run fairseq-validate "$@" --criterion sentence_prediction
else # does the same, and keeps the predictions
    run "$PYTHON" -m bert.glue.evaluate "$@"
fi
