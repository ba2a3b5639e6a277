#!/usr/bin/env bash
# Train on IWSLT14 De-En (Mixhead table 4) by fairseq's own recipe: 6+6 layers, d 512. 4,096 tokens an update on one
# GPU; several GPUs share them. The default is Mixhead B in every attention; the paper's rows are in README.md.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
source "$ROOT/examples/iwslt14_de_en/variant.sh"

default=mixhead_transformer_iwslt_de_en
save=$(chosen_save "$default" "$@")
machine=$(machine_flags "$@")
tokens=$(share 4096)

# A variable, because later flags cannot turn --eval-bleu off. SELECT=loss avoids the beam searches of validation.
case ${SELECT:=bleu} in
    bleu)
        select=(--eval-bleu --eval-bleu-args '{"beam": 5, "max_len_a": 1.2, "max_len_b": 10}' "${bleu_flags[@]}"
            --best-checkpoint-metric bleu --maximize-best-checkpoint-metric)
        ;;
    loss) select=() ;;
    *) fail "SELECT=$SELECT: must be bleu or loss, the metric that chooses checkpoint_best.pt" ;;
esac

# shellcheck disable=SC2086 # $machine is several flags
run fairseq-train "$DATA/$VARIANT" --user-dir "$PLUGIN" --save-dir "$save" \
    --arch "$default" --share-decoder-input-output-embed \
    --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 0.0 \
    --lr 5e-4 --lr-scheduler inverse_sqrt --warmup-updates 4000 \
    --dropout 0.3 --weight-decay 0.0001 \
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1 \
    --max-tokens "$tokens" --update-freq 1 --max-update 50000 \
    ${select[@]+"${select[@]}"} --keep-last-epochs 10 --required-batch-size-multiple 1 \
    $machine "$@"
