#!/usr/bin/env bash
# Makes a bundle of wheels that brings deepspeed and what the GPU tier needs to a machine without a network: for one
# version of Python on x86-64 Linux, beside an installed torch. No compiled extension of deepspeed is in it, and none is
# needed. What is carried there, the files of this commit and the wheels, may have 64 MiB.
#
#   --python VERSION   the other machine's: 3.12 or 3.13 (default: 3.12)
#   --check            make no bundle: say how large the files of this commit and the bundle in DIR are
#   PYTHON             an interpreter with pip, setuptools and torch, which deepspeed's build imports (default: that of .venv)
#
# examples:
#   bundle.sh runs/bundle                   makes the bundle in this new directory
#   bundle.sh --python 3.13 runs/bundle
#   bundle.sh --check runs/bundle           exits with 1 if it has become too large to be carried with this commit
#
# On the other machine, in the environment that has torch; what is installed there and new enough is kept:
#   python3 -m pip install --no-index --find-links runs/bundle -r tests/gpu/requirements.txt
#   PYTHON=python3 bash tests/gpu/run.sh
#
# exit status: 0 made, 1 could not be made or too large, 2 wrong arguments
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$ROOT/examples_deepspeed/restart_bench/usage.sh"
answer_help "$@"
MOST_BYTES=$((64 << 20)) # of all that is carried
: "${PYTHON:=${VENV_DIR:-$ROOT/.venv}/bin/python}"
# All that requirements.txt needs but torch and what torch brings; tests/unit/test_gpu_tier.py compares it with the
# packages' own metadata.
BUNDLED=(
    numpy psutil nvidia-ml-py isal tqdm einops hjson msgpack ninja packaging py-cpuinfo
    pydantic pydantic_core annotated-types typing-inspection typing_extensions
    torchsnapshot aiofiles aiohttp aiohappyeyeballs aiosignal attrs frozenlist idna importlib_metadata
    multidict nest-asyncio propcache PyYAML yarl zipp
    pytest pytest-timeout hypothesis lazy-importer iniconfig pluggy Pygments sortedcontainers
)

die() {
    printf 'bundle.sh: error: %s\n' "$*" >&2
    exit "${STATUS:-1}"
}

# check_size DIR: ends with an error if the bundle in DIR and the files of this commit are too large.
check_size() {
    local tree wheels shown
    tree=$(git -C "$ROOT" archive --format=tar HEAD | wc -c) || die "$ROOT is no git checkout, so the size of its files is not known"
    wheels=$(du -sb --apparent-size "$1" | cut -f1)
    shown=$(awk -v t="$tree" -v w="$wheels" 'BEGIN {printf "%.1f MiB of files and %.1f MiB of wheels", t / 2^20, w / 2^20}')
    ((tree + wheels <= MOST_BYTES)) || die "$shown: more than $((MOST_BYTES >> 20)) MiB; see ls -lS $1"
    printf '%s: %s, together at most %s MiB\n' "$1" "$shown" "$((MOST_BYTES >> 20))"
}

if [[ ${1:-} == --check ]]; then
    (($# == 2)) && [[ -d $2 ]] || STATUS=2 die "--check ${2:-}: give a directory that bundle.sh has made"
    check_size "$2"
    exit
fi
VERSION=3.12
if [[ ${1:-} == --python ]]; then
    VERSION=${2:-}
    [[ $VERSION == 3.12 || $VERSION == 3.13 ]] || STATUS=2 die "--python '$VERSION': give 3.12 or 3.13"
    shift 2
fi
(($# == 1)) && [[ $1 != -* ]] || STATUS=2 die "give one argument, the directory to make; see --help"
[[ ! -e $1 ]] || STATUS=2 die "$1 is there already; name a new directory"
mkdir -p "$1"
TARGET=$(cd "$1" && pwd)
pip=("$PYTHON" -m pip --disable-pip-version-check --quiet)
platforms=()
for version in 2_28 2_27 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${version}_x86_64"); done
for name in 2014 2010 1; do platforms+=(--platform "manylinux${name}_x86_64"); done

DS_BUILD_OPS=0 "${pip[@]}" wheel --no-deps --no-build-isolation -c "$ROOT/constraints.txt" -w "$TARGET" deepspeed ||
    die "deepspeed's wheel could not be built"
"${pip[@]}" download --no-deps --only-binary=:all: --python-version "$VERSION" --implementation cp "${platforms[@]}" \
    -c "$ROOT/constraints.txt" -d "$TARGET" "${BUNDLED[@]}" || die "not all wheels could be had"

printf '%s: %s wheels for Python %s\n' "$1" "$(find "$TARGET" -name '*.whl' | wc -l)" "$VERSION"
check_size "$1"
