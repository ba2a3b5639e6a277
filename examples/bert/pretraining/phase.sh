# shellcheck shell=bash
# VARIANT, for train.sh, evaluate.sh and export.sh, which source this after recipe.sh: the tokens of a pair, 128 in the
# first phase (default), 512 in the second. SAVE is a model's folder, with one folder for each phase; gives phase (that
# folder) and default_arch.

case ${VARIANT:=128} in
    128 | 512) ;;
    *) fail "VARIANT=$VARIANT: must be 128 or 512" ;;
esac
default_arch=fixhead_bert_d512_h8_k128
SAVE=$(save_folder "$default_arch" "$@")
phase=$SAVE/$VARIANT
[[ $STEP == export ]] || prepared "$DATA/binary"

last_checkpoint() { # of the phase: CHECKPOINT, the average of AVERAGE, or the last; BERT's authors chose none by its loss
    if [[ ! ${CHECKPOINT:-} && ! ${AVERAGE:-} ]]; then
        [[ -f $phase/checkpoint_last.pt || ${DRY_RUN:-} ]] ||
            fail "SAVE=$SAVE: has no $VARIANT/checkpoint_last.pt; give the SAVE of a train.sh, or a file as CHECKPOINT"
        printf '%s' "$phase/checkpoint_last.pt"
    else
        SAVE=$phase checkpoint "$default_arch"
    fi
}
