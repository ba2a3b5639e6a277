# shellcheck shell=bash
# Every prepare.sh, train.sh and evaluate.sh sources this after `set -euo pipefail`.
#
# A function that may end the script is called in an assignment of its own: `set -e` does not see that $(...) failed
# inside an argument.
#
# It sets ROOT (the checkout), EXAMPLE and STEP (the caller's folder in examples/, and its name), PLUGIN (for
# --user-dir), PYTHON, DATA and ARCHIVES. examples/README.md explains the variables of the environment.

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
STEP=$(basename -- "${BASH_SOURCE[1]}" .sh)
EXAMPLE=$(cd -- "$(dirname -- "${BASH_SOURCE[1]}")" && pwd)
EXAMPLE=${EXAMPLE#"$ROOT/examples/"}
PLUGIN=$ROOT/mixhead_plugin

fail() { # MESSAGE: print it in one line, and end
    printf '%s: error: %s\n' "$STEP" "$*" >&2
    exit 1
}

absolute() { # PATH: the same as seen from anywhere
    case $1 in
        /*) printf '%s' "$1" ;;
        *) printf '%s' "$PWD/$1" ;;
    esac
}

# ---- which fairseq, which folders ------------------------------------------------------------------------------------

if [[ -x $ROOT/.venv/bin/fairseq-train ]]; then PATH=$ROOT/.venv/bin:$PATH; fi
command -v fairseq-train >/dev/null ||
    fail "fairseq-train is not on the PATH: run scripts/setup.sh, or activate an environment that has fairseq"
PYTHON=$(dirname -- "$(command -v fairseq-train)")/python
[[ -x $PYTHON ]] || PYTHON=$(command -v python3) || fail "no python beside fairseq-train, no python3 on the PATH"

# Recipes import common.archives, wikitext2.prepare, ...; modules in the current folder must not replace them.
export PYTHONPATH=$ROOT/examples${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1

[[ ${GPUS:-0} =~ ^(0|[1-9][0-9]*)$ ]] || fail "GPUS=$GPUS: must be a number such as 0, 1 or 8"

given_data=${DATA:-}
DATA=$(absolute "${DATA:-$ROOT/data/$EXAMPLE}")
export DATA
if [[ ${ARCHIVES:-} ]]; then
    ARCHIVES=$(absolute "$ARCHIVES")
    [[ -d $ARCHIVES ]] || fail "ARCHIVES=$ARCHIVES: no such folder"
    export ARCHIVES
fi

flag_value() { # NAMES DEFAULT ARGUMENT...: the last value of a flag, such as "--arch -a", among the arguments
    local names=" $1 " value=$2 previous='' argument
    for argument in "${@:3}"; do
        if [[ $previous && $names == *" $previous "* ]]; then value=$argument; fi
        if [[ $argument == --*=* && $names == *" ${argument%%=*} "* ]]; then value=${argument#*=}; fi
        previous=$argument
    done
    printf '%s' "$value"
}

require_prepared() { # FOLDER: end unless prepare.sh has made it
    [[ -d $1 || ${DRY_RUN:-} ]] || fail "$1: no such folder; examples/$EXAMPLE/prepare.sh makes it"
}

require_same_pieces() { # DICTIONARY CHECKPOINT: end if another dict.txt is beside the checkpoint or in the folder above
    local folder=${2%/*} other
    if [[ ${DRY_RUN:-} || $2 != */* ]]; then return; fi
    for other in "$folder/dict.txt" "$folder/../dict.txt"; do
        if [[ -f $other ]]; then # the counts after the words may differ
            cmp -s <(sed 's/ .*//' "$1") <(sed 's/ .*//' "$other") ||
                fail "$2: has the pieces of $other, not those of $1; take data of its pieces"
            return
        fi
    done
}

finetuned_from() { # DEFAULT "$@": the checkpoint of --finetune-from-model
    local file
    file=$(flag_value --finetune-from-model "$@")
    absolute "$file"
}

# ---- fairseq's commands ----------------------------------------------------------------------------------------------

# DRY_RUN prints here, because a caller may redirect the output of a command.
if [[ ${DRY_RUN:-} ]]; then exec 3>&1; fi

run() { # PROGRAM ARGUMENT...: run it; in train.sh it replaces this shell, so that signals reach it
    if [[ ${DRY_RUN:-} ]]; then
        printf '%q' "$1" >&3
        printf ' %q' "${@:2}" >&3
        printf '\n' >&3
    elif [[ $STEP == train ]]; then
        exec "$@"
    else
        "$@"
    fi
}

chosen_arch() { # DEFAULT "$@": the architecture of the command line
    flag_value "--arch -a" "$@"
}

chosen_save() { # DEFAULT_ARCH "$@": where the checkpoints go
    local arch
    arch=$(chosen_arch "$@")
    absolute "${SAVE:-$ROOT/checkpoints/$EXAMPLE/$arch}"
}

