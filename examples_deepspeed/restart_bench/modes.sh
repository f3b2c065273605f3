# What a run_*.sh script does with its preset (MODE); sourced by common.sh.

: "${MODE:=train}"

# run_preset MODEL TP PP [ARGUMENT ...]: the arguments are those of the script. Users give none; for a launch over several
# nodes COMMAND_TO contains `bash SCRIPT .../pretrain_gpt.py FLAG ...`, which trains with these flags.
run_preset() {
    if [[ ${4:-} == "$ROOT/pretrain_gpt.py" ]]; then
        train "${@:1:3}" "${@:5}"
        return
    fi
    no_arguments "${@:4}"
    check_preset_variables
    check_mode
    check_mode_settings
    if ! injects_fault; then
        [[ ! $MODE =~ ^(restart|scaled)$ ]] || check_settings_of_faults
    else
        refuse_given "MODE=$MODE writes its trace to a new directory; leave it out, or train without a fault: KILL_AT=none" TRACE_DIR
        DRILLS=1
    fi
    if declare -F submit_preset >/dev/null; then # sourced by submit.sh
        submit_preset "$@"
        return
    fi
    refuse_given "submit.sh runs ranks with the Python of an image; use that, or SKIP_SETUP=1 PYTHON=..." IMAGE
    case $MODE in
    train) train "$@" ;;
    restart | scaled) if [[ -n $DRILLS ]]; then kill_and_resume "$@"; else train "$@"; fi ;;
    replay) replay "$@" ;;
    esac
}
DRILLS= # not empty: this launch kills its ranks and resumes

# Whether the settings, as the user gave them, ask for a fault that is injected here.
injects_fault() {
    [[ $MODE =~ ^(restart|scaled)$ && -z ${COMMAND_TO:-} && ${KILL_AT:-} != none ]] && [[ -z ${SAVE_DIR:-} || ! -e $SAVE_DIR/latest ]]
}

check_mode() { [[ $MODE =~ ^(train|restart|replay|scaled)$ ]] || die "MODE=$MODE: use train, restart, replay or scaled"; }

# MODE=scaled: the preset's layers, and its layout as real processes on CPUs, with tensors small enough for CPUs.
scale_model() {
    local given=$HIDDEN_SIZE user=$LABEL
    RUNS_ON_CPU=1
    : "${DEVICE:=cpu}" "${LAUNCHER:=fork}" "${TIME_LIMIT:=1200}"
    : "${SEQ_LENGTH:=32}" "${MICRO_BATCH:=1}" "${ITERS:=4}" "${SAVE_INTERVAL:=2}"
    : "${KILL_AT:=$((SAVE_INTERVAL + 1))}"
    : "${WORK_DIR:=$RUNS/scaled_${MODEL}_tp${TP}_pp${PP}_dp${DP}}"
    local heads=$((TP > 4 ? TP : 4)) # must be divisible by TP
    NUM_KEY_VALUE_HEADS=$((NUM_KEY_VALUE_HEADS < NUM_ATTENTION_HEADS ? TP : heads))
    NUM_ATTENTION_HEADS=$heads
    HIDDEN_SIZE=$((16 * heads))
    FFN_HIDDEN_SIZE=$((FFN_HIDDEN_SIZE * HIDDEN_SIZE / given / TP * TP))
    LABEL="Scaled: layers and layout of $MODEL, on CPUs, with hidden size $HIDDEN_SIZE in place of $given. Times and sizes are not those of $MODEL.${user:+ $user}"
}

# Refuses more ranks than fit into this machine's memory. If the kernel does not report free memory, none are refused.
check_memory_of_scaled() {
    local available needed=$((WORLD_SIZE * SCALED_RANK_MIB))
    available=$(awk '/^MemAvailable:/ {print int($2 / 1024)}' /proc/meminfo 2>/dev/null) || return 0
    [[ -n $available ]] && ((needed > available)) || return 0
    die "MODE=scaled: $WORLD_SIZE ranks (TP $TP x PP $PP x DP $DP) take about $needed MiB, and $available MiB of memory are" \
        "free.$(largest_preset $((available / SCALED_RANK_MIB)))"
}
SCALED_RANK_MIB=180 # of a forked rank on CPUs, measured: 10.7 GB with 64

