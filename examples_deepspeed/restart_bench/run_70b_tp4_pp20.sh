#!/usr/bin/env bash
# The 70b preset on TP4 x PP20 x DP (80 GPUs per replica). It takes no arguments.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run_preset 70b 4 20 "$@"
