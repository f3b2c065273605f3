#!/usr/bin/env bash
# Everything that must hold: linter, type checker, tests. Arguments go to pytest, as in: run_tests.sh -k layering
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
"$bin/python" -m pytest "$@"
