#!/usr/bin/env bash
# Write SAVE/model with model.pt, dict.txt and vocab.txt, for `prepare.sh --from` of glue and squad. The model is the
# last checkpoint of the phase VARIANT (here 512 by default), the average of its last AVERAGE=n, or CHECKPOINT. The
# default SAVE is that of --arch.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../common/recipe.sh"
VARIANT=${VARIANT:-512}
source "$ROOT/examples/bert/pretraining/phase.sh"

while (($#)); do
    case $1 in
        --arch | -a)
            (($# > 1)) || fail "$1: needs the name of an architecture"
            shift
            ;;
        --arch=*) ;;
        *) fail "$1: no such flag; --arch is the only one" ;;
    esac
    shift
done

checkpoint=$(last_checkpoint)
run "$PYTHON" -m bert.pretraining.export "$checkpoint" "$SAVE/model"
