#!/usr/bin/env bash
# The 3b preset on TP4 x PP1 x DP (4 GPUs per replica).
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
restart_bench run 3b_tp4_pp1 "$@"
