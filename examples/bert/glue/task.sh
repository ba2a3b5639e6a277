# shellcheck shell=bash
# Check VARIANT and MODEL; set data, default_arch, arch and SAVE. Source this after recipe.sh.

: "${VARIANT:=RTE}" "${MODEL:=bert}"
case $VARIANT in
    CoLA | SST-2 | MRPC | STS-B | QQP | MNLI | QNLI | RTE | WNLI) ;;
    *) fail "VARIANT=$VARIANT: must be CoLA, SST-2, MRPC, STS-B, QQP, MNLI, QNLI, RTE or WNLI" ;;
esac
case $MODEL in
    bert | roberta) ;;
    *) fail "MODEL=$MODEL: must be bert or roberta" ;;
esac
data=$DATA/$MODEL/$VARIANT
[[ -d $data || ${DRY_RUN:-} ]] ||
    fail "$data: no such folder; examples/$EXAMPLE/prepare.sh --model $MODEL --tasks $VARIANT makes it"
default_arch=mixhead_${MODEL}_base
arch=$(chosen_arch "$default_arch" "$@")
SAVE=$(absolute "${SAVE:-$ROOT/checkpoints/$EXAMPLE/$VARIANT/$arch}")
