#!/usr/bin/env bash
# Lint and the CPU tests, as CI runs them. Arguments go to pytest: bash scripts/test.sh tests/losses -x
# The environment is $VENV, the active virtualenv or .venv (see scripts/install.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bin=$(bash scripts/install.sh test reasoning)
export PATH="$bin:$PATH"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# One thread a worker, and threads that sleep while they wait: the workers share the cores.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

ruff check .
python -m pytest -n "${TEST_WORKERS:-2}" --dist worksteal -m "not slow" "$@"
