#!/usr/bin/env bash
# The 1b preset on one GPU, with DP one for each replica.
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
restart_bench run 1b_tp1_pp1 "$@"
