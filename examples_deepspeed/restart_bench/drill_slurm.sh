#!/usr/bin/env bash
# The restart drill within a Slurm allocation, with srun as launcher.
#
# examples:
#   sbatch --nodes 8 --ntasks-per-node 8 --gpus-per-node 8 drill_slurm.sh --fault sigkill-one --at mid-step -- 70b_tp8_pp8
#   salloc --nodes 1 --ntasks-per-node 8 bash drill_slurm.sh          tiny TP2 x PP2 x DP2
#
# All arguments go to kill_resume.sh. It runs on the first node, and faults reach the processes of that node: srun then
# ends the ranks of the other nodes (--kill-on-bad-exit). The repository, --out and --checkpoints must be on a file system
# that all nodes share.
#   DRY_RUN=1   print the allocation, the command of the drill and that of the preset; touch nothing
#   MASTER_ADDR MASTER_PORT   where rank 0 listens (default: first node, 29500)
# exit status: 0 every cycle verified, 1 a cycle was not verified, 2 the drill could not run
set -euo pipefail

# sbatch runs a copy of this file; the repository is then the directory it was submitted from.
SCRIPTS=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[[ -f $SCRIPTS/kill_resume.sh ]] || SCRIPTS=${SLURM_SUBMIT_DIR:-$PWD}
[[ -f $SCRIPTS/kill_resume.sh ]] || SCRIPTS=$SCRIPTS/examples_deepspeed/restart_bench
die() {
    printf 'drill_slurm.sh: error: %s\n' "$*" >&2
    exit 2
}
[[ -f $SCRIPTS/kill_resume.sh ]] || die "kill_resume.sh not found: submit from the root of the repository"
source "$SCRIPTS/usage.sh"
answer_help "" "$@"
[[ -n ${SLURM_JOB_ID:-} ]] || die "SLURM_JOB_ID is not set: start within an allocation, by sbatch or salloc"
NNODES=${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-}}
[[ $NNODES =~ ^[1-9][0-9]*$ ]] || die "SLURM_JOB_NUM_NODES=$NNODES: the allocation must say how many nodes it has"

if [[ -z ${MASTER_ADDR:-} ]]; then
    MASTER_ADDR=127.0.0.1
    if ((NNODES > 1)); then
        source "$SCRIPTS/launch/srun.sh"
        MASTER_ADDR=$(first_allocated_host)
    fi
fi
# Slurm's form is 8(x4) or 8; presets have the same number of tasks on every node.
if [[ -z ${GPUS_PER_NODE:-} && -n ${SLURM_NTASKS_PER_NODE:-${SLURM_TASKS_PER_NODE:-}} ]]; then
    GPUS_PER_NODE=${SLURM_NTASKS_PER_NODE:-$SLURM_TASKS_PER_NODE}
    GPUS_PER_NODE=${GPUS_PER_NODE%%[(,]*}
fi
export LAUNCHER=srun NNODES MASTER_ADDR
[[ -z ${GPUS_PER_NODE:-} ]] || export GPUS_PER_NODE
if [[ -n ${DRY_RUN:-} ]]; then
    printf '# job %s: %s nodes, rank 0 on %s, %s tasks per node\n' "$SLURM_JOB_ID" "$NNODES" "$MASTER_ADDR" "${GPUS_PER_NODE:-as many as fit}"
fi
exec bash "$SCRIPTS/kill_resume.sh" "$@"
