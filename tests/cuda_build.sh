#!/usr/bin/env bash
# Runs tests/cuda_build: what only a CUDA build of torch shows. No GPU is needed: CUDA's driver is a stand-in there.
# torch is installed with everything else into an environment of its own, of 7 GB, which is kept.
#
#   CUDA_VENV_DIR         the environment (default: .venv-cuda in the repository)
#   SKIP_SETUP=1 PYTHON   run with this interpreter, which has a CUDA build of torch and the tests' packages, instead
#
# examples:
#   tests/cuda_build.sh
#   tests/cuda_build.sh -k launch      arguments are those of pytest
#
# exit status: 0 all passed, else pytest's, or 1 if the environment could not be created
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../examples_deepspeed/restart_bench/usage.sh"
answer_help "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z ${SKIP_SETUP:-} ]]; then
    export VENV_DIR=${CUDA_VENV_DIR:-$PWD/.venv-cuda}
    TORCH_VARIANT=cuda TORCH_VERSION=2.14.1 EXTRAS=dev examples_deepspeed/restart_bench/setup_env.sh
    PYTHON=$VENV_DIR/bin/python
fi
exec "${PYTHON:?SKIP_SETUP=1 needs PYTHON, an interpreter}" -m pytest -q "$@" tests/cuda_build
