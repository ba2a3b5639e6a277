#!/usr/bin/env bash
# Print the losses of pre-training on the validation set (--valid-subset test: on WikiText-2's test set) in bits, and
# the entropy of the set's pieces. The model is in the folder SAVE, phase VARIANT (AVERAGE=n: the average of its last n
# checkpoints), or the file CHECKPOINT.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../common/recipe.sh"
source "$ROOT/examples/bert/pretraining/phase.sh"

checkpoint=$(find_last_checkpoint)
machine=$(machine_flags)
require_same_pieces "$DATA/binary/dict.txt" "$checkpoint"

# shellcheck disable=SC2086 # $machine is no flag or one
set -- "$DATA/binary" --user-dir "$ROOT/examples/bert" --task bert_pretraining --path "$checkpoint" $machine \
    --valid-subset valid --batch-size 64 --required-batch-size-multiple 1 --log-format json "$@"
if [[ ${DRY_RUN:-} ]]; then
    run fairseq-validate "$@"
else # the task's settings, --tokens-per-sample too, are the checkpoint's
    run fairseq-validate "$@" 2>&1 | "$PYTHON" -m bert.pretraining.evaluate "$@"
fi
