#!/usr/bin/env bash
# Creates or updates the virtual environment; returns at once if it is up to date.
#
#   VENV_DIR         its directory (default: .venv in the repository)
#   PYTHON           the interpreter to create it with, 3.10 to 3.12 (default: the first that is found)
#   TORCH_VARIANT    cpu | cuda (default: cuda if there is an NVIDIA GPU, else cpu)
#   TORCH_VERSION    version of torch (default: that of constraints.txt)
#   TORCH_INDEX_URL  package index with CPU builds of torch (default: PyTorch's own, unless pip is
#                    configured with a package source; an empty value adds none)
#   EXTRAS           extras of setup.py to install beside train and engines, as s3,tensorboard; for the tests: dev
#
# examples:
#   bash setup_env.sh
#   VENV_DIR=/opt/restart TORCH_VARIANT=cuda EXTRAS=s3 bash setup_env.sh
#
# What an environment has stays in it: extras are added. An environment of another checkout is refused.
#
# exit status: 0 up to date, 1 it could not be created, 2 wrong arguments
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
answer_help "$@"
no_arguments "$@"

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
VENV_DIR=${VENV_DIR:-$ROOT/.venv}
EXTRAS=train,engines${EXTRAS:+,$EXTRAS}
STAMP=$VENV_DIR/.setup_stamp
LOG=$VENV_DIR/setup.log

# The versions to install: constraints.txt, with TORCH_VERSION in place of its torch.
constraints() {
    sed "${TORCH_VERSION:+s/^torch==.*/torch==$TORCH_VERSION/}" "$ROOT/constraints.txt"
}

# A checksum of everything whose change makes an installed environment stale. The checkout counts by its physical path: to reach
# it through a symbolic link changes nothing.
fingerprint() {
    { cat "$ROOT/setup.py" && constraints && cd "$ROOT" && pwd -P; } | cksum
}

# Prints line $1 of the stamp: 1 the fingerprint, 2 the variant of torch, 3 the extras; nothing if there is no such line.
stamped() { sed -n "$1p" "$STAMP" 2>/dev/null || true; }

# Prints the extras of EXTRAS that are not installed, each after a comma.
missing_extras() {
    local extra installed
    installed=,$(stamped 3),
    for extra in ${EXTRAS//,/ }; do
        [[ $installed == *,$extra,* ]] || printf ',%s' "$extra"
    done
}

up_to_date() {
    [[ -x $VENV_DIR/bin/python && -f $STAMP ]] || return 1
    [[ $(stamped 1) == "$(fingerprint)" && -z $(missing_extras) ]] || return 1
    [[ ${TORCH_VARIANT:-$(stamped 2)} == "$(stamped 2)" ]]
}

say() { printf '[set-up %3ds] %s\n' "$SECONDS" "$*" >&2; }

die() {
    printf 'setup_env.sh: %s\n' "$*" >&2
    exit 1
}

is_supported() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; }

# A command on PATH may exist without working, so each candidate is run to check its version.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.10 python3 python; do
        if is_supported "$candidate"; then
            command -v "$candidate"
            return
        fi
        [[ $candidate != "${PYTHON:-}" ]] || die "PYTHON=$PYTHON is not a working Python 3.10 to 3.12"
    done
    die "no Python 3.10 to 3.12 found; install one or set PYTHON=/path/to/python3.11"
}

create_venv() {
    if [[ -d $VENV_DIR && -n $(ls -A "$VENV_DIR") && ! -f $VENV_DIR/pyvenv.cfg ]]; then
        die "VENV_DIR=$VENV_DIR is not empty and not a virtual environment; name another directory"
    fi
    local python
    python=$(find_python)
    say "creating $VENV_DIR with $("$python" --version)"
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv --clear "$VENV_DIR"
    else
        # Some distributions have ensurepip in a separate package: let the system's pip install pip.
        "$python" -m venv --clear --without-pip "$VENV_DIR"
        "$python" -m pip --python "$VENV_DIR/bin/python" install --quiet pip ||
            die "$python has neither ensurepip nor a pip of version 22.3 or later; install its venv package"
    fi
}

# Says every ten seconds how large the environment is: pip is silent while it unpacks, for a minute and more on a slow disk.
# It ends with this shell, also with one that was killed.
show_growth() {
    while sleep 10 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        say "$VENV_DIR: $(du -sh "$VENV_DIR" 2>/dev/null | cut -f1) installed so far"
    done
}

# Runs pip and prints what it downloads and builds; the complete output is in the log. `compile_imports` compiles afterwards.
pip_install() {
    local status=0
    "$VENV_DIR/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off --no-compile \
        -c <(constraints) "$@" 2>&1 | tee -a "$LOG" |
        sed -nuE '/^ *(Downloading .*\([0-9.]+ (MB|GB)\)|Building|Installing collected|ERROR)/s/^(.{,110}).*/\1/p' >&2 ||
        status=${PIPESTATUS[0]}
    if ((status != 0)); then
        tail -n 25 "$LOG" >&2
        die "pip failed with status $status; the complete log is $LOG${HINT:+. $HINT}"
    fi
}

