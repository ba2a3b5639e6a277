#!/usr/bin/env bash
# Makes .venv in this checkout: torch, fairseq and this project, at pinned versions (scripts/requirements/).
# Run again, it only does what is missing or whose pins have changed; with nothing to do it takes a moment.
#
#   PYTHON=python3.12 scripts/setup.sh       the interpreter, >= 3.11 (default: python3)
#   TORCH=2.11.0 scripts/setup.sh            torch: a version, a wheel, or anything that `pip install` takes,
#   TORCH="torch --index-url URL" ...        options included (default: the torch >= 2.6 that PYTHON has, else the pin)
#
# Both choices are kept in .venv, so a later run needs neither; TORCH= (empty) goes back to the default.
# MAX_JOBS (2) compilers at a time; SETUP_TIMEOUT (1800) seconds for any one step.
set -euo pipefail

fail() {
    printf 'setup.sh: %s\n' "$*" >&2
    exit 1
}

case "${1-}" in
    '') ;;
    -h | --help)
        sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
        exit
        ;;
    *) fail "takes no arguments, got '$1' (PYTHON and TORCH are environment variables; see --help)" ;;
esac

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
readonly ROOT
readonly VENV="$ROOT/.venv"
readonly VENV_PYTHON="$VENV/bin/python"
readonly LOG="$VENV/setup.log"
readonly STATE="$VENV/.setup" # per finished step, the digest of what decided it
readonly PINS="$ROOT/scripts/requirements"
readonly LIMIT="${SETUP_TIMEOUT:-1800}"

export MAX_JOBS="${MAX_JOBS:-2}"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# What the caller's pip or Python is told about other environments must not bend this one. PIP_CONSTRAINT above all:
# images that ship torch set it, against our pins. Where packages come from (index, proxy, cache) stays the caller's.
unset PYTHONHOME PYTHONPATH
unset PIP_CONSTRAINT PIP_BUILD_CONSTRAINT PIP_PREFIX PIP_REQUIRE_HASHES PIP_ROOT PIP_TARGET PIP_USER
# fairseq would build its CUDA extensions, which nothing here uses and which fail unless nvcc matches torch.
unset CUDA_HOME

readonly ANOTHER='choose another with PYTHON=/path/to/python3'

# ---- what is asked for -----------------------------------------------------------------------------------------------

recorded() { # NAME: the choice that this .venv was made with
    if [[ -r "$STATE/$1" ]]; then printf '%s' "$(<"$STATE/$1")"; fi
}

if [[ -z ${PYTHON-} ]]; then
    PYTHON=$(recorded asked_python)
    [[ -n $PYTHON && -x $PYTHON ]] || PYTHON=python3
fi
if [[ -z ${TORCH+set} ]]; then
    TORCH=$(recorded asked_torch)
