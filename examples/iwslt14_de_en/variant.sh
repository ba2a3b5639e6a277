# shellcheck shell=bash
# Read VARIANT, the folder in DATA that prepare.sh made: bpe (default), bpe-joined or sentencepiece, with a suffix such
# as -240 for concatenated sentences. Set fairseq's flags that depend on it, remove_bpe and bleu_flags.

VARIANT=${VARIANT:-bpe}
[[ $VARIANT =~ ^(bpe|bpe-joined|sentencepiece)(-[0-9]+)?$ ]] ||
    fail "VARIANT=$VARIANT: must be bpe, bpe-joined or sentencepiece, followed by -<tokens> for concatenated sentences"
require_prepared "$DATA/$VARIANT"

if [[ $VARIANT == bpe* ]]; then
    remove_bpe=--remove-bpe
    bleu_flags=(--eval-bleu-detok moses --eval-bleu-remove-bpe)
else
    remove_bpe=--remove-bpe=sentencepiece
    bleu_flags=(--eval-bleu-detok space --eval-bleu-remove-bpe=sentencepiece)
fi
