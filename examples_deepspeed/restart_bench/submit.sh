#!/usr/bin/env bash
# Submits a preset as a job of a scheduler; see --help.
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
restart_bench submit "$@"
