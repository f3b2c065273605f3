#!/usr/bin/env bash
# Everything that must hold: linter, type checker, tests.
#
# examples:
#   run_tests.sh [ARGUMENTS OF PYTEST]           all of it, as in: run_tests.sh -k layering
#   run_tests.sh --quick [ARGUMENTS OF PYTEST]   while you work: linter, types of the files that you have changed, and the
#                                                unit tests that are not marked `slow`; those that train (tests/dist) are
#                                                left out
#   run_tests.sh --processor-time 30             all of it, and which 30 files and tests took most processor time
#
#   TEST_WORKERS   tests at a time (default: three for each core, as many tests wait, with --quick one more than there are
#                  cores; at most six; 1 runs them one after the other)
#
# exit status: 0 all of it holds, else that of what does not
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/examples_deepspeed/restart_bench/usage.sh"
answer_help "$@"
cd "$(dirname "${BASH_SOURCE[0]}")"
quick=false
if [[ ${1:-} == --quick ]]; then
    quick=true
    shift
fi
EXTRAS=dev${EXTRAS:+,$EXTRAS} examples_deepspeed/restart_bench/setup_env.sh
[[ ${CI:-} != true ]] || tests/install_system_packages.sh
bin=${VENV_DIR:-$PWD/.venv}/bin
unset PYTHONDONTWRITEBYTECODE # the tests start hundreds of processes, each of which would compile our modules anew
cores=$(nproc)
workers=$((3 * cores))
! $quick || workers=$((cores + 1))
((workers <= 6)) || workers=6
workers=${TEST_WORKERS:-$workers}
# The workers take all cores: torch's threads would wait for one another. nproc would count by this, too.
export OMP_NUM_THREADS=1

# The Python files that differ from the commit where this branch left the one that it is pushed to, or else from the last
# commit; one a line. Fails outside of a git checkout, where all are checked.
changed_files() {
    local base
    base=$(git merge-base HEAD '@{upstream}' 2>/dev/null || git rev-parse --quiet --verify HEAD) || return
    git diff --name-only --diff-filter=d "$base" -- '*.py' && git ls-files --others --exclude-standard -- '*.py'
}

# Arguments: the files whose types are checked; none: all that pyproject.toml names.
static_checks() {
    echo "== ruff"
    "$bin/ruff" check .
    "$bin/ruff" format --check .
    echo "== import-linter"
    "$bin/lint-imports" --no-cache --no-logo
    if $quick && (($# == 0)); then
        echo "== no types: no Python file is changed"
        return
    fi
    echo "== pyright"
    local room=--max-semi-space-size=128 # MiB: pyright then spends a fifth less of a processor, on collecting garbage
    NODE_OPTIONS=$room node -e 0 2>/dev/null || room= # there may be no node yet, or an old one
    NODE_OPTIONS="${NODE_OPTIONS:-} $room" PYRIGHT_PYTHON_IGNORE_WARNINGS=1 \
        "$bin/pyright" --pythonpath "$bin/python" "$@"
}

# A file's tests share what it sets up, so they stay together. Which files come first is in tests/conftest.py.
run_pytest() { "$bin/python" -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder "$@"; }

checked=()
tests=()
if $quick; then
    # The types of all files take longer than the tests.
    if changed=$(changed_files); then
        [[ -z $changed ]] || mapfile -t checked <<<"$changed"
    else
        checked=(megatron restart_trace tools benchmarks examples_deepspeed ./*.py)
    fi
    tests=(-q tests/unit -m "not slow")
    export POLARS_MAX_THREADS=1 # the whole suite has several, whose results come in any order
fi
said=$(mktemp) said_of_pythons=$(mktemp)
trap 'rm -f "$said" "$said_of_pythons"' EXIT
static_checks "${checked[@]}" >"$said" 2>&1 & # beside the tests: pyright alone is a minute of one core
checks=$! pythons=
if ! $quick && [[ ${CI:-} == true ]]; then
    tests/other_pythons.sh --no-metrics 3.10 >"$said_of_pythons" 2>&1 & # alone it would leave cores idle
    pythons=$!
fi
# In a new checkout each worker would rewrite the assertions of all tests for itself, ten seconds of a core.
compgen -G 'tests/__pycache__/*-pytest-*.pyc' >/dev/null || "$bin/python" -m pytest --collect-only -q tests >/dev/null || true
passed=true
echo "== pytest"
run_pytest "${tests[@]}" "$@" || passed=false
wait "$checks" || passed=false
[[ -z $pythons ]] || wait "$pythons" || passed=false
cat "$said" "$said_of_pythons"
$passed
