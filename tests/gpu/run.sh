#!/usr/bin/env bash
# The GPU tier: runs on a machine with one CUDA GPU, also without a network, what no CPU can show. In parts of nine
# minutes at most, each of which can be started alone, and in two ladders of seven minutes. Results go to one directory
# of small files and to an archive of it, of which `python -m tests.gpu.page DIR` makes a page.
#
#   PYTHON   the interpreter, which has torch and deepspeed (default: that of .venv if it is there, else python3)
#
# examples:
#   run.sh --dry-run                          lists ladders and parts, with the time that each is expected to take
#   run.sh --ladder 1 --bundle DIR            the most important parts, in seven minutes; then --ladder 2
#   run.sh                                    runs all parts
#   run.sh --out results machine resume-lazy  runs these two
#   run.sh --rehearse                         the same on CPUs with small sizes, to find silly mistakes before
#
# All options: run.sh --help. exit status: 0 all parts passed, 1 one did not or was not run, 2 could not run
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=$ROOT/.venv/bin/python
    [[ -x $PYTHON ]] || PYTHON=python3
fi
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
exec "$PYTHON" -m tests.gpu "$@"
