#!/usr/bin/env bash
# The 70b preset on TP4 x PP20 x DP (80 GPUs per replica).
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
restart_bench run 70b_tp4_pp20 "$@"
