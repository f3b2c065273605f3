#!/usr/bin/env bash
# Submits a preset as a job of Slurm or PBS: writes the job script to WORK_DIR and passes it to sbatch or qsub. The
# repository, WORK_DIR and SAVE_DIR must be on a file system that all nodes share; SAVE_DIR may be s3://BUCKET/PREFIX.
#
#   submit.sh PRESET [--scheduler slurm|pbs|none] [--nodes N] [--time H:MM:SS] [-- OPTION ...]
#
#   PRESET        the name in run_PRESET.sh
#   --scheduler   none: run the preset now, without a job (default: the scheduler whose command is on PATH)
#   --nodes       nodes of the job (default: what the layout takes). With more nodes each gets fewer ranks, unless
#                 GPUS_PER_NODE says how many; with LAUNCHER=fork and MAX_RESTARTS (PBS) the others are spares
#   --time        when the scheduler ends the job (default: 4:00:00). Slurm sends SIGTERM 120 s earlier, at which a training
#                 saves and ends (--exit-signal-handler)
#   --            followed by further options of sbatch or qsub: --account, --partition, -A, -q
#
# The job is requeued after a node failure, and then resumes. It gets the settings of the preset's script, which are
# environment variables (run_PRESET.sh --help), with their values at submission. Settings, flags and DATA_PATH are checked
# before. Further settings:
#   IMAGE      Apptainer image whose Python the ranks run with (default: the .venv of the repository)
#   DRY_RUN=1  print the job, and the command that submits it, with *** in place of secrets; touch nothing.
#              DRY_RUN=plan also prints what the run needs on stderr, as the preset's script does
#
# examples:
#   ENGINE=lazy SAVE_DIR=/scratch/70b bash submit.sh 70b_tp8_pp8 -- --account physics
#   ENGINE=lazy SAVE_DIR=s3://bucket/70b bash submit.sh 70b_tp8_pp8
#   DRY_RUN=1 bash submit.sh 13b_tp4_pp4 --scheduler pbs --time 1:00:00
#   MODE=replay bash submit.sh 70b_tp8_pp8
#
# exit status: 0 submitted, 2 wrong arguments or settings, or the scheduler refused the job; with --scheduler none, or
# with sbatch's option --wait, that of the preset
set -euo pipefail
SCRIPTS=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$SCRIPTS/usage.sh"
answer_help "" "$@"

# Settings of a preset's script that are passed on to the job.
SETTINGS=(
    MODE ENGINE SAVE_DIR SAVE_INTERVAL TRACE_DIR DP ITERS MICRO_BATCH GLOBAL_BATCH SEQ_LENGTH SEQUENCE_PARALLEL DTYPE
    RECOMPUTE DEVICE_GB
    DATA_PATH TOKENIZER_TYPE TOKENIZER_MODEL VOCAB_FILE MERGE_FILE VOCAB_SIZE EXTRA_ARGS WORK_DIR MAX_RESTARTS SPARES
    STANDBY ALLOW_SHRINK HEARTBEAT_TIMEOUT HOST_GRACE COORDINATOR_ADDR COORDINATOR_PORT EXPORT MASTER_ADDR MASTER_PORT KILL_AT TIME_LIMIT
    RANKS LIMIT_BYTES REPEAT STEPS_BETWEEN RESTART_TRACE_LABEL SKIP_SETUP PYTHON VENV_DIR TORCH_VARIANT TORCH_VERSION TORCH_INDEX_URL
)
OF_A_LAUNCH=(HOSTFILE NNODES NODE_RANK MEET_TIMEOUT COMMAND_TO) # which are set in the job

refuse() {
    printf 'submit.sh: error: %s\n' "$*" >&2
    exit 2
}

# Sets PRESET, SCHEDULER, NODES, TIME and OPTIONS.
parse_command_line() {
    PRESET='' SCHEDULER='' NODES='' TIME=4:00:00 OPTIONS=()
    while (($# > 0)); do
        case $1 in
        --scheduler | --nodes | --time)
            (($# > 1)) || refuse "$1: give its value; see --help"
            case $1 in
            --scheduler) SCHEDULER=$2 ;;
            --nodes) NODES=$2 ;;
            --time) TIME=$2 ;;
            esac
            shift 2
            ;;
        --scheduler=* | --nodes=* | --time=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
        --)
            OPTIONS=("${@:2}")
            break
            ;;
        -*) refuse "$1: unknown option; options of sbatch or qsub come after --" ;;
        *)
            [[ -z $PRESET ]] || refuse "$1: a job runs one preset, and $PRESET is already given"
            PRESET=$1
            shift
            ;;
        esac
    done
    check_command_line
}

