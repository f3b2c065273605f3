#!/usr/bin/env bash
# Everything that must hold: linter, type checker, tests. Arguments go to pytest, as in: run_tests.sh -k layering
# TEST_WORKERS=1 runs the tests one after the other; the default is a worker for each core, at most four.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
examples_deepspeed/restart_bench/setup_env.sh
[[ ${CI:-} != true ]] || tests/install_system_packages.sh
bin=${VENV_DIR:-$PWD/.venv}/bin

echo "== ruff"
"$bin/ruff" check .
echo "== import-linter"
"$bin/lint-imports" --no-cache --no-logo
echo "== pyright"
PYRIGHT_PYTHON_IGNORE_WARNINGS=1 "$bin/pyright" --pythonpath "$bin/python"
echo "== pytest"
workers=${TEST_WORKERS:-$(nproc)}
((workers <= 4)) || [[ -n ${TEST_WORKERS:-} ]] || workers=4
# A file's tests share what it sets up, so they stay together; in the order of the files, the long ones come first.
"$bin/python" -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
