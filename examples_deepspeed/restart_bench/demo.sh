# The demonstration: train, kill, resume, analyse; sourced by run_tiny_tp2_pp2_dp2.sh.

run_demo() {
    no_arguments "${@:4}"
    : "${KILL_AT:=8}"
    if [[ -n ${DRY_RUN:-}${COMMAND_TO:-} || $KILL_AT == none || -e ${SAVE_DIR:-}/latest ]]; then
        run_preset "$@"
        return
    fi
    require_whole_number KILL_AT
    [[ -z ${TRACE_DIR:-} ]] || die "TRACE_DIR=$TRACE_DIR: the demonstration has a directory of its own for its trace;" \
        "leave it out, or train without a fault: KILL_AT=none"
    local demo_dir
    : "${WORK_DIR:=$RUNS/tiny}"
    demo_dir=$WORK_DIR/demo-$(date +%Y%m%d-%H%M%S)
    : "${SAVE_DIR:=$demo_dir/checkpoints}"
    load_settings "$@"
    ((KILL_AT < ITERS)) || die "KILL_AT=$KILL_AT: must be less than ITERS=$ITERS"
    ((KILL_AT > SAVE_INTERVAL)) || die "KILL_AT=$KILL_AT: must be more than SAVE_INTERVAL=$SAVE_INTERVAL, to resume from a save"

    check_devices
    say "1/4 environment"
    ensure_environment
    check_torch_build
    SECONDS=0
    say "2/4 data"
    prepare_data
    say "3/4 training $ITERS iterations on $WORLD_SIZE ranks ($DEVICE), a save every $SAVE_INTERVAL; SIGKILL at $KILL_AT, then again"
    local exact=0
    drill "$demo_dir" || exact=$?
    ((exact < 2)) || die "the drill failed; its logs are in $demo_dir/logs"
    say "4/4 analysis"
    analyse "$demo_dir"
    summary "$demo_dir"
    return "$exact"
}

# Exit code 1: a loss of an iteration that both launches trained, or a restored tensor, differs.
drill() {
    build_training_args
    build_launch_env
    if ((NNODES == 1)); then
        : "${MASTER_PORT:=$(free_port)}"
    fi
    node_command 0
    # Both launches do the iterations after the checkpoint, so their losses can be compared without a third run.
    run_tool megatron_restart_tools.restart_drill --fault sigkill-all --at "iteration:$KILL_AT" --no-reference \
        --time-limit "${TIME_LIMIT:-300}" --out "$1" --checkpoints "$SAVE_DIR" -- "${COMMAND[@]}"
}

# The drill has written the report as report.json; this one is for people.
analyse() {
    local status=0
    run_tool megatron_restart_tools.ckpt_analysis "$1/trace" --output "$1" | tee "$1/report.txt" || status=$?
    # Findings are part of the report; only an analysis that could not run fails the demonstration.
    ((status < 2)) || die "the analysis of $1/trace could not run"
}

summary() {
    cat <<TEXT

Measured: every save, the kill at iteration $KILL_AT and the restart of $WORLD_SIZE ranks, phase by phase, by the ranks
themselves, in $SECONDS s after the set-up. A phase's duration is that of its slowest rank.

  report    $1/ckpt_report.html, report.txt and report.json
  drill     $1/drill.json (see docs/restart_drill.md)
  trace     $1/trace (see docs/log_format.md)
  logs      $1/logs
  saves     $SAVE_DIR

Next, try
  # the same on the storage that you train on
  SAVE_DIR=/mnt/your_storage/demo bash $0
  # another fault at another injection point, compared with a run without a fault
  bash $(dirname "$0")/kill_resume.sh --fault bitflip --at after-commit
  # the commands of a 70B run on 64 GPUs
  DRY_RUN=1 bash $(dirname "$0")/run_70b_tp8_pp8.sh
TEXT
}
