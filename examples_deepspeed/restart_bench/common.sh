# Shared by all run_*.sh scripts; to be sourced. A script calls `run_preset MODEL TP PP "$@"`.
#
# Settings, all from the environment:
#   MODE=train|restart|replay|scaled               what to do with the preset; docs/cluster.md
#   ENGINE SAVE_INTERVAL SAVE_DIR TRACE_DIR        checkpoints and their trace
#   DP ITERS MICRO_BATCH GLOBAL_BATCH SEQ_LENGTH   the training
#   SEQUENCE_PARALLEL=1|0                          with --sequence-parallel, or without; 70b has it
#   DTYPE=bf16|fp16|fp32                           data type of the weights in training
#   RECOMPUTE=auto|none|selective|full DEVICE_GB   activations recomputed in the backward pass; auto: as few as the memory of
#                                                  a device, of DEVICE_GB (80), allows by ckpt_plan's estimate
#   DATA_PATH TOKENIZER_TYPE TOKENIZER_MODEL VOCAB_FILE MERGE_FILE VOCAB_SIZE
#                                                  the data; random tokens are generated if DATA_PATH is unset
#   EXTRA_ARGS                                     more flags of pretrain_gpt.py, split at white space
#   WORK_DIR                                       where everything goes (default: runs/NAME in the repository)
#   LAUNCHER=torchrun|deepspeed|srun|fork HOSTFILE NNODES NODE_RANK GPUS_PER_NODE
#   MASTER_ADDR MASTER_PORT MAX_RESTARTS           the last for LAUNCHER=fork: restarts in place
#   STANDBY=1|load                                 with MAX_RESTARTS on one node, without CUDA: the ranks of the next start
#                                                  are set up ahead of a failure; load: and load each checkpoint ahead
#   SPARES ALLOW_SHRINK=1 HEARTBEAT_TIMEOUT=SECONDS COORDINATOR_ADDR COORDINATOR_PORT
#                                                  with MAX_RESTARTS over the hosts of HOSTFILE, see docs/launch.md
#   MEET_TIMEOUT=SECONDS                           where the script is started on each node with NODE_RANK: how long each waits
#                                                  for the others (600)
#   HOST_GRACE=SECONDS                             for LAUNCHER=deepspeed over HOSTFILE: how long after the launch on one
#                                                  host has ended the launches on other hosts are ended, too (30)
#   EXPORT="NAME ..."                              variables for the ranks of all nodes, in addition to those that
#                                                  are always exported: NCCL_* GLOO_* FI_* UCX_* OMP_* CUDA_* TORCH_* HF_*
#                                                  AWS_* LD_LIBRARY_PATH PYTHONPATH
#   DEVICE=cuda|cpu                                cpu: for the tiny preset only
#   SKIP_SETUP=1 PYTHON                            run with this interpreter instead of the repository's .venv
#   DRY_RUN=1                                      check settings, flags and DATA_PATH, and print the command of each node
#                                                  (MODE=restart and scaled: of the drill), one per line, with *** in place
#                                                  of secrets (names with TOKEN KEY SECRET PASSWORD); touch nothing.
#                                                  ENGINE=memory: also print, on stderr, the host memory that saves take
#   DRY_RUN=plan                                   also print, on stderr, the configuration, the checkpoint's files, the
#                                                  memory of devices and hosts, free space, and the storage throughput
#   BLOCKED_TARGET DURABLE_TARGET                  with DRY_RUN=plan: seconds for which a save may block training, and
#                                                  within which it must be durable
#   KILL_AT TIME_LIMIT                             MODE=restart and scaled: iteration of the kill, or none; seconds for a launch
#   RANKS LIMIT_BYTES REPEAT STEPS_BETWEEN         MODE=replay: what is replayed, and how often
#   RESTART_TRACE_LABEL                            a label that is shown with every figure of this run
#   COMMAND_TO=FILE                                prepare everything, write the command to FILE, each word terminated
#                                                  by NUL, and launch nothing; tools/restart_drill runs presets so
# Defaults are in docs/cluster.md. A setting that would have no effect, as MAX_RESTARTS with LAUNCHER=torchrun, is refused by
# name.
#
# examples:
#   DRY_RUN=1 bash run_70b_tp8_pp8.sh
#   HOSTFILE=hosts DP=2 ENGINE=lazy SAVE_DIR=/scratch/70b bash run_70b_tp8_pp8.sh
#   ITERS=20 DEVICE=cpu bash run_tiny_tp2_pp2_dp2.sh
#
# exit status: that of the training; 1 environment or data could not be created, 2 wrong settings or arguments

