#!/usr/bin/env bash
# Perplexity of the One Billion Word benchmark's test set (--gen-subset valid, heldout: others); the last line is per
# word, an end of line being one. Of the folder SAVE (AVERAGE=n: its last n checkpoints' average) or the file
# CHECKPOINT, else of train.sh's default for MODEL.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
source "$ROOT/examples/lm1b/form.sh"

checkpoint=$(checkpoint "$default_arch")
arch=$default_arch
[[ ${DRY_RUN:-} ]] || arch=$("$PYTHON" -m lm1b.architecture "$checkpoint")
form=$(form "$arch")
prepared "$DATA/$form"
check_subset "$DATA/$form" .idx "$@"

if has_memory "$arch"; then # as its authors: windows as in training, 128 words of memory
    flags=("${TRANSFORMER_XL[@]}" --tokens-per-sample 32 --model-overrides "{'mem_len': 128, 'same_length': True}")
else
    if [[ $form == word ]]; then length=512; else length=256; fi
    flags=(--tokens-per-sample "$length" --sample-break-mode none --max-tokens 4096 --required-batch-size-multiple 1)
fi
machine=$(machine)

# shellcheck disable=SC2086 # $machine is no flag or one
evaluate_lm lm1b.perplexity "$DATA/$form" --user-dir "$PLUGIN" --path "$checkpoint" $machine \
    --gen-subset test --softmax-batch 1024 "${flags[@]}" "$@"
