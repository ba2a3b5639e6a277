#!/usr/bin/env bash
# Make .venv in this checkout: torch, fairseq and this project, at pinned versions (scripts/requirements/).
# A later run only repeats the steps whose pins have changed. docs/install.md has the choices PYTHON, TORCH and FAIRSEQ.
# .venv keeps them for later runs; an empty one returns to the default. MAX_JOBS (2) compilers run at a time.
set -euo pipefail

fail() {
    printf 'setup.sh: %s\n' "$*" >&2
    exit 1
}

((BASH_VERSINFO[0] >= 4)) || fail "bash >= 4 is needed, this is $BASH_VERSION"
(($# == 0)) || fail "takes no arguments, got '$1'; docs/install.md has its variables PYTHON, TORCH and FAIRSEQ"

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
readonly ROOT VENV="$ROOT/.venv" PINS="$ROOT/scripts/requirements"
readonly VENV_PYTHON="$VENV/bin/python" LOG="$VENV/setup.log"
readonly STATE="$VENV/.setup" # the digest of each finished step's inputs, and the caller's choices

export MAX_JOBS="${MAX_JOBS:-2}" PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# Settings for other environments must not bend this one. Images that ship torch set PIP_CONSTRAINT against our pins.
# Index, proxy and cache stay the caller's.
unset PYTHONHOME PYTHONPATH PIP_CONSTRAINT PIP_BUILD_CONSTRAINT PIP_PREFIX PIP_REQUIRE_HASHES PIP_TARGET PIP_USER
unset CUDA_HOME # fairseq would build CUDA extensions, which nothing here uses

# ---- the choices: PYTHON, TORCH and FAIRSEQ --------------------------------------------------------------------------

recorded() { # NAME: the choice that .venv was made with
    if [[ -r "$STATE/$1" ]]; then printf '%s' "$(<"$STATE/$1")"; fi
}

if [[ -z ${PYTHON+set} ]]; then
    PYTHON=$(recorded asked_python)
    [[ -x $PYTHON ]] || PYTHON=
fi
PYTHON=${PYTHON:-python3}
if [[ -z ${TORCH+set} ]]; then
    TORCH=$(recorded asked_torch)
elif [[ -f $TORCH ]]; then
    TORCH=$(realpath -- "$TORCH")
fi
asked_fairseq=${FAIRSEQ-$(recorded asked_fairseq)}

command -v -- "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON: not found; must be a Python >= 3.11"
readonly PROBE="$ROOT/scripts/development/interpreter.py"
facts=$("$PYTHON" "$PROBE" "$VENV" 2>/dev/null) ||
    fail "PYTHON=$PYTHON: $({ "$PYTHON" "$PROBE" "$VENV" 2>&1 >/dev/null || true; } | tail -n 1)"
mapfile -t facts <<<"$facts"
python=${facts[0]} python_version=${facts[1]} own_torch=${facts[2]} missing_header=${facts[3]}
if [[ -n $TORCH ]]; then own_torch=; fi
readonly FAIRSEQ=${asked_fairseq:-${facts[4]}}
[[ $FAIRSEQ == source || $FAIRSEQ == "${facts[4]}" ]] || fail "FAIRSEQ=$FAIRSEQ: must be source here, or empty"

# One run at a time. The lock lies outside .venv, which may be rebuilt. macOS has no flock.
if command -v flock >/dev/null; then
    exec 9>>"$ROOT/.venv.lock"
    flock -n 9 || { echo "setup: waiting for another set-up of this checkout" && flock 9; }
fi

# ---- steps -----------------------------------------------------------------------------------------------------------

digest() { # TEXT FILE...: of the text and the files
    local text=$1
    shift
    { printf '%s\n' "$text" && cat -- "$@"; } | sha256sum | cut -d ' ' -f 1
}

finished() { [[ -r "$STATE/$1" && $(<"$STATE/$1") == "$2" ]]; } # STEP DIGEST

pip_install() {
    "$VENV_PYTHON" -P -m pip install --progress-bar off "$@"
}

step() { # NAME DIGEST TITLE COMMAND...: the log has what the command prints
    local name=$1 digest=$2 title=$3 start=$SECONDS status=0
    shift 3
    if finished "$name" "$digest"; then return; fi
    rm -f "$STATE/$name"
    printf '==== %s\n' "$title" >>"$LOG"
    printf 'setup: %-50s' "$title"
    "$@" >>"$LOG" 2>&1 || status=$?
    if ((status)); then
        printf ' failed\n'
        fail "'$title' failed: $(tail -n 1 "$LOG"); log: $LOG"
    fi
    printf '%5d s\n' $((SECONDS - start))
    printf '%s' "$digest" >"$STATE/$name"
}

install_torch() {
    pip_install -r "$PINS/build.txt" || return
    local words=(-r "$PINS/torch.txt")
    if [[ -n $own_torch ]]; then
        "$VENV_PYTHON" -P -c 'import torch'
        return
    elif [[ -f $TORCH ]]; then
        words=("$TORCH")
    elif [[ -n $TORCH ]]; then
        read -r -a words <<<"$TORCH"
        if [[ ${words[0]} =~ ^[0-9] ]]; then words[0]="torch==${words[0]}"; fi
    fi
    pip_install "${words[@]}" # a call of its own: an index named in TORCH need not have anything else
}

install_fairseq() { # the setup.py of its source needs torch
    "$VENV_PYTHON" -P -m pip uninstall -y fairseq-fixed ve-fairseq || return # the other one has the same files
    pip_install --no-deps --no-build-isolation --require-hashes "$@" -r "$PINS/fairseq_$FAIRSEQ.txt"
}

install_packages() {
    # --no-compile saves a minute: little of these large packages is ever imported.
    pip_install --no-compile --no-build-isolation -r "$PINS/runtime.txt" -r "$PINS/test.txt" || return
    # Only where there is none: a torch for CUDA works with its own triton alone.
    "$VENV_PYTHON" -P -c 'import triton' || pip_install --no-deps -r "$PINS/triton.txt"
}

check() {
    local imports='import torch, fairseq.data.data_utils_fast, fairseq.libbleu, fairseq.libnat'
    # libbase of the wheel, which only --base-layers uses, is of an older torch.
    [[ $FAIRSEQ == wheel ]] || imports+=', fairseq.libbase'
    "$VENV_PYTHON" -P -c "$imports" && return
    # pip may have taken a fairseq from its cache that was built against another torch.
    [[ $FAIRSEQ == source ]] && install_fairseq --no-cache-dir --force-reinstall && "$VENV_PYTHON" -P -c "$imports"
}

# ---- the work --------------------------------------------------------------------------------------------------------

version=$(grep '^__version__' "$ROOT/mixhead_plugin/__init__.py" || true)
base=$(digest "$ROOT $python $python_version $TORCH $own_torch" "$PINS/build.txt" "$PINS/torch.txt")
fairseq=$(digest "$base" "$PINS/fairseq_$FAIRSEQ.txt")
packages=$(digest "$fairseq" "$PINS/runtime.txt" "$PINS/test.txt" "$PINS/triton.txt")
project=$(digest "$packages $version" "$ROOT/setup.py" "$ROOT/pyproject.toml")

works() { "$VENV_PYTHON" -c '' 2>/dev/null && finished venv "$base"; }
if works && finished check "$project"; then
    echo "setup: .venv is up to date (Python $python_version)"
    exit
fi
case $python_version in
    3.11.* | 3.12.* | 3.13.*) ;;
    *) echo "setup: Python $python_version was not tried; 3.11, 3.12 and 3.13 were, so name one by PYTHON= if this fails" ;;