check_command_line() {
    local presets=("$SCRIPTS"/run_*.sh)
    presets=("${presets[@]##*/run_}")
    [[ -n $PRESET ]] || refuse "PRESET is missing; give one of ${presets[*]%.sh}"
    [[ -f $SCRIPTS/run_$PRESET.sh ]] || refuse "PRESET $PRESET: there is no such preset; give one of ${presets[*]%.sh}"
    [[ -z $NODES || $NODES =~ ^[1-9][0-9]*$ ]] || refuse "--nodes $NODES: give a whole number, at least 1"
    [[ $TIME =~ ^[0-9]+:[0-5][0-9]:[0-5][0-9]$ ]] || refuse "--time $TIME: give hours, minutes and seconds, as 4:00:00"
    settle_scheduler
    if [[ $SCHEDULER == none ]]; then
        ((${#OPTIONS[@]} == 0)) || refuse "${OPTIONS[*]}: --scheduler none submits nothing; leave out -- and what follows it"
        [[ -z $NODES ]] || refuse "--nodes $NODES: --scheduler none has no job; name the nodes in HOSTFILE, or leave it out"
        return
    fi
    local name
    for name in "${OF_A_LAUNCH[@]}"; do
        [[ -z ${!name:-} ]] || refuse "$name=${!name}: $SCHEDULER assigns the job's nodes; leave it out"
    done
}

settle_scheduler() {
    if [[ -z $SCHEDULER ]]; then
        if command -v sbatch >/dev/null; then
            SCHEDULER=slurm
        elif command -v qsub >/dev/null; then
            SCHEDULER=pbs
        else
            refuse "neither sbatch nor qsub is on PATH; give --scheduler slurm or pbs with DRY_RUN=1 to see the job, or" \
                "--scheduler none to run the preset here"
        fi
    fi
    case $SCHEDULER in
    slurm) SUBMIT=(sbatch --parsable) ;;
    pbs) SUBMIT=(qsub) ;;
    none) return ;;
    *) refuse "--scheduler $SCHEDULER: use slurm, pbs or none" ;;
    esac
    [[ -n ${DRY_RUN:-} ]] || command -v "${SUBMIT[0]}" >/dev/null ||
        refuse "--scheduler $SCHEDULER: ${SUBMIT[0]} is not on PATH; submit where it is, such as on a login node"
}

