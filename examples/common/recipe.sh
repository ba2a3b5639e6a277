# shellcheck shell=bash
# What every prepare.sh, train.sh and evaluate.sh starts with; sourced, after `set -euo pipefail`.
#
# Set here: ROOT (the checkout), EXAMPLE and STEP (the caller's folder in examples/, and its name), PLUGIN (for --user-dir), PYTHON,
# DATA, ARCHIVES. Read from the environment, beside DATA, ARCHIVES and SAVE:
#   GPUS=n                             how many of this machine's GPUs to train on; 0: the CPU (default: all there are)
#   PRECISION=fp16|bf16|amp|fp32       of training on GPUs (default: fp16)
#   DRY_RUN=1                          print fairseq's commands instead of running them

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
STEP=$(basename -- "${BASH_SOURCE[1]}" .sh)
EXAMPLE=$(cd -- "$(dirname -- "${BASH_SOURCE[1]}")" && pwd)
EXAMPLE=${EXAMPLE#"$ROOT/examples/"}
PLUGIN=$ROOT/mixhead_plugin

fail() { # MESSAGE: one line, and the end
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

# The modules of the recipes are common.archives, wikitext2.prepare, ...; what lies in the caller's folder stays out.
export PYTHONPATH=$ROOT/examples${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1

[[ ${GPUS:-0} =~ ^(0|[1-9][0-9]*)$ ]] || fail "GPUS=$GPUS: must be a number such as 0, 1 or 8"

DATA=$(absolute "${DATA:-$ROOT/data/$EXAMPLE}")
export DATA
if [[ ${ARCHIVES:-} ]]; then
    ARCHIVES=$(absolute "$ARCHIVES")
    [[ -d $ARCHIVES ]] || fail "ARCHIVES=$ARCHIVES: no such folder"
    export ARCHIVES
fi

prepared() { # FOLDER: ends unless prepare.sh has made it
    [[ -d $1 || ${DRY_RUN:-} ]] || fail "$1: no such folder; examples/$EXAMPLE/prepare.sh makes it"
}

same_pieces() { # DICTIONARY CHECKPOINT: ends if another dict.txt lies beside the checkpoint or in the folder above
    local folder=${2%/*} other
    if [[ ${DRY_RUN:-} || $2 != */* ]]; then return; fi
    for other in "$folder/dict.txt" "$folder/../dict.txt"; do
        if [[ -f $other ]]; then # the counts behind the words say nothing
            cmp -s <(sed 's/ .*//' "$1") <(sed 's/ .*//' "$other") ||
                fail "$2: has the pieces of $other, not those of $1; take data of its pieces"
            return
        fi
    done
}

finetuned_from() { # DEFAULT "$@": the checkpoint of --finetune-from-model
    local name=$1 previous='' argument
    for argument in "${@:2}"; do
        case $previous in --finetune-from-model) name=$argument ;; esac
        case $argument in --finetune-from-model=*) name=${argument#*=} ;; esac
        previous=$argument
    done
    absolute "$name"
}

# ---- fairseq's commands ----------------------------------------------------------------------------------------------

# Where DRY_RUN prints, whatever the caller does with the output of a command.
if [[ ${DRY_RUN:-} ]]; then exec 3>&1; fi

run() { # PROGRAM ARGUMENT...: in place of this shell in train.sh, so that signals reach it; as a child elsewhere
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

arch() { # DEFAULT ARGUMENT...: the architecture that the command line asks for
    local name=$1 previous='' argument
    for argument in "${@:2}"; do
        case $previous in --arch | -a) name=$argument ;; esac
        case $argument in --arch=*) name=${argument#*=} ;; esac
        previous=$argument
    done
    printf '%s' "$name"
}

save_folder() { # DEFAULT_ARCH "$@": where the checkpoints go
    absolute "${SAVE:-$ROOT/checkpoints/$EXAMPLE/$(arch "$@")}"
}

# ---- machines --------------------------------------------------------------------------------------------------------

visible_gpus() { # how many torch sees on this machine
    if compgen -G '/dev/nvidia*' >/dev/null || [[ -e /dev/kfd || -e /dev/dxg ]]; then
        "$PYTHON" -c 'import torch; print(torch.cuda.device_count(), end="")'
    else # seconds of importing torch saved
        printf 0
    fi
}

# A dry run is also for other machines than this one.
if [[ $STEP != prepare && ${GPUS:-0} != 0 && ! ${DRY_RUN:-} ]]; then
    visible=$(visible_gpus)
    [[ ${#GPUS} -le 6 && $GPUS -le $visible ]] || fail "GPUS=$GPUS: torch sees $visible on this machine"
fi

gpus() { # how many of this machine's take part
    if [[ ${GPUS:-} ]]; then printf '%s' "$GPUS"; else visible_gpus; fi
}

under_torchrun() { [[ ${WORLD_SIZE:-} && ${RANK:-} && ${MASTER_ADDR:-} && ${MASTER_PORT:-} ]]; }
under_srun() { [[ ${SLURM_STEP_NUM_TASKS:-1} -gt 1 ]]; }

workers() { # how many processes train together, on all machines
    if under_torchrun; then
        printf '%s' "$WORLD_SIZE"
    elif under_srun && [[ $SLURM_STEP_NUM_TASKS != "$SLURM_STEP_NUM_NODES" ]]; then
        printf '%s' "$SLURM_STEP_NUM_TASKS" # a task for every GPU
    else
        local here
        here=$(gpus) || exit
        # a task for every machine: fairseq starts its processes itself
        printf '%s' $(((here > 0 ? here : 1) * ${SLURM_STEP_NUM_NODES:-1}))
    fi
}

update_freq() { # BATCHES "$@": the --update-freq that keeps the recipe's batches per update on any number of workers
    local count argument
    for argument in "${@:2}"; do
        case $argument in --update-freq | --update-freq=*) # the user's own comes later and wins
            printf 1
            return
            ;;
        esac
    done
    count=$(workers) || exit
    (($1 % count == 0)) || fail "$count workers cannot share the $1 batches of an update evenly: use a divisor of $1" \
        "(GPUS=n), or give --max-tokens and --update-freq yourself"
    printf '%s' $(($1 / count))
}

max_tokens() { # TOKENS: the --max-tokens of each worker, rounded up, where the recipe's update is one batch
    local count
    count=$(workers) || exit
    printf '%s' $((($1 + count - 1) / count))
}

rows() { # ROWS: the --batch-size of each worker, rounded up. Under truncated_bptt_lm the rows are the texts that are read
    # side by side, each with a memory: --update-freq would read fewer of them, by several windows an update.
    local count
    count=$(workers) || exit
    printf '%s' $((($1 + count - 1) / count))
}

machine() { # "$@": flags of fairseq for the processors that are here, on the one or many machines that take part
    local here count argument precision=${PRECISION:-fp16}
    here=$(gpus) || exit # inside $(...) a failure ends nothing by itself, whatever `set -e` says
    if [[ $STEP != train ]]; then
        if ((here == 0)); then echo --cpu; fi
        return
    fi
    count=$(workers) || exit
    case $precision in
        fp16 | bf16 | amp | fp32) ;;
        *) fail "PRECISION=$precision: must be one of fp16, bf16, amp, fp32" ;;
    esac
    for argument in "$@"; do
        case $argument in
            --fp16 | --bf16 | --amp | --memory-efficient-*) precision=fp32 ;; # the user's own
            --cpu) ((here == 0)) || fail "--cpu: on this machine, which has GPUs, GPUS=0 says so to everything" ;;
        esac
    done
    if ((here == 0)); then
        [[ ${GPUS:-} || ${DRY_RUN:-} ]] || echo "$STEP: torch sees no GPU here, so the CPU does the work" >&2
        echo --cpu
        # fairseq asks torch.distributed for NCCL, and its default wrapper for CUDA devices
        if ((count > 1)) || under_torchrun; then
            printf '%s\n' --distributed-backend gloo --ddp-backend legacy_ddp
        fi
    elif [[ $precision != fp32 ]]; then
        echo "--$precision"
    fi
    echo --distributed-world-size "$count"
    if under_torchrun; then
        # fairseq's own reading of these variables divides by the number of GPUs, and is skipped with one per machine
        printf '%s\n' --distributed-init-method env:// --distributed-no-spawn --distributed-rank "$RANK" \
            --device-id "${LOCAL_RANK:-0}"
    elif under_srun; then
        ((here > 0)) || fail "srun of $SLURM_STEP_NUM_TASKS tasks: fairseq needs GPUs for that, torchrun can do without"
        # fairseq reads the rest from SLURM's variables, provided that it has a port
        echo --distributed-port "$((10000 + SLURM_JOB_ID % 50000))"
    fi
}

