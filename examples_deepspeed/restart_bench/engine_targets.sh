#!/usr/bin/env bash
# Measures the performance targets of engine lazy on one machine, with every other engine and the storage for comparison:
# 1 and 2 ranks of 2 GiB, training steps during a flush, 2,000 small tensors. About an hour on a disk of 2 GB/s.
# Prints a table per measurement, and all verdicts at the end. Nothing else should run on the machine meanwhile.
#
# Settings, all from the environment:
#   TARGET_DIR       where checkpoints are written, and removed again (default: runs/engine_targets in the repository)
#   OUT_DIR          where the JSON of each measurement goes (default: TARGET_DIR)
#   BYTES            size of a rank's state (default: 2GiB)
#   REPEAT           repeats of each measurement (default: 5)
#   ENGINES          engines to measure (default: all that can run here)
#   STEP_SECONDS     length of a training step; must cover the flush of two ranks (default: 4)
#   PYTHON           interpreter (default: that of .venv, which setup_env.sh creates)
#
# examples:
#   TARGET_DIR=/scratch/targets REPEAT=10 bash engine_targets.sh
#
# exit status: 0 measured, 2 a measurement could not run or the arguments are wrong

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
answer_help "" "$@"
no_arguments "$@"

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
: "${TARGET_DIR:=$ROOT/runs/engine_targets}" "${BYTES:=2GiB}" "${REPEAT:=5}" "${ENGINES:=all}" "${STEP_SECONDS:=4}"
: "${OUT_DIR:=$TARGET_DIR}" "${PYTHON:=${VENV_DIR:-$ROOT/.venv}/bin/python}"
mkdir -p "$TARGET_DIR" "$OUT_DIR"
TARGET_DIR=$(cd "$TARGET_DIR" && pwd)
OUT_DIR=$(cd "$OUT_DIR" && pwd)
cd "$ROOT"

results=()
# measure NAME FLAG...: one replay, whose JSON goes to OUT_DIR/NAME.json. The replay reports an engine that fails.
measure() {
    local name=$1 status=0
    shift
    printf '\n== %s\n' "$name"
    "$PYTHON" -m megatron_restart_tools.ckpt_replay --dir "$TARGET_DIR" --repeat "$REPEAT" --targets --output "$OUT_DIR/$name.json" "$@" ||
        status=$?
    ((status < 2)) || exit "$status"
    results+=("$OUT_DIR/$name.json")
}

share=(--model 70b --tp 8 --pp 8 --limit-bytes "$BYTES")
# While a GPU computes, the processors are nearly idle: these steps sleep. The steps of `busy_steps` compute.
steps=(--steps-between "$STEP_SECONDS" --step-seconds "$STEP_SECONDS")
measure one_rank "${share[@]}" --ranks 0 --engine "$ENGINES" "${steps[@]}" --step-work idle
measure two_ranks "${share[@]}" --ranks 0-1 --engine "$ENGINES" "${steps[@]}" --step-work idle
measure busy_steps "${share[@]}" --ranks 0 --engine torch,lazy --no-storage "${steps[@]}" --step-work matmul --no-cold
measure small_tensors --small-tensors 2000 --engine "$ENGINES" --steps-between 0

printf '\n== verdicts\n'
"$PYTHON" -m benchmarks.engine_targets "${results[@]}"