elif [[ -f $TORCH ]]; then
    TORCH=$(cd -- "$(dirname -- "$TORCH")" && pwd)/${TORCH##*/}
fi

command -v -- "$PYTHON" >/dev/null ||
    fail "Python interpreter '$PYTHON' not found: install Python >= 3.11, or $ANOTHER"

# The old syntax of the first lines lets a Python that is too old say so.
# shellcheck disable=SC2016
readonly PROBE='
import sys
sys.path = [folder for folder in sys.path if folder]  # not what happens to lie in the folder of the caller
import os
root, torch_asked = sys.argv[1:]
new_enough = sys.version_info >= (3, 11)
if new_enough and os.path.realpath(sys.prefix) == os.path.realpath(os.path.join(root, ".venv")):
    # An activated .venv is no ground to build itself on.
    os.execv(sys._base_executable, [sys._base_executable] + sys.orig_argv[1:])
print("%d.%d.%d" % tuple(sys.version_info[:3]))
if not new_enough:
    sys.exit()
print(sys.executable)
import hashlib, importlib.metadata, re, sysconfig

torch = ""
if not torch_asked:
    try:
        torch = importlib.metadata.version("torch")
        if tuple(map(int, re.match(r"(\d+)\.(\d+)", torch).groups())) < (2, 6):
            torch = ""
    except Exception:
        pass
print(torch)
# A venv made from a venv does not see its packages, whatever its options.
print(sysconfig.get_path("purelib") if torch and sys.prefix != sys.base_prefix else "")

try:
    import ensurepip, venv
    print("yes")
except ImportError:
    print("no")
header = os.path.join(sysconfig.get_path("include"), "Python.h")
print("" if os.path.exists(header) else header)

def read(*names):
    return [open(os.path.join(root, *name.split("/")), "rb").read() for name in names]

# Each digest covers the ones before it: a step is done again when anything that it rests on has changed.
digest = hashlib.sha256()
def stamp(parts):
    for part in parts:
        part = part if isinstance(part, bytes) else part.encode()
        digest.update(b"%d:" % len(part) + part)
    print(digest.hexdigest())

pins = "scripts/requirements/"
interpreter = [os.path.realpath(sys.executable), sys.prefix, sys.version]  # python3 and python3.11 may well be one
stamp([root, torch_asked, torch] + interpreter + read(pins + "build.txt", pins + "torch.txt"))
stamp(read(pins + "fairseq.txt"))
stamp(read(pins + "runtime.txt", pins + "test.txt", pins + "triton.txt"))
init = os.path.join(root, "mixhead_plugin", "__init__.py")
lines = open(init, encoding="utf-8") if os.path.exists(init) else []
stamp(read("setup.py", "pyproject.toml") + [line for line in lines if line.startswith("__version__")])
'
facts=$("$PYTHON" -c "$PROBE" "$ROOT" "$TORCH" 2>/dev/null) || {
    reason=$("$PYTHON" -c "$PROBE" "$ROOT" "$TORCH" 2>&1 >/dev/null | tail -n 1) || true
    fail "Python interpreter '$PYTHON' does not run ($reason): $ANOTHER"
}
{
    IFS= read -r python_version
    IFS= read -r python || fail "Python >= 3.11 is needed, '$PYTHON' is $python_version: $ANOTHER"
    IFS= read -r own_torch
    IFS= read -r own_packages
    IFS= read -r has_venv
    IFS= read -r missing_header
    IFS= read -r base_digest
    IFS= read -r fairseq_digest
    IFS= read -r packages_digest
    IFS= read -r project_digest
} <<<"$facts"

# ---- one run at a time -----------------------------------------------------------------------------------------------

# The lock lies outside .venv, which may be rebuilt. pip inherits it: should this script be killed outright, the next
# one waits for its pip to end. Without flock (macOS) two runs at once are the user's own affair.
if command -v flock >/dev/null; then
    exec 9>>"$ROOT/.venv.lock"
    if ! flock -n 9; then
        echo "setup: waiting for another set-up of this checkout"
        flock 9
    fi
fi

# ---- steps -----------------------------------------------------------------------------------------------------------

finished() { # STEP DIGEST
    [[ -r "$STATE/$1" && $(<"$STATE/$1") == "$2" ]]
}

child=
interrupted() {
    trap - INT TERM HUP
    printf ' interrupted\n'
    if [[ -n $child ]]; then
        kill -TERM "$child" 2>/dev/null || true
        wait "$child" 2>/dev/null || true
    fi
    exit 130
}
trap interrupted INT TERM HUP

# In the background, because bash runs no trap while it waits for a foreground child.
run() {
    if command -v timeout >/dev/null; then
        timeout -k 10 "$LIMIT" "$@" >>"$LOG" 2>&1 &
    else
        "$@" >>"$LOG" 2>&1 &
    fi
    child=$!
    local status=0
    wait "$child" || status=$?
    child=
    return "$status"
}

pip_install() {
    run "$VENV_PYTHON" -P -m pip install --progress-bar off \
        --timeout "${PIP_DEFAULT_TIMEOUT:-60}" --retries "${PIP_RETRIES:-5}" "$@"
}

likely_cause() { # STATUS SECONDS FIRST_LOG_LINE
    if (($2 >= LIMIT)); then
        echo "stopped after $2 s, a slow network? (SETUP_TIMEOUT=seconds allows more)"
        return
    fi
    case $(tail -n "+$3" "$LOG") in
        *'No space left on device'*) echo 'the disk is full' ;;
        *'Killed signal terminated program'*) echo 'the compiler ran out of memory' ;;
        *'DO NOT MATCH THE HASHES'*) echo 'what was downloaded is not what is pinned (sha256)' ;;
        *NewConnectionError* | *'Max retries'* | *[Tt]'imed out'* | *'name resolution'* | *ProxyError* | *SSLError* | \
            *HTTPError*)
            echo 'most likely the network: pip could not reach its package index'
            ;;
        *'No matching distribution'* | *'Could not find a version'*)
            echo "pip's package index has no such version for Python $python_version (network? index settings?)"
            ;;
        *) if (($1 == 137)); then echo 'killed, out of memory?'; else echo 'see the log'; fi ;;
    esac
}

