#!/usr/bin/env bash
# The restart drill within a Slurm allocation, with srun as launcher; see --help.

# sbatch runs a copy of this file; the repository is then the directory it was submitted from.
SCRIPTS=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[[ -f $SCRIPTS/python.sh ]] || SCRIPTS=${SLURM_SUBMIT_DIR:-$PWD}
[[ -f $SCRIPTS/python.sh ]] || SCRIPTS=$SCRIPTS/examples_deepspeed/restart_bench
if [[ ! -f $SCRIPTS/python.sh ]]; then
    printf 'drill_slurm.sh: error: python.sh not found: submit from the root of the repository\n' >&2
    exit 2
fi
source "$SCRIPTS/python.sh"
restart_bench drill-slurm "$@"
