# Sourced by the scripts, which are commands of tools/restart_bench: restart_bench COMMAND ARGUMENT ... becomes that command.
# It needs Python 3.10 or later, and no package: the Python to train with may not be there yet, or be in an image.

restart_bench() {
    local here package venv python found
    here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
    package=$here/../../tools/restart_bench
    [[ -d $package ]] || package=$here/.. # installed
    venv=${VENV_DIR:-$here/../../.venv}
    if [[ -x $venv/bin/python ]] && compgen -G "$venv/lib/python3.[1-9][0-9]" >/dev/null; then
        exec "$venv/bin/python" -ES "$package" "$@"
    fi
    for python in python3.11 python3.12 python3.10 python3.13 python3; do
        # A command on PATH may exist without working, and one of pyenv is a slow script that finds the interpreter.
        found=$(interpreter_of "$python") && exec "$found" -ES "$package" "$@"
    done
    # The last, since it may be a script that starts a Python elsewhere. That of submit.sh does: srun and ssh are not there.
    if [[ -n ${PYTHON:-} && ${PYTHON##*/} != python_in_image ]] && interpreter_of "$PYTHON" >/dev/null; then
        exec "$PYTHON" -ES "$package" "$@"
    fi
    printf '%s: error: no Python 3.10 or later is in %s, on PATH or in PYTHON=%s; install one, or set PYTHON=/path/to/python3.11\n' \
        "$(basename "$0")" "$venv" "${PYTHON:-}" >&2
    exit 2
}

# Prints the file that a Python of 3.10 or later runs as; fails for another command.
interpreter_of() {
    "$1" -ES -c 'import sys; sys.exit(1) if sys.version_info < (3, 10) else print(sys.executable)' 2>/dev/null
}