esac
if [[ $FAIRSEQ == source ]] && { ! works || ! finished fairseq "$fairseq"; }; then # said before anything long begins
    compiler=${CXX:-c++}
    command -v -- "${compiler%% *}" >/dev/null || fail "no C++ compiler $compiler (Debian: apt-get install g++)"
    [[ -z $missing_header ]] || fail "no $missing_header, which fairseq needs (Debian: apt-get install python3-dev)"
fi
if ! works; then
    rm -rf "$STATE" && rm -rf "$VENV" # the stamps first: half a removal must not look finished
    mkdir -p "$STATE"
    : >"$LOG"
fi
printf '%s' "$python" >"$STATE/asked_python"
printf '%s' "$TORCH" >"$STATE/asked_torch"
printf '%s' "$asked_fairseq" >"$STATE/asked_fairseq"
step venv "$base" "virtual environment (Python $python_version)" \
    "$python" -P -m venv ${own_torch:+--system-site-packages} "$VENV"
step torch "$base" "torch ${own_torch:-${TORCH:-(pinned)}}${own_torch:+ of $python}" install_torch
step fairseq "$fairseq" "fairseq (${FAIRSEQ/source/from source, takes minutes})" install_fairseq
step packages "$packages" "what fairseq and the tests need" install_packages
step project "$project" "this project" pip_install --no-deps --no-build-isolation -e "$ROOT"
step check "$project" "check" check
echo "setup: ready in $SECONDS s: source .venv/bin/activate"
