# shellcheck shell=bash
# Read VARIANT, the tokens of a pair: 128 in the first phase (default), 512 in the second. SAVE is a model's folder,
# with a folder for each phase. Set phase (that folder) and default_arch. Source this after recipe.sh.

case ${VARIANT:=128} in
    128 | 512) ;;
    *) fail "VARIANT=$VARIANT: must be 128 or 512" ;;
esac
default_arch=fixhead_bert_d512_h8_k128
SAVE=$(chosen_save "$default_arch" "$@")
phase=$SAVE/$VARIANT
require_prepared "$DATA/binary"

# BERT's authors did not select by loss.
find_last_checkpoint() { # CHECKPOINT, AVERAGE's average, or the last of the phase
    if [[ ! ${CHECKPOINT:-} && ! ${AVERAGE:-} ]]; then
        [[ -f $phase/checkpoint_last.pt || ${DRY_RUN:-} ]] ||
            fail "SAVE=$SAVE: has no $VARIANT/checkpoint_last.pt; give the SAVE of a train.sh, or a file as CHECKPOINT"
        printf '%s' "$phase/checkpoint_last.pt"
    else
        SAVE=$phase find_checkpoint "$default_arch"
    fi
}
