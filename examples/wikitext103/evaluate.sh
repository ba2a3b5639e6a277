#!/usr/bin/env bash
# Print the perplexity per word of WikiText-103's test set (--gen-subset valid: of the validation set). Each word has
# 400 or more before it; with MODEL=transformer-xl 640. The model is in the folder SAVE (AVERAGE=n: the average of its
# last n checkpoints) or the file CHECKPOINT; MODEL as in train.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
data=$DATA/${BREAKS:-lines}
require_prepared "$data"
check_subset "$data" .idx "$@"

flags=(--tokens-per-sample 512 --context-window 400 --batch-size 4 --required-batch-size-multiple 1)
case ${MODEL:=baevski} in
    baevski) arch=mixhead_transformer_lm_wiki103_512 ;;
    vanilla) arch=mixhead_transformer_lm ;;
    synthesizer) arch=mixhead_synthesizer_lm_wiki103 ;;
    transformer-xl) arch=mixhead_transformer_xl_wiki103 flags=("${TRANSFORMER_XL[@]}") ;;
    *) fail "MODEL=$MODEL: must be one of baevski, vanilla, transformer-xl, synthesizer" ;;
esac
checkpoint=$(find_checkpoint "$arch")
evaluate_lm common.perplexity "$data" "$checkpoint" --softmax-batch 1024 "${flags[@]}" "$@"
