#!/usr/bin/env bash
# Kills and resumes a training, and reports where the time went; see --help.
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
restart_bench kill-resume "$@"
