#!/usr/bin/env bash
# Print the perplexity per word of WikiText-2's test set (--gen-subset valid: of the validation set). Each word has 192
# or more before it; with MODEL=transformer-xl 640. The model is in the folder SAVE (AVERAGE=n: the average of its last
# n checkpoints) or the file CHECKPOINT; MODEL as in train.sh. With MODEL=masked it is the perplexity of masked words, of
# which the model sees both sides; the same words are masked for every model.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
data=$DATA/${BREAKS:-lines}
require_prepared "$data"
check_subset "$data" .idx "$@"

case ${MODEL:=vanilla} in
    vanilla)
        arch=mixhead_transformer_lm_wiki2
        flags=(--tokens-per-sample 256 --context-window 192 --batch-size 16 --required-batch-size-multiple 1)
        ;;
    transformer-xl)
        arch=mixhead_transformer_xl_wiki2
        flags=("${TRANSFORMER_XL[@]}")
        ;;
    masked) arch=l2_gau_roberta ;;
    *) fail "MODEL=$MODEL: must be vanilla, transformer-xl or masked" ;;
esac

checkpoint=$(find_checkpoint "$arch")
if [[ $MODEL == masked ]]; then
    evaluate_masked "$data" "$checkpoint" "$@"
else
    evaluate_lm common.perplexity "$data" "$checkpoint" "${flags[@]}" "$@"
fi
