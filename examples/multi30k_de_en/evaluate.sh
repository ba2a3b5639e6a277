#!/usr/bin/env bash
# Print sacreBLEU of Multi30k De-En's test set (2016, Flickr), or of --gen-subset valid; cased, of plain text. The model
# is in the folder SAVE (AVERAGE=n: the average of its last n checkpoints) or the file CHECKPOINT. With --score-reference
# print the negative log-likelihood of the references instead, in nats a token.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
require_prepared "$DATA/binary"
check_subset "$DATA/binary/reference" .raw.en "$@"

model=$(find_checkpoint mixhead_transformer)
results=${model%.pt}.translations
machine=$(machine_flags "$@")

# shellcheck disable=SC2086 # $machine is several flags
run fairseq-generate "$DATA/binary" --user-dir "$PLUGIN" --path "$model" --results-path "$results" \
    --max-tokens 6000 --beam 5 --max-len-a 1.2 --max-len-b 10 --remove-bpe=sentencepiece \
    --required-batch-size-multiple 1 $machine "$@"
[[ ${DRY_RUN:-} ]] || "$PYTHON" -m common.bleu "$DATA/binary" "$results" "$@"
