#!/usr/bin/env bash
# Train on Multi30k De-En: 2+2 layers, d 128, 32 heads of size 4. Minutes on a CPU; 1,500 tokens an update, which
# several workers share. The default is Mixhead B in every attention; the others are in README.md.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
require_prepared "$DATA/binary"

default=mixhead_transformer
save=$(chosen_save "$default" "$@")
machine=$(machine_flags "$@")
tokens=$(share 1500)

# shellcheck disable=SC2086 # $machine is several flags
run fairseq-train "$DATA/binary" --user-dir "$PLUGIN" --save-dir "$save" \
    --arch "$default" --share-all-embeddings \
    --encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 128 --encoder-ffn-embed-dim 512 \
    --encoder-attention-heads 32 --decoder-attention-heads 32 --dropout 0.1 \
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1 \
    --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0 \
    --lr 3e-3 --lr-scheduler inverse_sqrt --warmup-updates 200 \
    --max-tokens "$tokens" --update-freq 1 --max-update 1600 \
    --keep-last-epochs 5 --required-batch-size-multiple 1 \
    $machine "$@"
