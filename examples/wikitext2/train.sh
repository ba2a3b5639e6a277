#!/usr/bin/env bash
# WikiText-2, vanilla Transformer, 16 layers, 8 heads, 256 tokens: Mixhead table 2, first row, column B (82.93 on test).
# 8 batches of 2048 tokens an update, on 1, 2, 4 or 8 GPUs, or on the CPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
data=$DATA/${BREAKS:-lines}
prepared "$data"

save=$(save_folder mixhead_transformer_lm_wiki2 "$@")
machine=$(machine "$@")
update_freq=$(update_freq 8 "$@")

# shellcheck disable=SC2086 # $machine is several flags
run fairseq-train "$data" --user-dir "$PLUGIN" --save-dir "$save" $machine \
    --task language_modeling --tokens-per-sample 256 --sample-break-mode none \
    --arch mixhead_transformer_lm_wiki2 \
    --optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.01 --clip-norm 0.0 \
    --lr 0.0005 --lr-scheduler inverse_sqrt --warmup-updates 4000 --warmup-init-lr 1e-07 \
    --max-tokens 2048 --update-freq "$update_freq" --max-update 20000 --required-batch-size-multiple 1 \
    --keep-last-epochs 5 --log-interval 50 "$@"
