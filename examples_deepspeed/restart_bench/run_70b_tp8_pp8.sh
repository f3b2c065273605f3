#!/usr/bin/env bash
# The 70b preset on TP8 x PP8 x DP (64 GPUs per replica). It takes no arguments.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run_preset 70b 8 8 "$@"
