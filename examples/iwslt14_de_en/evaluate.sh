#!/usr/bin/env bash
# Print BLEU of IWSLT14 De-En's test set, or of --gen-subset valid: of tokens, as in Mixhead table 4, and of plain text.
# The model is in the folder SAVE (AVERAGE=n: the average of its last n checkpoints) or the file CHECKPOINT; VARIANT as
# in training.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/recipe.sh"
source "$ROOT/examples/iwslt14_de_en/variant.sh"
check_subset "$DATA/$VARIANT/reference" .raw.en "$@"

model=$(find_checkpoint mixhead_transformer_iwslt_de_en)
results=${model%.pt}.translations
machine=$(machine_flags "$@")

# fairseq's default ends every translation after 200 pieces; concatenated sentences (bpe-240) are longer
batches=(--batch-size 128)
if [[ $VARIANT =~ -[0-9]+$ ]]; then batches=(--batch-size 16 --max-len-a 1.2 --max-len-b 10); fi

# shellcheck disable=SC2086 # $machine is several flags
run fairseq-generate "$DATA/$VARIANT" --user-dir "$PLUGIN" --path "$model" --results-path "$results" \
    "${batches[@]}" --beam 5 "$remove_bpe" --required-batch-size-multiple 1 $machine "$@"
[[ ${DRY_RUN:-} ]] || "$PYTHON" -m common.bleu "$DATA/$VARIANT" "$results" "$@"
