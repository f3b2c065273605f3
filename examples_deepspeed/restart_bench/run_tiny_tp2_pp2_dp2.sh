#!/usr/bin/env bash
# The demonstration: trains a tiny model on TP2 x PP2 x DP2, on CPUs if there are fewer than eight GPUs, kills all ranks
# at iteration 8, resumes from the checkpoint of iteration 5, and shows where the save and the restart went.
#
#   KILL_AT      iteration at which the ranks are killed, or none: train without a fault (default: 8)
#   TIME_LIMIT   seconds for each launch (default: 300)
# With SAVE_DIR naming a directory that holds a checkpoint, the script only resumes from that. It takes no arguments.
# Exit status 1 also says that a repeated loss or a restored tensor differs.
set -euo pipefail
: "${DP:=2}" "${MODE:=restart}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run_preset tiny 2 2 "$@"
