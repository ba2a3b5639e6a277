#!/usr/bin/env bash
# Perplexity of WikiText-103 per word, of the test set (--gen-subset valid: the other), each word with 400 or more before
# it. Of the folder SAVE (AVERAGE=n: its last n checkpoints' average) or the file CHECKPOINT; MODEL as in train.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
data=$DATA/${BREAKS:-lines}
prepared "$data"
check_subset "$data" .idx "$@"

case ${MODEL:=baevski} in
    baevski) arch=mixhead_transformer_lm_wiki103_512 ;;
    vanilla) arch=mixhead_transformer_lm ;;
    *) fail "MODEL=$MODEL: must be baevski or vanilla" ;;
esac
checkpoint=$(checkpoint "$arch")
machine=$(machine)

# shellcheck disable=SC2086 # $machine is no flag or one
evaluate_lm common.perplexity "$data" --user-dir "$PLUGIN" --path "$checkpoint" $machine \
    --gen-subset test --tokens-per-sample 512 --context-window 400 --softmax-batch 1024 \
    --batch-size 4 --required-batch-size-multiple 1 "$@"