# ---- machines --------------------------------------------------------------------------------------------------------

count_visible_gpus() { # the number of GPUs that torch sees on this machine
    if compgen -G '/dev/nvidia*' >/dev/null || [[ -e /dev/kfd || -e /dev/dxg ]]; then
        "$PYTHON" -c 'import torch; print(torch.cuda.device_count(), end="")'
    else # importing torch takes seconds
        printf 0
    fi
}

# A dry run may be for another machine.
if [[ $STEP != prepare && ${GPUS:-0} != 0 && ! ${DRY_RUN:-} ]]; then
    visible=$(count_visible_gpus)
    [[ ${#GPUS} -le 6 && $GPUS -le $visible ]] || fail "GPUS=$GPUS: torch sees $visible on this machine"
fi

count_gpus() { # the number of this machine's GPUs that train
    if [[ ${GPUS:-} ]]; then printf '%s' "$GPUS"; else count_visible_gpus; fi
}

under_torchrun() { [[ ${WORLD_SIZE:-} && ${RANK:-} && ${MASTER_ADDR:-} && ${MASTER_PORT:-} ]]; }
under_srun() { [[ ${SLURM_STEP_NUM_TASKS:-1} -gt 1 ]]; }

count_workers() { # the number of processes that train together, on all machines
    if under_torchrun; then
        printf '%s' "$WORLD_SIZE"
    elif under_srun && [[ $SLURM_STEP_NUM_TASKS != "$SLURM_STEP_NUM_NODES" ]]; then
        printf '%s' "$SLURM_STEP_NUM_TASKS" # one task for each GPU
    else
        local here
        here=$(count_gpus) || exit
        # one task for each machine: fairseq starts its processes itself
        printf '%s' $(((here > 0 ? here : 1) * ${SLURM_STEP_NUM_NODES:-1}))
    fi
}

share_batches() { # BATCHES "$@": the --update-freq with which all workers together have so many batches an update
    local count argument
    for argument in "${@:2}"; do
        case $argument in --update-freq | --update-freq=*) # the user's own comes later and wins
            printf 1
            return
            ;;
        esac
    done
    count=$(count_workers) || exit
    (($1 % count == 0)) || fail "$count workers cannot share the $1 batches of an update evenly: use a divisor of $1" \
        "(GPUS=n), or give --max-tokens and --update-freq yourself"
    printf '%s' $(($1 / count))
}

share() { # NUMBER: the tokens (--max-tokens) or rows (--batch-size) of each worker, rounded up, where an update is one
    # batch. In truncated_bptt_lm a row is a text with its own memory; --update-freq would read fewer texts, and several
    # windows of each in an update.
    local count
    count=$(count_workers) || exit
    printf '%s' $((($1 + count - 1) / count))
}

require_cpu_alone() { # end if a variable asks for what a recipe that draws its data, and runs on the CPU, does not have
    local recipe=examples/$EXAMPLE
    [[ ${GPUS:-0} == 0 ]] || fail "GPUS=$GPUS: must be 0 or left out, $recipe runs on the CPU alone"
    [[ ${PRECISION:-fp32} == fp32 ]] ||
        fail "PRECISION=$PRECISION: must be fp32 or left out, $recipe runs on the CPU alone"
    [[ ! $given_data ]] || fail "DATA=$given_data: must be left out, $recipe draws its data"
    [[ ! ${AVERAGE:-} ]] || fail "AVERAGE=$AVERAGE: must be left out, $recipe saves one model"
}

machine_flags() { # "$@": fairseq's flags for the processors of this machine and for the number of machines
    local here count argument precision=${PRECISION:-fp16}
    here=$(count_gpus) || exit # `set -e` does not act inside $(...)
    case $precision in
        fp16 | bf16 | amp | fp32) ;;
        *) fail "PRECISION=$precision: must be one of fp16, bf16, amp, fp32" ;;
    esac
    if [[ $STEP != train ]]; then
        if ((here == 0)); then echo --cpu; fi
        return
    fi
    count=$(count_workers) || exit
    for argument in "$@"; do
        case $argument in
            --fp16 | --bf16 | --amp | --memory-efficient-*) precision=fp32 ;; # the user's own
            --cpu) ((here == 0)) || fail "--cpu: this machine has GPUs; give GPUS=0 instead" ;;
        esac
    done
    if ((here == 0)); then
        [[ ${GPUS:-} || ${DRY_RUN:-} ]] || echo "$STEP: torch sees no GPU here; trains on the CPU" >&2
        echo --cpu
        # fairseq's defaults, NCCL and torch's DistributedDataParallel, need CUDA devices
        if ((count > 1)) || under_torchrun; then
            printf '%s\n' --distributed-backend gloo --ddp-backend legacy_ddp
        fi
    elif [[ $precision != fp32 ]]; then
        echo "--$precision"
    fi
    echo --distributed-world-size "$count"
    if under_torchrun; then
        # fairseq would divide these variables by the number of GPUs, and ignore them with one GPU a machine
        printf '%s\n' --distributed-init-method env:// --distributed-no-spawn --distributed-rank "$RANK" \
            --device-id "${LOCAL_RANK:-0}"
    elif under_srun; then
        ((here > 0)) || fail "srun of $SLURM_STEP_NUM_TASKS tasks: needs GPUs; without them use torchrun"
        # with a port fairseq reads the rest from SLURM's variables
        echo --distributed-port "$((10000 + SLURM_JOB_ID % 50000))"
    fi
}

