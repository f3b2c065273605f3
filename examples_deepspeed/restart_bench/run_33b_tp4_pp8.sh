#!/usr/bin/env bash
# The 33b preset on TP4 x PP8 x DP (32 GPUs per replica).
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
restart_bench run 33b_tp4_pp8 "$@"
