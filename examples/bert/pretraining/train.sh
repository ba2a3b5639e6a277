#!/usr/bin/env bash
# Pre-train BERT as in the low-rank bottleneck paper: masked words and next sentences, 1024 pairs an update, in two
# phases. The default is table 2A's first model (SQuAD F1 89.6, MNLI 83.5 after fine-tuning).
#   VARIANT=128    pairs of 128 tokens, 450,000 updates, 5,000 of them warm-up; 16 batches of 64 pairs an update
#   VARIANT=512    from the last checkpoint of that, pairs of 512, 50,000 updates, 3,000; 64 batches of 16 pairs
#   EARLY=1        the second phase may begin before the first has ended
# The text's dict.txt and vocab.txt are copied to SAVE; a text with others is refused there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../common/recipe.sh"
source "$ROOT/examples/bert/pretraining/phase.sh"

machine=$(machine_flags "$@")
case $VARIANT in
    128) pairs=64 batches=16 updates=450000 warmup=5000 begin=() ;;
    512)
        pairs=16 batches=64 updates=50000 warmup=3000
        first=$SAVE/128/checkpoint_last.pt
        begin=(--finetune-from-model "$first")
        ;;
esac
update_freq=$(share_batches "$batches" "$@")
[[ ${DRY_RUN:-} ]] || "$PYTHON" -m bert.pretraining.begin "$DATA/binary" "$SAVE" "$VARIANT"

# --mixing-lr-scale needs --fp16-no-flatten-grads.
# shellcheck disable=SC2086 # $machine is several flags
run fairseq-train "$DATA/binary" --user-dir "$ROOT/examples/bert" --save-dir "$phase" $machine \
    --task bert_pretraining --tokens-per-sample "$VARIANT" --arch "$default_arch" --max-positions 512 \
    --criterion bert_pretraining "${begin[@]}" \
    --dropout 0.1 --attention-dropout 0.1 \
    --optimizer adam --adam-betas '(0.9, 0.999)' --adam-eps 1e-06 --weight-decay 0.01 --clip-norm 1.0 \
    --lr 0.0001 --lr-scheduler polynomial_decay --total-num-update "$updates" --warmup-updates "$warmup" \
    --batch-size "$pairs" --max-tokens $((pairs * VARIANT)) --update-freq "$update_freq" \
    --max-update "$updates" --seed 1 --required-batch-size-multiple 1 --fp16-no-flatten-grads \
    --no-epoch-checkpoints --save-interval-updates 5000 --keep-interval-updates 5 --log-interval 100 "$@"
