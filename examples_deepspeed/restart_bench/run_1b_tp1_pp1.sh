#!/usr/bin/env bash
# The 1b preset on one GPU, with DP one for each replica. It takes no arguments.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run_preset 1b 1 1 "$@"
