#!/usr/bin/env bash
# torchft.sh RANKS PORT RESTARTS ARGUMENTS...: a lighthouse, and each rank as a replica group under a torchrun of its
# own, as torchft's README starts them.
set -euo pipefail
ranks=$1 port=$2 restarts=$3
shift 3
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
export TORCHFT_LIGHTHOUSE=http://127.0.0.1:$port NUM_REPLICA_GROUPS=$ranks
torchft_lighthouse --bind "127.0.0.1:$port" --min_replicas "$((ranks - 1))" --quorum_tick_ms 100 --join_timeout_ms 10000 &
groups=()
for ((group = 0; group < ranks; group++)); do
    REPLICA_GROUP_ID=$group torchrun --master_port=0 --nnodes=1 --nproc_per_node=1 --max_restarts="$restarts" \
        --rdzv_backend=c10d --rdzv_endpoint=127.0.0.1:0 -m benchmarks.restart_scoreboard.torchft_ddp "$@" &
    groups+=($!)
done
wait "${groups[@]}"
