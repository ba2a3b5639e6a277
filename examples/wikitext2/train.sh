#!/usr/bin/env bash
# Train on WikiText-2: Mixhead table 2, column B (82.93 on test, 62.46 with MODEL=transformer-xl).
#   MODEL=vanilla         the vanilla Transformer, 16 layers, 8 heads, 256 tokens; 8 x 2048 tokens an update
#   MODEL=transformer-xl  16 layers, 10 heads of 41, 150 tokens and a memory of 150; 32 x 150 tokens an update
# and a model of no table:
#   MODEL=masked          a masked language model, by default of 24 gated attention units; 256 tokens, 8 x 2048 an update
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
data=$DATA/${BREAKS:-lines}
require_prepared "$data"

machine=$(machine_flags "$@")
case ${MODEL:=vanilla} in
    vanilla)
        save=$(chosen_save mixhead_transformer_lm_wiki2 "$@")
        update_freq=$(share_batches 8 "$@")
        # shellcheck disable=SC2086 # $machine is several flags
        run fairseq-train "$data" --user-dir "$PLUGIN" --save-dir "$save" $machine \
            --task language_modeling --tokens-per-sample 256 --sample-break-mode none \
            --arch mixhead_transformer_lm_wiki2 \
            --optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.01 --clip-norm 0.0 \
            --lr 0.0005 --lr-scheduler inverse_sqrt --warmup-updates 4000 \
            --max-tokens 2048 --update-freq "$update_freq" --max-update 20000 --required-batch-size-multiple 1 \
            --keep-last-epochs 5 --log-interval 50 "$@"
        ;;
    transformer-xl)
        save=$(chosen_save mixhead_transformer_xl_wiki2 "$@")
        rows=$(share 32)
        # shellcheck disable=SC2086
        run fairseq-train "$data" --user-dir "$PLUGIN" --save-dir "$save" $machine \
            --task truncated_bptt_lm --tokens-per-sample 150 --batch-size "$rows" \
            --arch mixhead_transformer_xl_wiki2 --criterion adaptive_loss --ddp-backend legacy_ddp \
            --optimizer adam --clip-norm 0.25 \
            --lr 0.00025 --lr-scheduler cosine --warmup-updates 0 --min-lr 0.0 --max-update 40000 \
            --seed 1 --keep-last-epochs 5 --log-interval 50 "$@"
        ;;
    masked)
        save=$(chosen_save l2_gau_roberta "$@")
        update_freq=$(share_batches 8 "$@")
        # shellcheck disable=SC2086
        run fairseq-train "$data" --user-dir "$PLUGIN" --save-dir "$save" $machine \
            --task masked_lm --criterion masked_lm --tokens-per-sample 256 --sample-break-mode none \
            --arch l2_gau_roberta \
            --optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.01 --clip-norm 0.0 \
            --lr 0.0005 --lr-scheduler inverse_sqrt --warmup-updates 4000 \
            --max-tokens 2048 --update-freq "$update_freq" --max-update 20000 --required-batch-size-multiple 1 \
            --keep-last-epochs 5 --log-interval 50 "$@"
        ;;
    *) fail "MODEL=$MODEL: must be vanilla, transformer-xl or masked" ;;
esac
