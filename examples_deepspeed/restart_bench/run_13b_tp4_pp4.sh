#!/usr/bin/env bash
# The 13b preset on TP4 x PP4 x DP (16 GPUs per replica). It takes no arguments.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run_preset 13b 4 4 "$@"