# ---- evaluation ------------------------------------------------------------------------------------------------------

find_checkpoint() { # DEFAULT_ARCH: CHECKPOINT, or SAVE's best one, or with AVERAGE=n the average of SAVE's last n
    local folder
    if [[ ${CHECKPOINT:-} ]]; then
        [[ ! ${AVERAGE:-} ]] || fail "AVERAGE=$AVERAGE: must be left out with CHECKPOINT=$CHECKPOINT, which is one file"
        [[ -f $CHECKPOINT || ${DRY_RUN:-} ]] || fail "CHECKPOINT=$CHECKPOINT: no such file"
        absolute "$CHECKPOINT"
        return
    fi
    folder=$(chosen_save "$1")
    if [[ ! ${AVERAGE:-} ]]; then
        [[ -f $folder/checkpoint_best.pt || ${DRY_RUN:-} ]] ||
            fail "SAVE=$folder: has no checkpoint_best.pt; give a train.sh's folder as SAVE, or a file as CHECKPOINT"
        printf '%s' "$folder/checkpoint_best.pt"
    else
        [[ ${DRY_RUN:-} ]] || "$PYTHON" -m common.average "$folder" "$AVERAGE" >&2 || exit
        printf '%s' "$folder/average_last_$AVERAGE.pt"
    fi
}

check_subset() { # FOLDER SUFFIX "$@": end unless FOLDER has <--gen-subset>SUFFIX
    local name file names=()
    name=$(flag_value --gen-subset test "${@:3}")
    if [[ -f $1/$name$2 || ${DRY_RUN:-} ]]; then return; fi
    for file in "$1"/*"$2"; do
        file=${file##*/}
        [[ $file == "*$2" ]] || names+=("${file%"$2"}")
    done
    fail "--gen-subset $name: $1 has ${names[*]:-none}"
}

# Evaluate Transformer-XL as its authors do: in windows of 64 words, each with the 640 before it. With more than one row
# fairseq would leave out the windows that the rows cannot share evenly.
# shellcheck disable=SC2034 # for evaluate.sh
TRANSFORMER_XL=(--task truncated_bptt_lm --tokens-per-sample 64 --batch-size 1 --softmax-batch 1024
    --model-overrides "{'mem_len': 640, 'clamp_len': 400, 'same_length': True}")

evaluate_lm() { # MODULE FOLDER CHECKPOINT FLAG...: run fairseq-eval-lm; MODULE (common.perplexity) reads its log
    local machine
    machine=$(machine_flags "${@:4}")
    # shellcheck disable=SC2086 # $machine is no flag or one
    set -- "$1" "$2" --user-dir "$PLUGIN" --path "$3" $machine --gen-subset test "${@:4}"
    if [[ ${DRY_RUN:-} ]]; then
        run fairseq-eval-lm "${@:2}"
    else
        run fairseq-eval-lm "${@:2}" 2>&1 | "$PYTHON" -m "$@" # fairseq logs to both
    fi
}

evaluate_masked() { # FOLDER CHECKPOINT FLAG...: run fairseq-validate on a masked language model; common.masked reads its
    # log. --gen-subset names the set, as in the other evaluations. The seed draws the masked words.
    local machine argument previous='' flags=() data=$1 checkpoint=$2
    machine=$(machine_flags "${@:3}")
    for argument in "${@:3}"; do
        if [[ $previous == --gen-subset ]]; then
            flags+=(--valid-subset "$argument")
        elif [[ $argument == --gen-subset=* ]]; then
            flags+=(--valid-subset "${argument#*=}")
        elif [[ $argument != --gen-subset ]]; then
            flags+=("$argument")
        fi
        previous=$argument
    done
    # shellcheck disable=SC2086 # $machine is no flag or one
    set -- "$data" --user-dir "$PLUGIN" --task masked_lm --path "$checkpoint" $machine \
        --valid-subset test --batch-size 16 --required-batch-size-multiple 1 --seed 1 --log-format json "${flags[@]}"
    if [[ ${DRY_RUN:-} ]]; then
        run fairseq-validate "$@"
    else # the task's settings, --tokens-per-sample too, are the checkpoint's
        run fairseq-validate "$@" 2>&1 | "$PYTHON" -m common.masked "$@"
    fi
}
