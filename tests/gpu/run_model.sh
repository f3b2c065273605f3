#!/usr/bin/env bash
# A preset for the drills of the GPU tier: MODEL on TP x PP x DP. SHARED_GPU=N: N ranks share the GPU of this machine.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../examples_deepspeed/restart_bench/common.sh"
[[ -z ${SHARED_GPU:-} ]] || count_gpus() { echo "$SHARED_GPU"; }
layout=("${MODEL:?}" "${TP:-1}" "${PP:-1}")
unset MODEL TP PP # which a preset fixes, and would refuse as settings
run_preset "${layout[@]}" "$@"
