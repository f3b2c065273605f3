#!/usr/bin/env bash
# The 13b preset on TP4 x PP4 x DP (16 GPUs per replica).
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
restart_bench run 13b_tp4_pp4 "$@"
