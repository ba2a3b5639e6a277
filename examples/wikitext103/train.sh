#!/usr/bin/env bash
# WikiText-103, 512 tokens: Mixhead table 1, column B (19.47 on test with adaptive inputs, 28.67 with MODEL=vanilla).
#   MODEL=baevski  adaptive inputs (Baevski & Auli), 16 layers, 8 heads of 128; half of their batch: 8 x 4608 tokens
#   MODEL=vanilla  fairseq's transformer_lm, 6 layers, 8 heads of 64; 32 x 2048 tokens
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
data=$DATA/${BREAKS:-lines}
prepared "$data"

machine=$(machine "$@")
case ${MODEL:=baevski} in
    baevski)
        save=$(save_folder mixhead_transformer_lm_wiki103_512 "$@")
        update_freq=$(update_freq 8 "$@")
        # shellcheck disable=SC2086 # $machine is several flags
        run fairseq-train "$data" --user-dir "$PLUGIN" --save-dir "$save" $machine \
            --task language_modeling --tokens-per-sample 512 --sample-break-mode none \
            --arch mixhead_transformer_lm_wiki103_512 --criterion adaptive_loss --ddp-backend legacy_ddp \
            --optimizer nag --clip-norm 0.1 --lr 1.0 --lr-scheduler cosine --lr-period-updates 270000 --t-mult 2 \
            --lr-shrink 0.75 --min-lr 0.0001 --stop-min-lr 1e-09 --warmup-updates 16000 --warmup-init-lr 1e-07 \
            --max-tokens 4608 --update-freq "$update_freq" --max-update 286000 --required-batch-size-multiple 1 \
            --seed 1 --keep-last-epochs 5 --log-interval 100 "$@"
        ;;
    vanilla)
        save=$(save_folder mixhead_transformer_lm "$@")
        update_freq=$(update_freq 32 "$@")
        # shellcheck disable=SC2086
        run fairseq-train "$data" --user-dir "$PLUGIN" --save-dir "$save" $machine \
            --task language_modeling --tokens-per-sample 512 --sample-break-mode none \
            --arch mixhead_transformer_lm --share-decoder-input-output-embed --dropout 0.1 \
            --optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.01 --clip-norm 0.0 \
            --lr 0.0005 --lr-scheduler inverse_sqrt --warmup-updates 4000 --warmup-init-lr 1e-07 \
            --max-tokens 2048 --update-freq "$update_freq" --max-update 50000 --required-batch-size-multiple 1 \
            --keep-last-epochs 5 --log-interval 100 "$@"
        ;;
    *) fail "MODEL=$MODEL: must be baevski or vanilla" ;;
esac
