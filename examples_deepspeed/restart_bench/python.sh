# Sourced by the scripts, which are commands of tools/restart_bench: restart_bench COMMAND ARGUMENT ... becomes that command.
# Any Python will do, since it needs no package; the one to train with may not be there yet, or be in an image.

restart_bench() {
    local here package python
    here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
    package=$here/../../tools/restart_bench
    [[ -d $package ]] || package=$here/.. # installed
    python=${VENV_DIR:-$here/../../.venv}/bin/python
    [[ ! -x $python ]] || exec "$python" -ES "$package" "$@"
    for python in python3.11 python3.12 python3.10 python3.13 python3; do
        # A command on PATH may exist without working.
        "$python" -ES -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || continue
        exec "$python" -ES "$package" "$@"
    done
    printf '%s: error: no Python 3.10 or later is on PATH; install one\n' "$(basename "$0")" >&2
    exit 2
}
