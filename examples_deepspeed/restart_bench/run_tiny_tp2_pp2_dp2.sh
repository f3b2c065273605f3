#!/usr/bin/env bash
# The demonstration: a tiny model is killed and resumed, on CPUs if there are fewer than eight GPUs; see --help.
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
restart_bench run tiny_tp2_pp2_dp2 "$@"