BENCH_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$BENCH_DIR/../.." && pwd)
RUNS=$ROOT/runs
if [[ ! -f $ROOT/setup.py ]]; then # installed: nothing to set up, and runs do not belong in site-packages
    RUNS=$PWD/runs SKIP_SETUP=1
fi
source "$BENCH_DIR/usage.sh"
answer_help "$BENCH_DIR/common.sh" "$@" # of the script that sources this
source "$BENCH_DIR/launch/environment.sh"
source "$BENCH_DIR/launch/nodes.sh"
source "$BENCH_DIR/launch/torchrun.sh"
source "$BENCH_DIR/launch/deepspeed.sh"
source "$BENCH_DIR/launch/srun.sh"
source "$BENCH_DIR/launch/fork.sh"
source "$BENCH_DIR/data.sh"
source "$BENCH_DIR/modes.sh"
source "$BENCH_DIR/settings.sh"

say() { printf '[%s] %s\n' "${RUN_NAME:-restart_bench}" "$*" >&2; }

die() {
    printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
    REFUSAL=$* # for other nodes that wait for this one: tell_refusal
    exit 2
}

require_whole_number() {
    local name
    for name in "$@"; do
        [[ ${!name} =~ ^[1-9][0-9]*$ ]] || die "$name=${!name}: give a whole number, at least 1"
    done
}

