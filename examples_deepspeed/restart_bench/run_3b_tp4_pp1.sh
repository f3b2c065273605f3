#!/usr/bin/env bash
# The 3b preset on TP4 x PP1 x DP (4 GPUs per replica). It takes no arguments.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run_preset 3b 4 1 "$@"