# Imports what trainings and the analysis import, which compiles it. To compile all packages would take a minute of processor time
# more, and 0.2 GB. An import that fails will tell its user.
compile_imports() {
    say "compiling what is imported"
    (cd "$ROOT" && env -u PYTHONDONTWRITEBYTECODE DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= "$VENV_DIR/bin/python" -c '
import megatron_restart_tools.ckpt_analysis.commands.report
from megatron.training.heavy_imports import import_for_forks
import_for_forks()') >>"$LOG" 2>&1 9>&- || true
}

# The package index to take a CPU build of torch from; empty: pip's configured sources.
cpu_torch_index() {
    local default_url=https://download.pytorch.org/whl/cpu pip_settings
    pip_settings=$("$VENV_DIR/bin/python" -m pip config list)
    # If the user has configured a mirror or local wheels, only those are used.
    if [[ $pip_settings =~ (find-links|index-url)= ]]; then
        default_url=
    fi
    echo "${TORCH_INDEX_URL-$default_url}"
}

# Torch is installed first and alone, so that only torch is searched for on its index.
install_torch() {
    local variant=$1 index=
    if [[ $variant == cpu ]]; then
        index=$(cpu_torch_index)
    fi
    say "installing torch ($variant build${index:+ from $index})"
    if [[ -n $index ]]; then
        HINT="If that index cannot be reached: TORCH_INDEX_URL=<another index with CPU builds>, or empty for PyPI's" \
            pip_install --no-deps --index-url "$index" torch
    else
        pip_install --no-deps torch
    fi
    if [[ $variant == cpu ]] && "$VENV_DIR/bin/python" -c '
import sys; from importlib.metadata import distribution
torch = distribution("torch")
sys.exit("+cpu" in torch.version or not any("nvidia" in need for need in torch.requires or []))'; then
        say "note: no GPU here, but this torch is a CUDA build and brings gigabytes of libraries;" \
            "TORCH_INDEX_URL=<index with CPU builds> avoids that"
    fi
}

# Arguments: the variant of torch, the extras.
install_everything() {
    : >"$LOG"
    pip_install setuptools
    install_torch "$1"
    say "installing deepspeed, the other dependencies and this project with the extras $2"
    # Without isolation, because a build environment of its own would fetch unpinned build tools.
    # No op is compiled ahead of time: none is needed, and a compiler for one may be missing.
    DS_BUILD_OPS=0 pip_install --no-build-isolation -e "$ROOT[$2]"
    compile_imports
}

# Refuses the environment of another checkout, whose editable install this one would replace: that checkout's commands
# would run this one's code.
check_checkout() {
    local origin found
    for origin in "$VENV_DIR"/lib/python3.*/site-packages/megatron_restart-*.dist-info/direct_url.json; do
        [[ -f $origin ]] || continue
        found=$("$VENV_DIR/bin/python" -c 'import json, sys, urllib.parse, urllib.request
url = urllib.parse.urlsplit(json.load(open(sys.argv[1]))["url"])
print(urllib.request.url2pathname(url.path))' "$origin" 2>/dev/null) || continue
        [[ ! -f $found/setup.py || $found -ef $ROOT ]] ||
            die "VENV_DIR=$VENV_DIR is the environment of the checkout $found; give this one ($ROOT) a directory of its own, or" \
                "remove that environment"
    done
}

# Refuses an environment whose Python is too old or too new: pip would find no version of torch for it.
check_version() {
    local python=$VENV_DIR/bin/python
    [[ ! -x $python ]] || is_supported "$python" ||
        die "VENV_DIR=$VENV_DIR has $("$python" --version 2>&1), and Python 3.10 to 3.12 is needed; remove it, or name another"
}

# Refuses an extra that setup.py does not have: pip would leave it out in silence.
check_extras() {
    local known extra
    known=$(sed -n '/extras_require=/,/}/s/^ *"\([^"]*\)":.*/\1/p' "$ROOT/setup.py")
    for extra in ${EXTRAS//,/ }; do
        [[ $'\n'$known$'\n' == *$'\n'"$extra"$'\n'* ]] || die "EXTRAS: there is no extra $extra; there are" $known
    done
}

main() {
    check_extras
    up_to_date && return
    check_version
    check_checkout
    mkdir -p "$(dirname "$VENV_DIR")"
    if command -v flock >/dev/null; then
        exec 9>"$VENV_DIR.lock"
        flock 9
        up_to_date && return
    fi

    local variant=${TORCH_VARIANT:-}
    if [[ -z $variant ]]; then
        if nvidia-smi -L >/dev/null 2>&1; then variant=cuda; else variant=cpu; fi
    fi
    [[ $variant == cpu || $variant == cuda ]] || die "TORCH_VARIANT=$variant: use cpu or cuda"

    # pip takes a torch of the other variant for the one that is asked for, so that needs a new environment.
    local old_variant extras
    old_variant=$(stamped 2) extras=$(stamped 3)$(missing_extras)
    extras=${extras#,}
    if [[ ${old_variant:-$variant} != "$variant" ]] || ! "$VENV_DIR/bin/python" -m pip --version >/dev/null 2>&1; then
        create_venv
    fi
    rm -f "$STAMP"
    show_growth 9>&- &
    growth=$!
    trap 'kill "$growth" 2>/dev/null || true' EXIT
    install_everything "$variant" "$extras"
    printf '%s\n%s\n%s\n' "$(fingerprint)" "$variant" "$extras" >"$STAMP.tmp"
    mv "$STAMP.tmp" "$STAMP"
    say "ready: $VENV_DIR ($(du -sh "$VENV_DIR" 2>/dev/null | cut -f1))"
}

main
