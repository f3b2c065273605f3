#!/usr/bin/env bash
# The 7b preset on TP4 x PP2 x DP (8 GPUs per replica). It takes no arguments.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run_preset 7b 4 2 "$@"
