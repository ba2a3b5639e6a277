#!/usr/bin/env bash
# Fine-tune BERT base with Mixhead B on SQuAD 1.1 for three epochs; the mixing starts as the identity. Mixhead table 6
# has EM 81.0 and F1 88.4, with a larger --mixing-lr-scale. 32 windows of up to 384 tokens an update, which several
# workers share.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../common/recipe.sh"
require_prepared "$DATA/text"

default=mixhead_bert_base
save=$(chosen_save "$default" "$@")
machine=$(machine_flags "$@")
windows=$(share 32)
tokens=$(share 12288) # 32 of the longest
model=$DATA/bert/model/model.pt
from=$(finetuned_from "$model" "$@")
require_same_pieces "$DATA/text/dict.txt" "$from"
if [[ -e $DATA/text/cased ]]; then cased=--cased; else cased=; fi

# --mixing-lr-scale needs --fp16-no-flatten-grads.
# shellcheck disable=SC2086 # $machine is several flags, $cased no flag or one
run fairseq-train "$DATA/text" --user-dir "$ROOT/examples/bert" --save-dir "$save" $machine \
    --task squad --max-positions 512 --max-seq-length 384 --doc-stride 128 --max-query-length 64 $cased \
    --arch "$default" --finetune-from-model "$model" \
    --criterion squad --best-checkpoint-metric f1 --maximize-best-checkpoint-metric \
    --dropout 0.1 --attention-dropout 0.1 \
    --optimizer adam --adam-betas '(0.9, 0.999)' --adam-eps 1e-06 --weight-decay 0.01 --clip-norm 1.0 \
    --lr 3e-05 --lr-scheduler polynomial_decay --total-num-update 8300 --warmup-updates 830 \
    --batch-size "$windows" --max-tokens "$tokens" --update-freq 1 --required-batch-size-multiple 1 \
    --max-update 8300 --seed 1 --fp16-no-flatten-grads \
    --no-epoch-checkpoints --log-interval 50 "$@"