# ---- evaluation ------------------------------------------------------------------------------------------------------

checkpoint() { # DEFAULT_ARCH: CHECKPOINT, or SAVE's best one, or with AVERAGE=n the average of SAVE's last n
    local folder
    if [[ ${CHECKPOINT:-} ]]; then
        [[ -f $CHECKPOINT || ${DRY_RUN:-} ]] || fail "CHECKPOINT=$CHECKPOINT: no such file"
        absolute "$CHECKPOINT"
        return
    fi
    folder=$(save_folder "$1")
    if [[ ! ${AVERAGE:-} ]]; then
        [[ -f $folder/checkpoint_best.pt || ${DRY_RUN:-} ]] ||
            fail "SAVE=$folder: has no checkpoint_best.pt; give the folder of a train.sh as SAVE, or a file as CHECKPOINT"
        printf '%s' "$folder/checkpoint_best.pt"
    else
        [[ ${DRY_RUN:-} ]] || "$PYTHON" -m common.average "$folder" "$AVERAGE" >&2 || exit
        printf '%s' "$folder/average_last_$AVERAGE.pt"
    fi
}

check_subset() { # FOLDER SUFFIX "$@": ends unless FOLDER has <--gen-subset>SUFFIX, before fairseq starts
    local name=test previous='' argument file names=()
    for argument in "${@:3}"; do
        case $previous in --gen-subset) name=$argument ;; esac
        case $argument in --gen-subset=*) name=${argument#*=} ;; esac
        previous=$argument
    done
    if [[ -f $1/$name$2 || ${DRY_RUN:-} ]]; then return; fi
    for file in "$1"/*"$2"; do
        file=${file##*/}
        [[ $file == "*$2" ]] || names+=("${file%"$2"}")
    done
    fail "--gen-subset $name: $1 has ${names[*]:-none}"
}

# As the published Transformer-XL is evaluated: windows of 64 words, each with the 640 before it. Of one row, or fairseq
# leaves out the windows that the rows cannot share evenly.
# shellcheck disable=SC2034 # for evaluate.sh
TRANSFORMER_XL=(--task truncated_bptt_lm --tokens-per-sample 64 --batch-size 1 --softmax-batch 1024
    --model-overrides "{'mem_len': 640, 'clamp_len': 400, 'same_length': True}")

evaluate_lm() { # MODULE FOLDER FLAG...: fairseq-eval-lm, whose log MODULE reads (common.perplexity or one like it)
    if [[ ${DRY_RUN:-} ]]; then
        run fairseq-eval-lm "${@:2}"
    else
        run fairseq-eval-lm "${@:2}" 2>&1 | "$PYTHON" -m "$@" # fairseq logs to either
    fi
}
