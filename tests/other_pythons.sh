#!/usr/bin/env bash
# Runs a short part of the suite, trace, hooks and analysis, under each other Python of this machine: 3.10, 3.12, 3.13,
# and traces and analyses a job there with the installed distribution restart-trace. It needs no torch. Each has an
# environment below runs/pythons, which is kept, and whose packages are installed again only if their versions have
# changed. .ci/nightly calls this for all; run_tests.sh, if CI=true, for the oldest and without the metrics of the
# analysis: of what that Python lacks pyright tells, and the job is analysed all the same.
#
# examples:
#   bash tests/other_pythons.sh
#   bash tests/other_pythons.sh 3.10 3.13
#   bash tests/other_pythons.sh --no-metrics 3.10
#
# exit status: 0 all passed, 1 one did not or could not be set up, 2 wrong arguments
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$ROOT/examples_deepspeed/restart_bench/usage.sh"
answer_help "$@"
PACKAGES=(pytest pytest-timeout hypothesis) # what TESTS import beside what restart-trace requires
TESTS=(
    tests/unit/restart_trace/test_recorder.py tests/unit/restart_trace/test_log_format.py
    tests/unit/restart_trace/test_hooks.py tests/unit/restart_trace/test_reading.py
)
METRICS=tests/unit/tools/ckpt_analysis/metrics
if [[ ${1:-} == --no-metrics ]]; then
    shift
else
    TESTS+=("$METRICS")
fi
versions=("$@")
(($#)) || versions=(3.10 3.12 3.13)
for version in "${versions[@]}"; do
    [[ $version =~ ^3\.[0-9]+$ ]] || { echo "other_pythons.sh: error: $version: give versions, as 3.12" >&2 && exit 2; }
done
cd "$ROOT"
PIP=${VENV_DIR:-$ROOT/.venv}/bin/pip

# The interpreter of version $1: on PATH, or one of pyenv's, whose commands on PATH run only for versions chosen before.
find_python() {
    local candidate
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
        if "$candidate" -c "import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$PIP" wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w "$place" "$ROOT/distributions/restart-trace"
wheel=$(echo "$place"/*.whl)
# A job that imports torch, of which the hooks see that much here.
echo 'class serialization: save = load = _open_zipfile_writer = len' >"$place/torch.py"
echo 'import torch' >"$place/train.py"

# Traces and analyses a job with the commands in directory $1.
trace_a_job() {
    rm -rf "$place/trace"
    (cd "$place" && RANK=0 WORLD_SIZE=1 "$1/restart-trace" run --trace-dir trace -- "$1/python" train.py &&
        "$1/ckpt-analysis" trace --no-cache -o page.html)
}

for version in "${versions[@]}"; do
    if ! python=$(find_python "$version"); then
        echo "== Python $version is not here"
        continue
    fi
    echo "== Python $version"
    venv=$ROOT/runs/pythons/$version
    wanted="${PACKAGES[*]} $(<constraints.txt)"
    if [[ ! -e $venv/installed || $(<"$venv/installed") != "$wanted" ]]; then
        "$python" -m venv --without-pip "$venv" # a pip of its own would take as long as all of the packages
        "$PIP" --python "$venv/bin/python" install --quiet --disable-pip-version-check --no-compile -c constraints.txt \
            "${PACKAGES[@]}" "$wheel"
        printf '%s\n' "$wanted" >"$venv/installed"
    fi
    "$PIP" --python "$venv/bin/python" install --quiet --disable-pip-version-check --no-deps --force-reinstall "$wheel"
    trace_a_job "$venv/bin"
    "$venv/bin/python" -m pytest -q -p no:cacheprovider -m "not slow" "${TESTS[@]}"
done
