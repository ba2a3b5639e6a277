#!/usr/bin/env bash
# Fine-tune a pre-trained model on GLUE with Mixhead B (Mixhead table 5); the mixing starts as the identity.
#   VARIANT=RTE           the task: CoLA, SST-2, MRPC, STS-B, QQP, MNLI, QNLI, RTE or WNLI
#   MODEL=bert|roberta    the model of prepare.sh
# Updates, warm-up and batches of 16 or 32 examples are those of fairseq's recipe, ten epochs at most; BERT's authors
# had three.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../common/recipe.sh"
source "$ROOT/examples/bert/glue/task.sh"

classes=2 select=(--best-checkpoint-metric accuracy --maximize-best-checkpoint-metric) valid=valid
case $VARIANT in # RoBERTa's learning rate, batch, updates, warm-up
    CoLA) lr=1e-05 batch=16 updates=5336 warmup=320 ;;
    SST-2) lr=1e-05 batch=32 updates=20935 warmup=1256 ;;
    MRPC) lr=1e-05 batch=16 updates=2296 warmup=137 ;;
    STS-B)
        lr=2e-05 batch=16 updates=3598 warmup=214
        classes=1 select=(--regression-target --best-checkpoint-metric loss)
        ;;
    QQP) lr=1e-05 batch=32 updates=113272 warmup=28318 ;;
    MNLI) lr=1e-05 batch=32 updates=123873 warmup=7432 classes=3 valid=valid,valid1 ;;
    QNLI) lr=1e-05 batch=32 updates=33112 warmup=1986 ;;
    RTE) lr=2e-05 batch=16 updates=2036 warmup=122 ;;
    WNLI) lr=1e-05 batch=16 updates=400 warmup=24 ;; # not in fairseq's recipe: ten epochs
esac
case $MODEL in
    bert) # one </s> between the texts
        lr=2e-05
        model=(--pooler-dropout 0.1 --adam-betas '(0.9, 0.999)' --weight-decay 0.01 --clip-norm 1.0)
        ;;
    roberta) # two
        model=(--separator-token 2 --adam-betas '(0.9, 0.98)' --weight-decay 0.1 --clip-norm 0.0)
        ;;
esac
machine=$(machine_flags "$@")
from=$(finetuned_from "$DATA/$MODEL/model/model.pt" "$@")
require_same_pieces "$data/input0/dict.txt" "$from"
batch=$(share "$batch")
tokens=$(share 4400)
((tokens >= 512)) || tokens=512 # the longest example

# --mixing-lr-scale needs --fp16-no-flatten-grads.
# shellcheck disable=SC2086 # $machine is several flags
run fairseq-train "$data" --user-dir "$ROOT/examples/bert" --save-dir "$SAVE" $machine \
    --task sentence_prediction --init-token 0 --num-classes "$classes" --max-positions 512 \
    --arch "$default_arch" --finetune-from-model "$DATA/$MODEL/model/model.pt" \
    --criterion sentence_prediction --valid-subset "$valid" "${select[@]}" \
    --dropout 0.1 --attention-dropout 0.1 "${model[@]}" \
    --optimizer adam --adam-eps 1e-06 \
    --lr "$lr" --lr-scheduler polynomial_decay --total-num-update "$updates" --warmup-updates "$warmup" \
    --batch-size "$batch" --max-tokens "$tokens" --update-freq 1 --required-batch-size-multiple 1 \
    --max-update "$updates" --max-epoch 10 --seed 1 \
    --fp16-init-scale 4 --threshold-loss-scale 1 --fp16-scale-window 128 --fp16-no-flatten-grads \
    --find-unused-parameters --no-epoch-checkpoints --log-interval 50 "$@"
