#!/usr/bin/env bash
# Print the perplexity of the One Billion Word benchmark's test set (--gen-subset valid or heldout: of another set). The
# last line is per word; an end of line is a word. The model is in the folder SAVE (AVERAGE=n: the average of its last n
# checkpoints; default: train.sh's for MODEL) or the file CHECKPOINT.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
source "$ROOT/examples/lm1b/form.sh"

checkpoint=$(find_checkpoint "$default_arch")
arch=$default_arch
[[ ${DRY_RUN:-} ]] || arch=$("$PYTHON" -m lm1b.architecture "$checkpoint")
form=$(form_of "$arch")
require_prepared "$DATA/$form"
check_subset "$DATA/$form" .idx "$@"

if has_memory "$arch"; then # as its authors evaluate: windows as in training, 128 words of memory
    flags=("${TRANSFORMER_XL[@]}" --tokens-per-sample 32 --model-overrides "{'mem_len': 128, 'same_length': True}")
else
    if [[ $form == word ]]; then length=512; else length=256; fi
    flags=(--tokens-per-sample "$length" --sample-break-mode none --max-tokens 4096 --required-batch-size-multiple 1)
fi
evaluate_lm lm1b.perplexity "$DATA/$form" "$checkpoint" --softmax-batch 1024 "${flags[@]}" "$@"
