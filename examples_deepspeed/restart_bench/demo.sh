# The demonstration: train, kill, resume, analyse; sourced by run_tiny_tp2_pp2_dp2.sh.

run_demo() {
    : "${KILL_AT:=8}"
    if [[ -n ${DRY_RUN:-} || $KILL_AT == none || -e ${SAVE_DIR:-}/latest ]]; then
        run_preset "$@"
        return
    fi
    require_whole_number KILL_AT
    local demo_dir
    : "${WORK_DIR:=$ROOT/runs/tiny}"
    demo_dir=$WORK_DIR/demo-$(date +%Y%m%d-%H%M%S)
    : "${SAVE_DIR:=$demo_dir/checkpoints}"
    load_settings "$@"
    ((KILL_AT < ITERS)) || die "KILL_AT=$KILL_AT: must be less than ITERS=$ITERS"
    ((KILL_AT > SAVE_INTERVAL)) || die "KILL_AT=$KILL_AT: must be more than SAVE_INTERVAL=$SAVE_INTERVAL, to resume from a save"

    check_devices
    say "1/5 environment"
    ensure_environment
    check_torch_build
    SECONDS=0
    say "2/5 data"
    prepare_data
    say "3/5 training $ITERS iterations on $WORLD_SIZE ranks ($DEVICE), a save every $SAVE_INTERVAL; SIGKILL at $KILL_AT, then again"
    drill "$demo_dir/logs"
    say "4/5 losses of the iterations that both launches did"
    local exact=0
    "$(python_path)" "$BENCH_DIR/compare_losses.py" "$demo_dir"/logs/cycle_{000,001}.log || exact=$?
    say "5/5 analysis"
    analyse "$demo_dir"
    summary "$demo_dir"
    return "$exact"
}

drill() {
    build_training_args
    build_launch_env
    if ((NNODES == 1)); then
        : "${MASTER_PORT:=$(free_port)}"
    fi
    node_command 0
    "$(python_path)" "$BENCH_DIR/kill_at_iteration.py" --iteration "$KILL_AT" --time-limit "${TIME_LIMIT:-300}" \
        --log-dir "$1" --trace-dir "$TRACE_DIR" -- "${COMMAND[@]}" || die "the drill failed; its logs are in $1"
}

analyse() {
    local status=0
    run_tool tools.ckpt_analysis "$TRACE_DIR" | tee "$1/report.txt" || status=$?
    run_tool tools.ckpt_analysis "$TRACE_DIR" --format json >"$1/report.json" || status=$?
    # Findings are part of the report; only an analysis that could not run fails the demonstration.
    ((status < 2)) || die "the analysis of $TRACE_DIR could not run"
}

summary() {
    cat <<TEXT

Measured: every save, the kill at iteration $KILL_AT and the restart of $WORLD_SIZE ranks, phase by phase, by the ranks
themselves, in $SECONDS s after the set-up. A phase's duration is that of its slowest rank.

  report    $1/report.txt and report.json
  trace     $TRACE_DIR (docs/log_format.md says what is in it)
  logs      $1/logs
  saves     $SAVE_DIR

Next, try
  # the same on the storage that you train on
  SAVE_DIR=/mnt/your_storage/demo bash $0
  # compare a hash of every restored tensor with what was saved
  EXTRA_ARGS=--verify-restored-state bash $0
  # the commands of a 70B run on 64 GPUs
  DRY_RUN=1 bash $(dirname "$0")/run_70b_tp8_pp8.sh
TEXT
}
