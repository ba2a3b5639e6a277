# shellcheck shell=bash
# VARIANT, for train.sh and evaluate.sh: the folder in DATA that prepare.sh made, bpe (default) or sentencepiece, with
# -240 behind it where sentences are concatenated. Gives remove_bpe and bleu_flags, fairseq's flags that depend on it.

VARIANT=${VARIANT:-bpe}
[[ $VARIANT =~ ^(bpe|sentencepiece)(-[0-9]+)?$ ]] ||
    fail "VARIANT=$VARIANT: must be bpe or sentencepiece, with -<tokens> behind it for concatenated sentences"
prepared "$DATA/$VARIANT"

if [[ $VARIANT == bpe* ]]; then
    remove_bpe=--remove-bpe
    bleu_flags=(--eval-bleu-detok moses --eval-bleu-remove-bpe)
else
    remove_bpe=--remove-bpe=sentencepiece
    bleu_flags=(--eval-bleu-detok space --eval-bleu-remove-bpe=sentencepiece)
fi
