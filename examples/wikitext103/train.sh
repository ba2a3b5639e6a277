#!/usr/bin/env bash
# Train on WikiText-103: Mixhead table 1, column B.
#   MODEL=baevski         adaptive inputs (Baevski & Auli), 16 layers, 8 heads of 128, 512 tokens; half of their batch:
#                         8 x 4608 tokens an update; 19.47 on test
#   MODEL=vanilla         fairseq's transformer_lm, 6 layers, 8 heads of 64, 512 tokens; 32 x 2048 tokens; 28.67 on test
#   MODEL=transformer-xl  16 layers, 10 heads of 41, 150 tokens and a memory of 150; 60 x 150 tokens; 22.92 on test
#   MODEL=synthesizer     as baevski, scores without query-key products; 22.77 on test
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
data=$DATA/${BREAKS:-lines}
require_prepared "$data"

machine=$(machine_flags "$@")
case ${MODEL:=baevski} in
    baevski | synthesizer)
        arch=mixhead_transformer_lm_wiki103_512
        if [[ $MODEL == synthesizer ]]; then arch=mixhead_synthesizer_lm_wiki103; fi
        save=$(chosen_save "$arch" "$@")
        update_freq=$(share_batches 8 "$@")
        # shellcheck disable=SC2086 # $machine is several flags
        run fairseq-train "$data" --user-dir "$PLUGIN" --save-dir "$save" $machine \
            --task language_modeling --tokens-per-sample 512 --sample-break-mode none \
            --arch "$arch" --criterion adaptive_loss --ddp-backend legacy_ddp \
            --optimizer nag --clip-norm 0.1 --lr 1.0 --lr-scheduler cosine --lr-period-updates 270000 --t-mult 2 \
            --lr-shrink 0.75 --min-lr 0.0001 --stop-min-lr 1e-09 --warmup-updates 16000 --warmup-init-lr 1e-07 \
            --max-tokens 4608 --update-freq "$update_freq" --max-update 286000 --required-batch-size-multiple 1 \
            --seed 1 --keep-last-epochs 5 --log-interval 100 "$@"
        ;;
    vanilla)
        save=$(chosen_save mixhead_transformer_lm "$@")
        update_freq=$(share_batches 32 "$@")
        # shellcheck disable=SC2086
        run fairseq-train "$data" --user-dir "$PLUGIN" --save-dir "$save" $machine \
            --task language_modeling --tokens-per-sample 512 --sample-break-mode none \
            --arch mixhead_transformer_lm --share-decoder-input-output-embed --dropout 0.1 \
            --optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.01 --clip-norm 0.0 \
            --lr 0.0005 --lr-scheduler inverse_sqrt --warmup-updates 4000 --warmup-init-lr 1e-07 \
            --max-tokens 2048 --update-freq "$update_freq" --max-update 50000 --required-batch-size-multiple 1 \
            --keep-last-epochs 5 --log-interval 100 "$@"
        ;;
    transformer-xl)
        save=$(chosen_save mixhead_transformer_xl_wiki103 "$@")
        rows=$(share 60)
        # shellcheck disable=SC2086
        run fairseq-train "$data" --user-dir "$PLUGIN" --save-dir "$save" $machine \
            --task truncated_bptt_lm --tokens-per-sample 150 --batch-size "$rows" \
            --arch mixhead_transformer_xl_wiki103 --criterion adaptive_loss --ddp-backend legacy_ddp \
            --optimizer adam --clip-norm 0.25 \
            --lr 0.00025 --lr-scheduler cosine --warmup-updates 0 --min-lr 0.0 --max-update 200000 \
            --seed 1 --keep-last-epochs 5 --log-interval 100 "$@"
        ;;
    *) fail "MODEL=$MODEL: must be one of baevski, vanilla, transformer-xl, synthesizer" ;;
esac
