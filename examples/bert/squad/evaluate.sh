#!/usr/bin/env bash
# Print exact match and F1 of SQuAD 1.1's development set, as the official evaluation computes them. The model is in the
# folder SAVE or the file CHECKPOINT; the predictions are written beside it. METRIC is the number of the last line: F1
# (default) or EM.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../common/recipe.sh"
case ${METRIC:=F1} in
    F1 | EM) ;;
    *) fail "METRIC=$METRIC: must be F1 or EM, the number of the last line" ;;
esac
require_prepared "$DATA/text"

checkpoint=$(find_checkpoint mixhead_bert_base)
machine=$(machine_flags)
spans=${checkpoint%.pt}.squad/spans.jsonl
[[ ${DRY_RUN:-} ]] || mkdir -p -- "${spans%/*}"

# shellcheck disable=SC2086 # $machine is no flag or one
run fairseq-validate "$DATA/text" --user-dir "$ROOT/examples/bert" --task squad --path "$checkpoint" $machine \
    --valid-subset valid --nbest-file "$spans" --distributed-world-size 1 \
    --batch-size 64 --required-batch-size-multiple 1 --log-format simple --log-interval 50 "$@"
[[ ${DRY_RUN:-} ]] || METRIC=$METRIC "$PYTHON" -m bert.squad.evaluate "$DATA/text" "$spans" "$@"
