#!/usr/bin/env bash
# The 70b preset on TP8 x PP8 x DP (64 GPUs per replica).
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
restart_bench run 70b_tp8_pp8 "$@"
