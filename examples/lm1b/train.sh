#!/usr/bin/env bash
# Train on the One Billion Word benchmark.
#   MODEL=baevski         512 words: Mixhead table 3, Mixhead B (34.38 on test); 32 x 2048 tokens, half of 64 GPUs
#   MODEL=transformer-xl  32 words and a memory of 32: Mixhead table 3, Mixhead B (29.51 on test); 224 x 32 tokens
#   MODEL=fixhead         256 subwords: Fixhead of the low-rank bottleneck paper, figure 1; 8 x 4096 tokens
# --arch may be any other: <family>_transformer_lm_lm1b is trained on the subwords, the rest on the words, and
# <family>_transformer_xl* like Transformer-XL.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
source "$ROOT/examples/lm1b/form.sh"

arch=$(chosen_arch "$default_arch" "$@")
form=$(form_of "$arch")
require_prepared "$DATA/$form"
save=$(chosen_save "$arch")
machine=$(machine_flags "$@")

if has_memory "$arch"; then
    rows=$(share 224)
    # shellcheck disable=SC2086 # $machine is several flags
    run fairseq-train "$DATA/word" --user-dir "$PLUGIN" --save-dir "$save" $machine \
        --task truncated_bptt_lm --tokens-per-sample 32 --batch-size "$rows" \
        --arch "$arch" --criterion adaptive_loss --ddp-backend legacy_ddp \
        --optimizer adam --clip-norm 0.25 \
        --lr 0.00025 --lr-scheduler cosine --warmup-updates 20000 --warmup-init-lr 0 --min-lr 0.0 --max-update 500000 \
        --save-interval-updates 5000 --keep-interval-updates 5 --no-epoch-checkpoints \
        --seed 1 --log-interval 100 "$@"
elif [[ $form == word ]]; then
    update_freq=$(share_batches 32 "$@")
    # shellcheck disable=SC2086
    run fairseq-train "$DATA/word" --user-dir "$PLUGIN" --save-dir "$save" $machine \
        --task language_modeling --tokens-per-sample 512 --sample-break-mode none \
        --arch "$arch" --criterion adaptive_loss --ddp-backend legacy_ddp \
        --optimizer nag --clip-norm 0.1 --lr 1.0 --lr-scheduler cosine --lr-period-updates 137000 --t-mult 2 \
        --lr-shrink 0.6 --min-lr 1e-05 --stop-min-lr 1e-09 --warmup-updates 16000 --warmup-init-lr 1e-07 \
        --max-tokens 2048 --update-freq "$update_freq" --max-update 153000 --required-batch-size-multiple 1 \
        --save-interval-updates 2000 --keep-interval-updates 5 --no-epoch-checkpoints \
        --seed 1 --log-interval 100 "$@"
else
    update_freq=$(share_batches 8 "$@")
    # shellcheck disable=SC2086
    run fairseq-train "$DATA/subword" --user-dir "$PLUGIN" --save-dir "$save" $machine \
        --task language_modeling --tokens-per-sample 256 --sample-break-mode none \
        --arch "$arch" --criterion cross_entropy \
        --optimizer adam --adam-betas '(0.9, 0.997)' --adam-eps 1e-09 --weight-decay 0.01 --clip-norm 0.0 \
        --lr 0.001 --lr-scheduler inverse_sqrt --warmup-updates 10000 --warmup-init-lr 0 \
        --max-tokens 4096 --update-freq "$update_freq" --max-update 250000 --required-batch-size-multiple 1 \
        --save-interval-updates 5000 --keep-interval-updates 5 --no-epoch-checkpoints \
        --seed 1 --log-interval 100 "$@"
fi
