#!/usr/bin/env bash
# Perplexity of WikiText-2 per word, of the test set (--gen-subset valid: the other), each word with 192 or more before it.
# Of the folder SAVE (AVERAGE=n: its last n checkpoints' average) or the file CHECKPOINT.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
data=$DATA/${BREAKS:-lines}
prepared "$data"
check_subset "$data" .idx "$@"

checkpoint=$(checkpoint mixhead_transformer_lm_wiki2)
machine=$(machine)

# shellcheck disable=SC2086 # $machine is no flag or one
evaluate_lm common.perplexity "$data" --user-dir "$PLUGIN" --path "$checkpoint" $machine \
    --gen-subset test --tokens-per-sample 256 --context-window 192 \
    --batch-size 16 --required-batch-size-multiple 1 "$@"
