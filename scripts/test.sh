#!/usr/bin/env bash
# Lint and the CPU tests, as CI runs them. Arguments go to pytest: bash scripts/test.sh tests/losses -x
# With --vllm as the first one, only the tests that need vLLM, in an environment with it.
# The environment is $VENV, the active virtualenv or .venv, with --vllm .venv-vllm (see scripts/install.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=(test reasoning docs) tests=("not slow" -n "${TEST_WORKERS:-2}" --dist worksteal)
if [[ ${1:-} == --vllm ]]; then
    shift
    extras=(test vllm) tests=(vllm)  # one after the other: an engine uses all cores
fi
bin=$(bash scripts/install.sh "${extras[@]}")
export PATH="$bin:$PATH"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# One thread a worker, and threads that sleep while they wait: the workers share the cores.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

ruff check .
python -m pytest -m "${tests[@]}" "$@"
