#!/usr/bin/env bash
# Runs the unit and conformance tests with other versions of torch than that of constraints.txt: the oldest that setup.py
# allows, and 2.14.1. Each has an environment of its own, which is kept. It has only torch and what torch brings; all else
# is that of .venv. A build for CUDA is some 6 GB; the tests see no GPU. Then each version loads what .venv's saved, with
# every engine, and the other way round.
#
#   TORCH_VENVS       where the environments are (default: runs/torch in the repository)
#   VENV_DIR          the environment with all else (default: .venv in the repository)
#   TORCH_INDEX_URL   package index with CPU builds of torch, which are small (default: pip's own sources)
#
# examples:
#   bash tests/torch_versions.sh
#   bash tests/torch_versions.sh 2.12.0
#   TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu bash tests/torch_versions.sh
#
# exit status: 0 all passed, or the version is not to be had, which is said; 1 one did not or could not be set up, 2 wrong
# arguments
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$ROOT/examples_deepspeed/restart_bench/usage.sh"
answer_help "$@"
cd "$ROOT"
versions=("$@")
(($#)) || versions=("$(sed -n 's/^ *"torch>=\([0-9.]*\)",.*/\1.0/p' setup.py)" 2.14.1)
for version in "${versions[@]}"; do
    [[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] ||
        { echo "torch_versions.sh: error: $version: give versions, as 2.14.1" >&2 && exit 2; }
done
python=${VENV_DIR:-$ROOT/.venv}/bin/python
everything_else=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
place=$(mktemp -d) said=$(mktemp)
trap 'rm -rf "$place" "$said"' EXIT
export CUDA_VISIBLE_DEVICES='' DS_ACCELERATOR=cpu OMP_NUM_THREADS=1

# Installs torch $1 into the environment $2, unless it is there. Returns 1 if no package index has it.
install() {
    [[ ! -e $2/installed ]] || return 0
    rm -rf "$2"
    "$python" -m venv --without-pip "$2"
    if ! "$python" -m pip --python "$2/bin/python" install --quiet --disable-pip-version-check --no-compile \
        ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "torch==$1" >"$said" 2>&1; then
        ! grep -q "No matching distribution found for torch==" "$said" || return 1
        cat "$said" >&2
        exit 1
    fi
    touch "$2/installed"
}

# Gives the environment $1 all else, of this run's .venv. Not the path alone: this project is there by a .pth of its own,
# which processes need that tests start elsewhere.
add_everything_else() {
    echo "import site; site.addsitedir('$everything_else')" >"$(echo "$1"/lib/python3.*/site-packages)/everything_else.pth"
}

# Loads with Python $3 what Python $1 saves into the directory $2.
exchange() {
    "$1" -m tests.conformance.scripts.exchange save "$2" && "$3" -m tests.conformance.scripts.exchange load "$2"
}

passed=true
for version in "${versions[@]}"; do
    venv=${TORCH_VENVS:-$ROOT/runs/torch}/$version
    if ! install "$version" "$venv"; then
        echo "== torch $version is not to be had: no package index of pip's has it for this Python"
        continue
    fi
    add_everything_else "$venv"
    echo "== torch $version"
    "$venv/bin/python" -m pytest -q -p no:cacheprovider --show-capture=no -n 2 --dist loadfile --no-loadscope-reorder \
        tests/conformance tests/unit || passed=false
    exchange "$python" "$place/to-$version" "$venv/bin/python" || passed=false
    exchange "$venv/bin/python" "$place/from-$version" "$python" || passed=false
done
$passed