# Sets every variable that the functions below read, from the preset and the environment.
load_settings() {
    collect_user_env
    check_values
    MODEL=$1 TP=$2 PP=$3
    DP=${DP:-1}
    RUNS_ON_CPU=
    local models=("$BENCH_DIR"/models/*.sh)
    models=("${models[@]##*/}")
    [[ " ${models[*]} " == *" $MODEL.sh "* ]] || die "$MODEL: there is no such model; give one of ${models[*]%.sh}"
    source "$BENCH_DIR/models/$MODEL.sh"
    LABEL=${RESTART_TRACE_LABEL:-}
    [[ $MODE != scaled ]] || scale_model
    [[ $MODE != replay ]] || RUNS_ON_CPU=1
    : "${SEQ_LENGTH:=2048}" "${MICRO_BATCH:=16}" "${ITERS:=15}" "${SAVE_INTERVAL:=5}"
    : "${GLOBAL_BATCH:=$((MICRO_BATCH * DP))}" "${ENGINE:=torch}" "${LAUNCHER:=torchrun}" "${SEQUENCE_PARALLEL:=0}"
    : "${DTYPE:=bf16}" "${RECOMPUTE:=auto}"
    [[ $LAUNCHER =~ ^(torchrun|deepspeed|srun|fork)$ ]] || die "LAUNCHER=$LAUNCHER: use torchrun, deepspeed, srun or fork"
    check_launcher_settings
    WORLD_SIZE=$((TP * PP * DP))
    settle_device
    settle_nodes # early: what is refused from here on is told to the other nodes, whose number is known
    [[ $DTYPE =~ ^(bf16|fp16|fp32)$ ]] || die "DTYPE=$DTYPE: use bf16, fp16 or fp32"
    [[ $RECOMPUTE =~ ^(auto|none|selective|full)$ ]] || die "RECOMPUTE=$RECOMPUTE: use auto, none, selective or full"
    [[ -z ${DEVICE_GB:-} || $RECOMPUTE$DEVICE == autocuda ]] ||
        die "DEVICE_GB=$DEVICE_GB: has an effect only with RECOMPUTE=auto on GPUs; leave it out"
    : "${DEVICE_GB:=80}"
    [[ $SEQUENCE_PARALLEL =~ ^[01]$ ]] || die "SEQUENCE_PARALLEL=$SEQUENCE_PARALLEL: use 1 or 0"
    [[ ${DRY_RUN:-} =~ ^(1|plan|)$ ]] || die "DRY_RUN=$DRY_RUN: use 1 or plan"
    [[ ${DRY_RUN:-} == plan || -z ${BLOCKED_TARGET:-}${DURABLE_TARGET:-} ]] ||
        die "BLOCKED_TARGET=${BLOCKED_TARGET:-} DURABLE_TARGET=${DURABLE_TARGET:-}: are used only by DRY_RUN=plan; set it, or leave them out"

    RUN_NAME=${MODEL}_tp${TP}_pp${PP}_dp${DP}
    : "${WORK_DIR:=$RUNS/$RUN_NAME}"
    SAVE_DIR_GIVEN=${SAVE_DIR:-}
    : "${SAVE_DIR:=$WORK_DIR/checkpoints}"
    [[ ! $SAVE_DIR =~ ^[A-Za-z][A-Za-z0-9+.-]*:/([^/]|$) ]] ||
        die "SAVE_DIR=$SAVE_DIR: a URI has two slashes: give s3://BUCKET/PREFIX, or ./$SAVE_DIR for a directory of that name"
    # Trace files cannot be written to object storage.
    [[ $SAVE_DIR != *://* ]] || : "${TRACE_DIR:=$WORK_DIR/restart_trace}"
    : "${TRACE_DIR:=$SAVE_DIR/restart_trace}"
    settle_python
    check_engine
    settle_data
}

settle_python() {
    if [[ -n ${SKIP_SETUP:-} ]]; then
        PYTHON=${PYTHON:-python3}
    else
        VENV_PYTHON=${VENV_DIR:-$ROOT/.venv}/bin/python
    fi
}

# Refuses an unknown ENGINE; a replay takes several, separated by commas. Only the interpreter with the packages of plugin
# engines knows these, and if it is in an image, only the job can ask it.
check_engine() {
    local known asked name
    known=$(sed -n 's/^    "\(.*\)": EngineEntry(.*/\1/p' "$ROOT/megatron/checkpointing/engines/registry.py")
    known=${known//$'\n'/ }
    asked=("$ENGINE")
    if [[ $MODE == replay ]]; then
        known="$known raw-rank raw-host raw-all s3torchconnector all"
        IFS=, read -r -a asked <<<"$ENGINE"
    fi
    for name in "${asked[@]}"; do
        [[ " $known " != *" $name "* ]] || continue
        [[ -z ${IMAGE:-} ]] || return 0
        known="$known $(PYTHONSAFEPATH=1 PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} "$(python_path)" -c "$PLUGINS" 2>/dev/null)" || true
        [[ " $known " == *" $name "* ]] || die "ENGINE=$ENGINE: there is no engine $name; give one of ${known% }"
    done
}
PLUGINS='from megatron.checkpointing.engines import registry; print(*set(registry.engine_names()) - set(registry.builtin_engines()))'

# The interpreter that training runs with. PYTHON is also what setup_env.sh creates .venv with.
python_path() { printf '%s' "${VENV_PYTHON:-${PYTHON:-}}"; }

has_environment() { [[ -n $(type -P "$(python_path)") ]]; }

ensure_environment() {
    [[ -n ${SKIP_SETUP:-} ]] || "$BENCH_DIR/setup_env.sh"
}

# Sets TRAINING_ARGS, the command line of pretrain_gpt.py.
build_training_args() {
    local extra=() data=() backend=nccl sequence=() dtype=()
    [[ $DEVICE == cuda ]] || backend=gloo
    [[ $SEQUENCE_PARALLEL == 0 ]] || sequence=(--sequence-parallel)
    [[ $DTYPE == fp32 ]] || dtype=("--$DTYPE")
    # read returns non-zero at the end of its input, which is expected here
    read -r -d '' -a extra <<<"${EXTRA_ARGS:-}" || true
    read -r -d '' -a data <<<"$DATA_PATH" || true
    TRAINING_ARGS=(
        --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" "${sequence[@]}"
        --distributed-backend "$backend"
        --num-layers "$NUM_LAYERS" --hidden-size "$HIDDEN_SIZE" --ffn-hidden-size "$FFN_HIDDEN_SIZE"
        --num-attention-heads "$NUM_ATTENTION_HEADS" --num-key-value-heads "$NUM_KEY_VALUE_HEADS"
        --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH"
        --use-rotary-position-embeddings --untie-embeddings-and-output-weights --swiglu
        --normalization rmsnorm --disable-bias-linear --no-query-key-layer-scaling
        --attention-dropout 0 --hidden-dropout 0
        --micro-batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH" --train-iters "$ITERS"
        --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
        --lr 3e-4 --lr-decay-style cosine --min-lr 3e-5 --lr-warmup-iters 1
        "${dtype[@]}" --deepspeed --zero-stage 1
        --data-path "${data[@]}" --data-impl mmap --split 949,50,1 --num-workers 0
        "${TOKENIZER_ARGS[@]}"
        --log-interval 1 --eval-interval 1000 --eval-iters 0
        --save "$SAVE_DIR" --load "$SAVE_DIR" --save-interval "$SAVE_INTERVAL"
        --checkpoint-engine "$ENGINE" --restart-trace-dir "$TRACE_DIR"
        "${extra[@]}"
    )
}

# Adds the flags of RECOMPUTE to TRAINING_ARGS. Sets RECOMPUTED to the mode, and RECOMPUTED_WHY. auto: as few activations are
# recomputed as the memory of a device allows, which ckpt_plan estimates, and none on CPUs; flags in EXTRA_ARGS decide instead.
add_recomputation() {
    RECOMPUTED=$RECOMPUTE RECOMPUTED_WHY=RECOMPUTE=$RECOMPUTE
    if [[ $RECOMPUTE == auto ]]; then
        choose_recomputation
    fi
    case $RECOMPUTED in
    selective) TRAINING_ARGS+=(--recompute-granularity selective) ;;
    full) TRAINING_ARGS+=(--checkpoint-activations --deepspeed-activation-checkpointing) ;;
    esac
}

tell_recomputation() { say "recomputed activations: $RECOMPUTED ($RECOMPUTED_WHY)"; }

# Sets RECOMPUTED and RECOMPUTED_WHY. Wrong flags are left to check_flags and check_run, which refuse them.
choose_recomputation() {
    local found
    RECOMPUTED=full
    if [[ " ${EXTRA_ARGS:-} " =~ \ --(checkpoint-activations|recompute-|activations-checkpoint-) ]]; then
        RECOMPUTED=none RECOMPUTED_WHY="by RECOMPUTE; EXTRA_ARGS says what is"
    elif [[ $DEVICE == cpu ]]; then
        RECOMPUTED=none RECOMPUTED_WHY="on CPUs"
    elif ! has_environment; then
        RECOMPUTED_WHY="memory is not estimated: there is no $(python_path) yet; RECOMPUTE=none or selective recomputes less"
    elif ! found=$(run_tool megatron_restart_tools.ckpt_plan --dp "$DP" --recompute-on "$DEVICE_GB" -- "${TRAINING_ARGS[@]}" 2>&1); then
        RECOMPUTED_WHY="memory is not estimated: ${found##*$'\n'}"
    else
        RECOMPUTED=${found%%:*} RECOMPUTED_WHY="the fullest device holds ${found#*: }"
    fi
}

# Sets LAUNCH_ENV: variables that every rank needs in its environment, as NAME=VALUE.
build_launch_env() {
    LAUNCH_ENV=(PYTHONUNBUFFERED=1)
    [[ -z $LABEL ]] || LAUNCH_ENV+=(RESTART_TRACE_LABEL="$LABEL")
    if [[ $DEVICE == cpu ]]; then
        LAUNCH_ENV+=(DS_ACCELERATOR=cpu OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_VISIBLE_DEVICES=)
        if ((NNODES == 1)) && [[ -e /sys/class/net/lo ]]; then
            LAUNCH_ENV+=(GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}")
        fi
    fi
}

# The same on all nodes of a launch, and new for each launch: the trace numbers its cycles by it. Not set if the command
# of each node is started by hand, since there is no common value then; the trace's own rule applies.
set_launch_id() {
    local id=${RESTART_TRACE_LAUNCH_ID:-}
    if [[ -z $id && -z ${NODE_RANK:-} ]]; then
        id=$(date +%Y%m%dT%H%M%S)-$$-$RANDOM
    fi
    [[ -z $id ]] || LAUNCH_ENV+=(RESTART_TRACE_LAUNCH_ID="$id")
}

# Sets COMMAND to the command of node $1 and prints nothing.
node_command() {
    "${LAUNCHER}_command" "$1"
}

print_quoted() {
    local quoted
    printf -v quoted '%q ' "$@"
    printf '%s\n' "${quoted% }"
}

# Prints words that show_user_env has made fit to be shown.
print_command() { print_quoted "$@" | sed 's/=\\\*\\\*\\\* /=*** /g'; }

print_commands() {
    local node
    show_user_env
    for ((node = 0; node < $("${LAUNCHER}_num_commands"); node++)); do
        node_command "$node"
        print_command "${COMMAND[@]}"
    done
}

# Prints, on stderr, what DRY_RUN shows besides commands.
show_needs() {
    [[ $DRY_RUN == plan || $ENGINE == memory ]] || return 0
    local what="the host memory that saves take" show=show_host_memory
    [[ $DRY_RUN != plan ]] || { what="the plan" && show=show_plan; }
    if has_environment; then
        "$show" >&2
    else
        say "cannot print $what: there is no $(python_path) yet; give SKIP_SETUP=1 PYTHON=..."
    fi
}

# Sets PLANNED, the options of tools.ckpt_plan that say what this launch is.
build_planned() {
    PLANNED=(--model "$MODEL" --tp "$TP" --pp "$PP" --dp "$DP" --engine "$ENGINE" --recompute "$RECOMPUTED" --ranks-per-host "$GPUS_PER_NODE")
    [[ $LAUNCHER == fork ]] && fork_coordinates || PLANNED+=(--no-coordinator)
}

# Prints the plan of tools.ckpt_plan for the run. It runs in the current directory, so relative paths stay valid.
show_plan() {
    build_planned
    run_tool megatron_restart_tools.ckpt_plan "${PLANNED[@]}" --run ${BLOCKED_TARGET:+--blocked-target "$BLOCKED_TARGET"} \
        ${DURABLE_TARGET:+--durable-target "$DURABLE_TARGET"} -- "${TRAINING_ARGS[@]}"
}

# Prints the host memory that saves of ENGINE=memory take; computed without torch.
show_host_memory() {
    build_planned
    run_tool megatron_restart_tools.ckpt_plan "${PLANNED[@]}" --host-memory -- "${TRAINING_ARGS[@]}"
}

# Refuses a launch that no single command starts.
check_command_to() {
    ! "${LAUNCHER}_starts_all" || return 0
    [[ $LAUNCHER != fork ]] || ! fork_coordinates || return 0
    local nodes="$NNODES nodes take a command each"
    ((NNODES > 1)) || nodes="a host of HOSTFILE that is not this one takes a command of its own"
    die "COMMAND_TO: $nodes with LAUNCHER=$LAUNCHER; use LAUNCHER=srun within an allocation, or LAUNCHER=fork with MAX_RESTARTS"
}

# Writes the single command that starts all ranks to COMMAND_TO, for a program that launches it repeatedly.
write_command() {
    if [[ $LAUNCHER == fork ]] && fork_coordinates; then
        COMMAND=(bash "$(realpath "$0")" "$ROOT/pretrain_gpt.py" "${TRAINING_ARGS[@]}") # see run_preset
        printf '%s\0' "${COMMAND[@]}" >"$COMMAND_TO"
        return
    fi
    settle_port
    node_command 0
    printf '%s\0' "${COMMAND[@]}" >"$COMMAND_TO"
}

# Refuses a WORK_DIR that cannot be written to.
check_work_dir() {
    mkdir -p "$WORK_DIR" 2>/dev/null && [[ -w $WORK_DIR ]] || die "WORK_DIR=$WORK_DIR: cannot be written to; set another"
}

# Runs the checks of every rank once, before any rank starts. Arguments: further flags.
check_run() {
    local said status=0
    said=$(run_checks "${TRAINING_ARGS[@]}" "$@") || status=$?
    [[ -z $said ]] || printf '%s\n' "$said" >&2
    ((status == 0)) || { REFUSAL=${said#error: } && exit 2; }
}

run_checks() {
    WORLD_SIZE=$WORLD_SIZE LOCAL_WORLD_SIZE=$GPUS_PER_NODE RANK=0 LOCAL_RANK=0 run_tool megatron.training.check_run "$@" 2>&1
}

# The part of check_run that writes nothing and asks no object storage: for a dry run, and before a job is submitted. An image
# has an interpreter of its own, with which only the job can check.
check_flags() {
    local said status=0 options=(--read-only)
    [[ $DATA_KIND == given ]] || options+=(--without-data)
    if [[ -n ${IMAGE:-} ]] || ! has_environment; then
        local interpreter=$(python_path)
        say "flags are not checked before the launch: there is no ${IMAGE:-$interpreter} to check them with"
        return
    fi
    said=$(run_checks "${options[@]}" "${TRAINING_ARGS[@]}") || status=$?
    case $status in
    0) ;;
    2) printf '%s\n' "$said" >&2 && exit 2 ;;
    *) say "flags are not checked before the launch: $(python_path) cannot do it: ${said##*$'\n'}" ;;
    esac
}

