#!/usr/bin/env bash
# agents.sh NODES SPARES PORT COMMAND... -- AGENT...: COMMAND, which listens on PORT and outlives all faults, and agents,
# each of which stands for a node. A spare, and an agent that has ended, as a node that is to be repaired, begins when its
# `sleep` is ended. In AGENT the word NUMBER stands for the agent's, from 0.
set -euo pipefail
nodes=$1 spares=$2 port=$3
shift 3
outlives=()
while [[ $1 != -- ]]; do
    outlives+=("$1")
    shift
done
shift
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
"${outlives[@]}" &
until (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do # else an agent of torchrun would serve the store
    sleep 0.1
done
for ((number = 0; number < nodes + spares; number++)); do
    while true; do
        ((number < nodes)) || sleep infinity || true
        "${@/#NUMBER/$number}" || true
        ((number >= nodes)) || sleep infinity || true
    done &
done
wait -n
