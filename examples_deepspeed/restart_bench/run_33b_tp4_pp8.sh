#!/usr/bin/env bash
# The 33b preset on TP4 x PP8 x DP (32 GPUs per replica). It takes no arguments.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run_preset 33b 4 8 "$@"
