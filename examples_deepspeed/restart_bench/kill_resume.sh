#!/usr/bin/env bash
# Kill and resume a training, and report where the time went: tools/restart_drill with other defaults.
#
# examples:
#   bash kill_resume.sh                                               tiny TP2 x PP2 x DP2: two kills in the middle of saves
#   bash kill_resume.sh --fault sigstop --at random:7 --supervisor torchrun
#   bash kill_resume.sh --cycles 3 -- 7b_tp4_pp2                      another preset, or any training command after --
#
# All arguments are passed on: `restart-drill --help` and docs/restart_drill.md explain them.
#   OUT_DIR     the default of --out (default: runs/kill_resume-DATE in the repository)
#   DRY_RUN=1   check the arguments, and print the command of the drill and that of the preset; touch nothing
# exit status: 0 every cycle verified, 1 a cycle was not verified, 2 the drill could not run
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

check_preset_variables
settle_python # the interpreter of the presets
for word in "$@"; do
    [[ $word != -- ]] || break
    [[ ! -f $BENCH_DIR/run_$word.sh && ! ($word == *run_*.sh && -f $word) ]] || die "$word: give a preset after --, as in: $0 -- $word"
done
: "${OUT_DIR:=$RUNS/kill_resume-$(date +%Y%m%d-%H%M%S)}"
drill=(-m megatron_restart_tools.restart_drill --fault sigkill-all --at mid-save-write --cycles 2 --out "$OUT_DIR" "$@")
[[ " $* " == *" -- "* ]] || drill+=(-- tiny_tp2_pp2_dp2)
if [[ -n ${DRY_RUN:-} ]]; then
    if has_environment; then
        run_tool "${drill[1]}" --dry-run "${drill[@]:2}"
    else
        say "the arguments of the drill are not checked: there is no $(python_path) to check them with"
    fi
    print_quoted "$(python_path)" "${drill[@]}"
    preset=$BENCH_DIR/run_${drill[-1]}.sh
    [[ ! -f $preset ]] || COMMAND_TO=/dev/null bash "$preset" # as the drill asks for the command
    exit
fi
ensure_environment
PYTHONSAFEPATH=1 PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} exec "$(python_path)" "${drill[@]}"