# largest_preset N: prints a sentence that names the largest preset with at most N ranks; nothing if there is none.
largest_preset() {
    local script words best=0 found
    for script in "$BENCH_DIR"/run_*.sh; do
        read -r -a words < <(grep '^run_preset ' "$script")
        if ((words[2] * words[3] > best && words[2] * words[3] <= $1)); then
            best=$((words[2] * words[3])) found=$(basename "$script")
        fi
    done
    ((best == 0)) || echo " The largest preset that fits: DP=$(($1 / best)) bash $BENCH_DIR/$found."
}

# MODE=restart and scaled: train, kill, resume, analyse.
kill_and_resume() {
    local run_dir
    load_settings "$@"
    check_launch_settings
    settle_drill
    run_dir=$(run_directory "$(date +%Y%m%d-%H%M%S)")
    [[ -n $SAVE_DIR_GIVEN ]] || SAVE_DIR=$run_dir/checkpoints
    if [[ -n ${DRY_RUN:-} ]]; then
        show_drill "$run_dir"
        return
    fi
    check_devices
    check_one_command
    [[ $MODE != scaled ]] || check_memory_of_scaled
    check_work_dir
    say "1/4 environment"
    ensure_environment
    check_torch_build
    check_hosts
    SECONDS=0
    say "2/4 data"
    prepare_data
    build_training_args
    add_recomputation
    check_drill
    tell_recomputation
    say "3/4 training $ITERS iterations on $WORLD_SIZE ranks ($DEVICE), a save every $SAVE_INTERVAL; SIGKILL at $KILL_AT, then again"
    local exact=0
    drill "$run_dir" || exact=$?
    ((exact < 2)) || die "the drill failed; its logs are in $run_dir/logs"
    say "4/4 analysis"
    analyse "$run_dir"
    summary "$run_dir"
    return "$exact"
}

# Checks the settings of the drill of MODE=restart and scaled; sets KILL_AT.
settle_drill() {
    [[ ${MAX_RESTARTS:-0} == 0 ]] ||
        die "MAX_RESTARTS=$MAX_RESTARTS: MODE=$MODE starts a new launch after the kill; leave it out, or have the drill restart ranks" \
            "in place: kill_resume.sh --supervisor launch"
    : "${KILL_AT:=8}"
    ((KILL_AT < ITERS)) || die "KILL_AT=$KILL_AT: must be less than ITERS=$ITERS"
    ((KILL_AT > SAVE_INTERVAL)) || die "KILL_AT=$KILL_AT: must be more than SAVE_INTERVAL=$SAVE_INTERVAL, to resume from a save"
}

# run_directory DATE: prints where a drill or a replay that starts at DATE leaves its results.
run_directory() {
    local name=$MODE
    [[ $MODEL != tiny || $MODE == replay ]] || name=demo
    printf '%s' "$WORK_DIR/$name-$1"
}

check_one_command() {
    "${LAUNCHER}_starts_all" ||
        die "MODE=$MODE: $NNODES nodes, or a host of HOSTFILE that is not this one, take a command each with LAUNCHER=$LAUNCHER; use LAUNCHER=srun within an allocation"
}

# DRY_RUN: the same checks, without devices and hosts, and the command of the drill.
show_drill() {
    check_shown_nodes
    check_one_command
    build_training_args
    add_recomputation
    check_flags
    tell_recomputation
    show_user_env
    build_drill "$1"
    print_command "$(python_path)" -m "${DRILL[@]}"
    show_needs
}

