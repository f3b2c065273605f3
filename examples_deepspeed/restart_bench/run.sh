#!/usr/bin/env bash
# A preset by its name, such as 3b_tp2_pp2: also a layout without a script of its own.
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
restart_bench run "$@"
