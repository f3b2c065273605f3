#!/usr/bin/env bash
# The 7b preset on TP4 x PP2 x DP (8 GPUs per replica).
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
restart_bench run 7b_tp4_pp2 "$@"
