#!/usr/bin/env bash
# Submits a preset as a job of Slurm or PBS; see --help.
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
restart_bench submit "$@"
