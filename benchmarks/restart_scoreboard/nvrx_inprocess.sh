#!/usr/bin/env bash
# nvrx_inprocess.sh RANKS RESERVES PORT PORT ARGUMENTS...: each rank by itself, as `srun --kill-on-bad-exit=0` starts
# them: the wrapper needs a launcher that leaves the others alone when one ends. It ends with rank 0, which has the
# wrapper's store: its documentation says that the loss of that one ends the job.
set -euo pipefail
ranks=$1 reserves=$2
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$3 STORE_PORT=$4 ACTIVE_RANKS=$ranks WORLD_SIZE=$((ranks + reserves))
export TORCH_CPP_LOG_LEVEL=ERROR # its store warns of each second without a fault
shift 4
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
started=()
for ((rank = 0; rank < WORLD_SIZE; rank++)); do
    RANK=$rank LOCAL_RANK=$rank python -m benchmarks.restart_scoreboard.nvrx_inprocess "$@" &
    started+=($!)
done
wait "${started[0]}"