# The checks of nodes that need none of them here.
check_shown_nodes() {
    check_nodes
    ((${#HOSTS[@]} == 0)) || check_slots
}

# Starts all ranks of preset $1 on TP $2 x PP $3, or prints or writes the command that does. Further arguments are flags of
# pretrain_gpt.py, in place of the preset's.
train() {
    [[ -z ${NODE_RANK:-} || -n ${DRY_RUN:-}${COMMAND_TO:-} ]] || trap tell_refusal EXIT
    load_settings "$@"
    check_launch_settings
    build_training_args
    (($# == 3)) || TRAINING_ARGS=("${@:4}")
    build_launch_env
    [[ -n ${COMMAND_TO:-} ]] || set_launch_id # each launch of a told command gets one of its own
    if [[ -n ${DRY_RUN:-} ]]; then
        check_shown_nodes
        [[ -z ${COMMAND_TO:-} ]] || check_command_to
        if (($# == 3)); then
            add_recomputation
            check_flags
            tell_recomputation
        fi
        print_commands
        show_needs
        return
    fi
    check_devices
    # Later check_hosts reaches them, too.
    (($# == 3)) && has_environment || check_reach
    [[ $MODE != scaled ]] || check_memory_of_scaled
    check_work_dir
    ensure_environment
    check_torch_build
    (($# > 3)) || add_recomputation # by the environment that is there now
    (($# > 3)) || check_hosts # those of a launch of the drill's were compared when it asked for the command
    prepare_data
    if [[ -n ${COMMAND_TO:-} ]]; then
        check_command_to
        write_command
        return
    fi
    if (($# > 3)); then # launched by the drill, which has checked its command and measures the time of this launch
        "${LAUNCHER}_launch"
        return
    fi
    check_run
    [[ $SAVE_DIR == *://* ]] || mkdir -p "$SAVE_DIR"
    if [[ -e $SAVE_DIR/latest ]]; then
        say "resuming from $(<"$SAVE_DIR/latest") in $SAVE_DIR"
    fi
    tell_recomputation
    say "training $ITERS iterations on $WORLD_SIZE ranks (TP $TP x PP $PP x DP $DP), saving to $SAVE_DIR"
    tell_unused_hosts
    say "afterwards: $(python_path) -m megatron_restart_tools.ckpt_analysis $TRACE_DIR"
    "${LAUNCHER}_launch"
}