# Called by the preset's script with MODEL TP PP, in place of running the preset.
submit_preset() {
    local given=() name ranks_given=${GPUS_PER_NODE:-}
    end_with_a_save
    for name in "${SETTINGS[@]}"; do
        [[ -z ${!name+set} ]] || given+=("$name=${!name}")
    done
    unset SLURM_JOB_ID PBS_JOBID # set if this shell is in a job
    settle_launcher
    load_job_settings "$@"
    settle_job_nodes "$ranks_given"
    [[ $WORK_DIR == /* ]] || WORK_DIR=$PWD/$WORK_DIR
    [[ ! $WORK_DIR =~ [[:space:]] ]] || refuse "WORK_DIR=$WORK_DIR: $SCHEDULER does not accept a path with white space; use another"
    [[ -z $LAUNCHER_GIVEN ]] || given+=("LAUNCHER=$LAUNCHER")
    given+=("DEVICE=$DEVICE")
    [[ $MODE == replay ]] || given+=("GPUS_PER_NODE=$GPUS_PER_NODE")
    settle_image
    [[ $MODE == replay ]] || check_job
    JOB=$WORK_DIR/job.$SCHEDULER
    if [[ -n ${DRY_RUN:-} ]]; then
        show_user_env
        write_job "${CARRIED_ENV[@]}" "${given[@]}" | sed 's/=\\\*\\\*\\\*$/=***/'
        print_quoted "${SUBMIT[@]}" "${OPTIONS[@]}" "$JOB"
        [[ $MODE == replay ]] || show_needs
        return
    fi
    mkdir -p "$WORK_DIR" 2>/dev/null && [[ -w $WORK_DIR ]] || refuse "WORK_DIR=$WORK_DIR: cannot be written to; set another"
    [[ -z ${IMAGE:-} ]] || write_image_python
    write_job "${USER_ENV[@]}" "${given[@]}" | write_private "$JOB"
    submit_job
}

# Slurm signals the ranks before the time limit, and without this flag they would end without a save.
end_with_a_save() {
    [[ $SCHEDULER == slurm && $MODE =~ ^(train|restart)$ && -z $DRILLS && " ${EXTRA_ARGS:-} " != *" --exit-signal-handler "* ]] || return 0
    EXTRA_ARGS="${EXTRA_ARGS:+$EXTRA_ARGS }--exit-signal-handler"
}

# load_settings, with what only the job knows: the address of rank 0, and under PBS the hosts, among which SPARES are.
load_job_settings() {
    local address=${MASTER_ADDR:-}
    SPARES_OF_JOB=
    MASTER_ADDR=${MASTER_ADDR:-of_the_job}
    [[ $SCHEDULER != pbs ]] || { SPARES_OF_JOB=${SPARES:-} && SPARES=; }
    load_settings "$@"
    MASTER_ADDR_GIVEN=$address
}

# Checks what the preset's script will check in the job, as far as that needs no node of it.
check_job() {
    local node
    if [[ $SCHEDULER == pbs ]]; then # the script will run on the first of the job's hosts
        HOSTS=("$(hostname)") HOST_SLOTS=("$GPUS_PER_NODE") HOSTS_SETTING="--nodes $JOB_NODES"
        for ((node = 1; node < JOB_NODES; node++)); do
            HOSTS+=("host_${node}_of_the_job") HOST_SLOTS+=("$GPUS_PER_NODE")
        done
        SPARES=$SPARES_OF_JOB COORDINATOR_ADDR=$COORDINATOR_ADDR_GIVEN
        check_values
        check_launcher_settings
        settle_spares
    fi
    check_launch_settings
    [[ -z $DRILLS ]] || settle_drill
    build_training_args
    add_recomputation
    check_flags
    [[ -z ${DRY_RUN:-} ]] || tell_recomputation
}

# Modes that start their processes themselves, on one node, need no launcher.
settle_launcher() {
    LAUNCHER_GIVEN=${LAUNCHER:-}
    if [[ $MODE == scaled ]]; then
        [[ ${LAUNCHER:-} != srun ]] || refuse "LAUNCHER=srun: MODE=scaled starts its ranks itself, on one node; leave it out"
        return
    fi
    [[ $MODE != replay ]] || return 0
    if [[ $SCHEDULER == slurm ]]; then
        [[ ${LAUNCHER:-srun} == srun ]] ||
            refuse "LAUNCHER=$LAUNCHER: in a Slurm job srun starts the ranks; leave it out, or start the preset's script within an" \
                "allocation: docs/cluster.md, 'megatron.launch in an allocation'"
        LAUNCHER=srun LAUNCHER_GIVEN=srun
    else
        [[ ${LAUNCHER:-} != srun ]] || refuse "LAUNCHER=srun: is Slurm's, and this is a PBS job; leave it out"
    fi
}

# Sets JOB_NODES, TASKS per node, and with --nodes the ranks per node. $1: the user's GPUS_PER_NODE.
settle_job_nodes() {
    if [[ $MODE == replay || $MODE == scaled ]]; then
        [[ ${NODES:-1} == 1 ]] || refuse "--nodes $NODES: MODE=$MODE runs on one node; leave it out"
        JOB_NODES=1 TASKS=1
        return
    fi
    local layout="$WORLD_SIZE ranks (TP $TP x PP $PP x DP $DP)"
    if ((${NODES:-NNODES} < NNODES)); then
        refuse "--nodes $NODES: $layout with $GPUS_PER_NODE per node take $NNODES nodes; give --nodes $NNODES, or" \
            "GPUS_PER_NODE=$(((WORLD_SIZE + NODES - 1) / NODES)) if a node has that many"
    fi
    JOB_NODES=${NODES:-$NNODES}
    if ((JOB_NODES > NNODES)) && [[ $LAUNCHER != fork || ${MAX_RESTARTS:-0} == 0 ]]; then
        [[ -z $1 ]] && ((WORLD_SIZE % NODES == 0)) ||
            refuse "--nodes $NODES: $layout with $GPUS_PER_NODE per node take $NNODES nodes, and the others would idle;" \
                "give --nodes $NNODES, or GPUS_PER_NODE"
        NNODES=$NODES GPUS_PER_NODE=$((WORLD_SIZE / NODES))
    fi
    check_nodes
    TASKS=$GPUS_PER_NODE
    [[ $MODE == train || ${KILL_AT:-} == none ]] || "${LAUNCHER}_starts_all" ||
        refuse "MODE=$MODE: $NNODES nodes take a command each with LAUNCHER=$LAUNCHER; use MODE=train, or one node"
}

# Sets PYTHON to a script that runs the image's Python: the presets take a single word as interpreter.
settle_image() {
    [[ -n ${IMAGE:-} ]] || return 0
    [[ $IMAGE == *://* || -f $IMAGE ]] || refuse "IMAGE=$IMAGE: there is no such file"
    given+=("PYTHON=$WORK_DIR/python_in_image" SKIP_SETUP=1)
}

write_image_python() {
    local bound=("$ROOT" "$WORK_DIR")
    if [[ $SAVE_DIR != *://* ]]; then
        mkdir -p "$SAVE_DIR" # bind mounts need existing directories
        bound+=("$SAVE_DIR")
    fi
    printf '#!/usr/bin/env bash\nexec apptainer exec --nv%s %q python "$@"\n' \
        "$(printf ' --bind %q' "${bound[@]}")" "$IMAGE" >"$WORK_DIR/python_in_image"
    chmod +x "$WORK_DIR/python_in_image"
}

slurm_directives() {
    printf '#SBATCH --%s\n' "job-name=$PRESET" "nodes=$JOB_NODES" "ntasks-per-node=$TASKS" "time=$TIME" requeue \
        signal=SIGTERM@120 "output=$WORK_DIR/slurm-%j.out" open-mode=append
    [[ $DEVICE != cuda ]] || printf '#SBATCH --gpus-per-node=%s\n' "$TASKS"
}

# With these directives PBS_NODEFILE names a host once for each of its tasks.
pbs_directives() {
    local chunk=ncpus=$TASKS:mpiprocs=$TASKS
    [[ $DEVICE != cuda ]] || chunk+=:ngpus=$TASKS
    printf '#PBS -%s\n' "N $PRESET" "l select=$JOB_NODES:$chunk" 'l place=scatter' "l walltime=$TIME" 'r y' 'j oe' "o $WORK_DIR/"
}

# write_job NAME=VALUE ...: prints the job script, which exports these variables.
write_job() {
    local variable
    printf '#!/usr/bin/env bash\n'
    "${SCHEDULER}_directives"
    printf '# MODE=%s of %s: %s ranks (TP %s x PP %s x DP %s). Written by submit.sh.\n' \
        "$MODE" "$PRESET" "$WORLD_SIZE" "$TP" "$PP" "$DP"
    printf 'cd %q\n' "$PWD"
    for variable in "$@"; do
        printf 'export %s=%q\n' "${variable%%=*}" "${variable#*=}"
    done
    [[ -z ${IMAGE:-} ]] || printf 'unset IMAGE\n' # PYTHON already names it, and sbatch passes this environment on
    printf 'exec bash %q\n' "$SCRIPTS/run_$PRESET.sh"
}

# Prints where the results will be.
say_results() {
    local directory
    directory=$(run_directory DATE)
    if [[ -n $DRILLS || $MODE == replay ]]; then
        printf '%s' "Afterwards $directory has the report (ckpt_report.html, report.txt) and the trace; DATE: when the job started"
    else
        printf '%s' "Afterwards: $(python_path) -m megatron_restart_tools.ckpt_analysis $TRACE_DIR"
    fi
}

# Prints the job's number. With --wait the exit status of sbatch is that of the job.
submit_job() {
    local status=0 errors
    errors=$(mktemp)
    "${SUBMIT[@]}" "${OPTIONS[@]}" "$JOB" 2>"$errors" >"$JOB.id" || status=$?
    if [[ ! -s $JOB.id ]]; then
        refuse "${SUBMIT[0]} refused $JOB: $(tail -n 1 "$errors" && rm -f "$errors" "$JOB.id")"
    fi
    cat "$errors" >&2
    rm -f "$errors"
    cat "$JOB.id"
    say "submitted $JOB; its output goes to $WORK_DIR. $(say_results)"
    return "$status"
}

parse_command_line "$@"
set --
[[ $SCHEDULER != none ]] || exec bash "$SCRIPTS/run_$PRESET.sh"
source "$SCRIPTS/run_$PRESET.sh"