# check_run for a drill, which needs a new directory: what the check creates is removed.
check_drill() {
    local place=$SAVE_DIR
    if [[ $place == *://* ]]; then # the check creates nothing there
        check_run --save "$place" --load "$place" --restart-trace-dir "$WORK_DIR/.check"
        rm -rf "${WORK_DIR:?}/.check"
        return
    fi
    [[ ! -e $SAVE_DIR ]] || place=$SAVE_DIR/.check
    check_run --save "$place" --load "$place" --restart-trace-dir "$place/trace"
    rm -r "$place"
}

# Sets DRILL to the drill whose output goes to $1, as a tool and its arguments.
build_drill() {
    build_launch_env
    node_command 0
    # Both launches train the iterations after the checkpoint, so their losses can be compared without a third run.
    DRILL=(
        megatron_restart_tools.restart_drill --fault sigkill-all --at "iteration:$KILL_AT" --no-reference
        --time-limit "${TIME_LIMIT:-300}" --out "$1" --checkpoints "$SAVE_DIR" -- "${COMMAND[@]}"
    )
}

# Returns 1 if the loss of an iteration that both launches trained, or a restored tensor, differs.
drill() {
    settle_port
    build_drill "$1"
    run_tool "${DRILL[@]}"
}

# The drill has written the report as report.json; this one is for people.
analyse() {
    local status=0
    run_tool megatron_restart_tools.ckpt_analysis "$1/trace" --output "$1" | tee "$1/report.txt" || status=$?
    # Findings are part of the report; only an analysis that could not run fails the demonstration.
    ((status < 2)) || die "the analysis of $1/trace could not run"
}

summary() {
    local mode=
    [[ $MODEL == tiny ]] || mode="MODE=$MODE "
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
  ${mode}SAVE_DIR=/mnt/your_storage/$MODE bash $0
  # another fault at another injection point, compared with a run without a fault
  bash $(dirname "$0")/kill_resume.sh --fault bitflip --at after-commit
  # the commands of a 70B run on 64 GPUs
  DRY_RUN=1 bash $(dirname "$0")/run_70b_tp8_pp8.sh
TEXT
}

# MODE=replay: the real engines save and load this layout's checkpoints, with as many ranks and bytes as this machine holds.
replay() {
    local asked=${ENGINE:-all} vocabulary=${VOCAB_SIZE:-}
    load_settings "$@"
    local run_dir ranks limit command status=0
    run_dir=$(run_directory "$(date +%Y%m%d-%H%M%S)")
    : "${RANKS:=0-$(($(nproc) < WORLD_SIZE ? $(nproc) - 1 : WORLD_SIZE - 1))}" "${REPEAT:=4}"
    [[ $SAVE_DIR != *://* ]] || : "${LIMIT_BYTES:=1GiB}" # the capacity of a bucket is unknown
    : "${LIMIT_BYTES:=fit}"
    command=(
        megatron_restart_tools.ckpt_replay --model "$MODEL" --tp "$TP" --pp "$PP" --dp "$DP" --ranks "$RANKS"
        --engine "$asked" --limit-bytes "$LIMIT_BYTES" --repeat "$REPEAT" ${STEPS_BETWEEN:+--steps-between "$STEPS_BETWEEN"}
        ${vocabulary:+--vocab-size "$vocabulary"} --dir "$SAVE_DIR" --trace-dir "$run_dir/trace"
        --output "$run_dir/replay.json"
    )
    if [[ -n ${DRY_RUN:-} ]]; then
        print_quoted "$(python_path)" -m "${command[@]}"
        return
    fi
    check_work_dir
    ensure_environment
    mkdir -p "$run_dir"
    if [[ $SAVE_DIR != *://* ]]; then # ckpt_replay checks object storage itself
        mkdir -p "$SAVE_DIR" 2>/dev/null && [[ -w $SAVE_DIR ]] || die "SAVE_DIR=$SAVE_DIR: cannot be written to; set another"
    fi
    say "replaying ranks $RANKS of $WORLD_SIZE (TP $TP x PP $PP x DP $DP) into $SAVE_DIR"
    RESTART_TRACE_LABEL=${LABEL:-"Replay: ranks $RANKS of $MODEL on TP$TP x PP$PP x DP$DP, synthetic state; no training."} \
        run_tool "${command[@]}" | tee "$run_dir/replay.txt" || status=$?
    ((status < 2)) || exit 2 # it has printed the reason
    run_tool megatron_restart_tools.ckpt_analysis "$run_dir/trace" --output "$run_dir" >"$run_dir/report.txt" ||
        (($? < 2)) || die "the analysis of $run_dir/trace could not run"
    say "left in $run_dir: replay.txt and .json, ckpt_report.html and report.txt, trace"
    return "$status"
}