step() { # NAME DIGEST TITLE COMMAND...
    local name=$1 digest=$2 title=$3 start=$SECONDS status=0 line
    shift 3
    if finished "$name" "$digest"; then return; fi
    rm -f "$STATE/$name"
    line=$(($(wc -l <"$LOG") + 1))
    printf '==== %s\n' "$title" >>"$LOG"
    printf 'setup: %-50s' "$title"
    "$@" || status=$?
    if ((status)); then
        printf ' failed\n'
        fail "'$title' failed: $(likely_cause "$status" $((SECONDS - start)) "$line"); log: $LOG"
    fi
    printf '%5d s\n' $((SECONDS - start))
    printf '%s' "$digest" >"$STATE/$name"
}

uses_own_torch() {
    grep -q '^include-system-site-packages *= *true' "$VENV/pyvenv.cfg"
}

make_venv() {
    local hook_name=packages_of_parent_venv.pth
    if [[ -n $own_torch ]]; then
        run "$python" -P -m venv --system-site-packages "$VENV" &&
            { [[ -z $own_packages ]] || run "$VENV_PYTHON" -P -c '
import pathlib, sys, sysconfig
name, packages = sys.argv[1:]
pathlib.Path(sysconfig.get_path("purelib"), name).write_text(f"import site; site.addsitedir({packages!r})\n")
' "$hook_name" "$own_packages"; } &&
            run "$VENV_PYTHON" -P -c 'import torch' && return
        rm -f "$VENV"/lib/python*/site-packages/"$hook_name"
    fi
    run "$python" -P -m venv "$VENV"
}

fresh_folder() {
    # Stamps first: half a removal must not look finished.
    rm -rf "$STATE"
    rm -rf "$VENV"
    mkdir -p "$STATE"
    printf '%s' "$python" >"$STATE/asked_python"
    printf '%s' "$TORCH" >"$STATE/asked_torch"
    : >"$LOG"
}

install_torch() {
    pip_install -r "$PINS/build.txt" || return
    # A call of its own: an index named in TORCH need not have anything but torch. Its words are those of pip's command
    # line, except for a wheel, whose path may hold spaces.
    local words
    if [[ -n $own_torch ]]; then
        return
    elif [[ -z $TORCH ]]; then
        words=(-r "$PINS/torch.txt")
    elif [[ -f $TORCH ]]; then
        words=("$TORCH")
    else
        read -r -a words <<<"$TORCH"
        if [[ ${words[0]} =~ ^[0-9] ]]; then words[0]="torch==${words[0]}"; fi
    fi
    pip_install "${words[@]}"
}

install_fairseq() {
    pip_install --no-deps --no-build-isolation --require-hashes "$@" -r "$PINS/fairseq.txt"
}

install_packages() {
    # All of them are wheels; should one have none for this machine, the pinned setuptools builds it.
    pip_install --no-build-isolation -r "$PINS/runtime.txt" -r "$PINS/test.txt" || return
    # --no-deps, and only where there is none: a torch for CUDA works with its own triton alone.
    local missing='import importlib.util as u, sys; sys.exit(u.find_spec("triton") is None)'
    run "$VENV_PYTHON" -P -c "$missing" || pip_install --no-deps -r "$PINS/triton.txt"
}

install_project() {
    pip_install --no-deps --no-build-isolation -e "$ROOT"
}

imports() {
    run "$VENV_PYTHON" -P -c '
import pathlib, sys
import torch, fairseq, fairseq.data.data_utils_fast, fairseq.data.token_block_utils_fast
import fairseq.libbase, fairseq.libbleu, fairseq.libnat
found = f"Python {sys.version.split()[0]}, torch {torch.__version__}, fairseq {fairseq.__version__}"
pathlib.Path(sys.argv[1]).write_text(found)
' "$STATE/summary"
}

check() {
    # pip keeps the fairseq that it built and knows nothing of the torch that this was built against.
    imports || { install_fairseq --no-cache-dir --force-reinstall && imports; }
}

find_compiler() {
    local name
    if [[ -n ${CXX-} ]]; then
        command -v -- "${CXX%% *}" >/dev/null || fail "no C++ compiler: CXX is '$CXX', which is not found"
        return
    fi
    for name in c++ g++ clang++; do
        if command -v "$name" >/dev/null; then
            # setuptools itself would only try the compilers that Python was built with.
            if [[ $name == clang++ ]]; then export CXX=clang++ CC="${CC:-clang}"; fi
            return
        fi
    done
    fail "no C++ compiler (c++, g++, clang++ or \$CXX): fairseq needs one (Debian, Ubuntu: apt-get install g++)"
}

# ---- checks before anything long, then the work ----------------------------------------------------------------------

new=
if ! finished venv "$base_digest" || ! "$VENV_PYTHON" -c '' 2>/dev/null; then new=yes; fi

if [[ $new && $has_venv != yes ]]; then
    fail "'$python' lacks the venv or ensurepip module (Debian, Ubuntu: apt-get install python3-venv): $ANOTHER"
fi
if [[ $new ]] || ! finished fairseq "$fairseq_digest"; then
    find_compiler
    [[ -z $missing_header ]] ||
        fail "no Python headers ($missing_header), which fairseq needs (Debian: apt-get install python3-dev): $ANOTHER"
fi
if [[ -z $new ]] && finished check "$project_digest"; then
    echo "setup: .venv is up to date ($(<"$STATE/summary"))"
    exit
fi

if [[ $new ]]; then
    if [[ -e $VENV || -L $VENV ]]; then echo "setup: rebuilding .venv: broken, foreign, or of other choices"; fi
    fresh_folder
fi
step venv "$base_digest" "virtual environment (Python $python_version)" make_venv
if [[ -z $own_torch ]]; then
    title="build tools, torch ${TORCH:-(pinned)}"
elif uses_own_torch; then
    title="build tools"
    echo "setup: using torch $own_torch of $python (TORCH=version for another)"
else
    title="build tools, torch (pinned)"
    echo "setup: torch $own_torch of $python cannot be imported, taking the pinned one"
    own_torch=
fi
step torch "$base_digest" "$title" install_torch
step fairseq "$fairseq_digest" "fairseq (from source, takes minutes)" install_fairseq
step packages "$packages_digest" "what fairseq and the tests need" install_packages
step project "$project_digest" "this project" install_project
step check "$project_digest" "check" check
echo "setup: ready in $SECONDS s ($(<"$STATE/summary")): source .venv/bin/activate"
