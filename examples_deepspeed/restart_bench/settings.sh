# Checks which settings have an effect together; sourced by common.sh. A setting without an effect is refused by name.

OF_A_COORDINATOR=(ALLOW_SHRINK HEARTBEAT_TIMEOUT COORDINATOR_ADDR COORDINATOR_PORT)
OF_LAUNCHERS=(LAUNCHER HOSTFILE NNODES NODE_RANK GPUS_PER_NODE MASTER_ADDR MASTER_PORT MAX_RESTARTS SPARES STANDBY
    "${OF_A_COORDINATOR[@]}" MEET_TIMEOUT HOST_GRACE)
OF_A_TRAINING=(SAVE_INTERVAL ITERS MICRO_BATCH GLOBAL_BATCH SEQ_LENGTH SEQUENCE_PARALLEL DTYPE RECOMPUTE DEVICE_GB
    DATA_PATH TOKENIZER_TYPE
    TOKENIZER_MODEL VOCAB_FILE MERGE_FILE EXTRA_ARGS)

OF_A_PRESET=(MODEL TP PP NUM_LAYERS HIDDEN_SIZE FFN_HIDDEN_SIZE NUM_ATTENTION_HEADS NUM_KEY_VALUE_HEADS)
WHOLE_NUMBERS=(DP SEQ_LENGTH MICRO_BATCH GLOBAL_BATCH ITERS SAVE_INTERVAL DEVICE_GB NNODES GPUS_PER_NODE)

# refuse_given WHY NAME ...: ends with an error if one of these was given. If NAME has a default by now, NAME_GIVEN holds the
# user's value.
refuse_given() {
    local why=$1 name given
    shift
    for name in "$@"; do
        given=${name}_GIVEN
        [[ -n ${!given+set} ]] || given=$name
        [[ -z ${!given:-} ]] || die "$name=${!given}: $why"
    done
}

# Refuses settings that the MODE ignores.
check_mode_settings() {
    if [[ $MODE == replay ]]; then
        [[ ${KILL_AT:-none} == none ]] || die "KILL_AT=$KILL_AT: MODE=replay injects no fault; use MODE=restart or scaled"
        [[ -z ${COMMAND_TO:-} ]] || die "COMMAND_TO: MODE=replay trains nothing; leave it out"
        refuse_given "MODE=replay trains nothing, and starts its processes itself, on this node; leave it out" TIME_LIMIT \
            "${OF_A_TRAINING[@]}" "${OF_LAUNCHERS[@]}"
        refuse_given "MODE=replay writes its trace to its own directory; leave it out" TRACE_DIR
        [[ ${DRY_RUN:-} != plan ]] || die "DRY_RUN=plan: shows what a training needs; with MODE=replay use DRY_RUN=1"
    else
        refuse_given "has an effect only with MODE=replay, and this is MODE=$MODE; leave it out" \
            RANKS LIMIT_BYTES REPEAT STEPS_BETWEEN
    fi
    [[ $MODE != train ]] || check_settings_of_faults
    [[ ! $MODE =~ ^(replay|scaled)$ || ${DEVICE:-cpu} == cpu ]] || die "DEVICE=$DEVICE: MODE=$MODE runs on CPUs; leave it out"
}

# Refuses settings of faults where this script injects none.
check_settings_of_faults() {
    local why
    if [[ $MODE == train ]]; then
        why="MODE=train injects no fault; use MODE=restart"
    elif [[ -n ${COMMAND_TO:-} ]]; then
        why="with COMMAND_TO another program launches the command and injects faults; leave it out"
    elif [[ ${KILL_AT:-} == none ]]; then
        why="with KILL_AT=none there is one launch, without a limit; leave it out"
    else
        why="SAVE_DIR=${SAVE_DIR:-} holds a checkpoint, which is resumed without a fault; set another SAVE_DIR, or leave this out"
    fi
    [[ ${KILL_AT:-none} == none ]] || refuse_given "$why" KILL_AT
    refuse_given "$why" TIME_LIMIT
}

# Refuses variables that the preset sets itself, whatever their values in the environment.
check_preset_variables() {
    refuse_given "the preset fixes it; choose another preset (run_*.sh), or leave it out" "${OF_A_PRESET[@]}"
}

# Checks the syntax of each value that was given: before any of them is in an arithmetic expression, where bash would
# evaluate a command within it.
check_values() {
    local name
    for name in "${WHOLE_NUMBERS[@]}"; do
        [[ -z ${!name:-} ]] || require_whole_number "$name"
    done
    [[ ${KILL_AT:-none} == none ]] || require_whole_number KILL_AT
    [[ ${HOST_GRACE:-30} =~ ^[0-9]+$ ]] || die "HOST_GRACE=$HOST_GRACE: give whole seconds"
    [[ ${MEET_TIMEOUT:-600} =~ ^[1-9][0-9]*$ ]] || die "MEET_TIMEOUT=$MEET_TIMEOUT: give whole seconds, at least 1"
    [[ ${MAX_RESTARTS:-0} =~ ^(0|[1-9][0-9]*)$ ]] || die "MAX_RESTARTS=$MAX_RESTARTS: give a whole number"
    [[ ${SPARES:-0} =~ ^(0|[1-9][0-9]*)$ ]] || die "SPARES=$SPARES: must be a whole number"
    [[ ${STANDBY:-} =~ ^(1|load)?$ ]] || die "STANDBY=$STANDBY: use 1 or load, or leave it out"
    [[ ${ALLOW_SHRINK:-1} == 1 ]] || die "ALLOW_SHRINK=$ALLOW_SHRINK: use 1, or leave it out"
    [[ ${HEARTBEAT_TIMEOUT:-2} =~ ^[0-9]+(\.[0-9]+)?$ && ! ${HEARTBEAT_TIMEOUT:-2} =~ ^0+(\.0[0-9]*)?$ ]] ||
        die "HEARTBEAT_TIMEOUT=$HEARTBEAT_TIMEOUT: give seconds, as 2 or 0.5, at least 0.1"
    require_port MASTER_PORT COORDINATOR_PORT
}

# Where srun starts the ranks: prints how LAUNCHER=fork can be used there.
fork_instead() {
    [[ $LAUNCHER != srun ]] ||
        echo ". In a Slurm allocation LAUNCHER=fork takes a HOSTFILE: docs/cluster.md, 'megatron.launch in an allocation'"
}

# Refuses settings that the LAUNCHER ignores on any nodes.
check_launcher_settings() {
    [[ $LAUNCHER == fork ]] || refuse_given "only LAUNCHER=fork restarts in place$(fork_instead)" MAX_RESTARTS
    if [[ $LAUNCHER != fork || ${MAX_RESTARTS:-0} == 0 ]]; then
        [[ ${SPARES:-0} == 0 ]] ||
            die "SPARES=$SPARES: only LAUNCHER=fork with MAX_RESTARTS uses spare nodes; leave it out"
        refuse_given "has an effect only with LAUNCHER=fork and MAX_RESTARTS; set both, or leave it out" "${OF_A_COORDINATOR[@]}"
    fi
    [[ $LAUNCHER == deepspeed ]] || refuse_given "has an effect only with LAUNCHER=deepspeed over HOSTFILE; leave it out" HOST_GRACE
    [[ $LAUNCHER != srun ]] || refuse_given "srun starts the ranks of all nodes; leave it out" NODE_RANK
    [[ -n ${STANDBY:-} ]] || return 0
    [[ ${MAX_RESTARTS:-0} != 0 && -z ${HOSTFILE:-} ]] ||
        die "STANDBY=$STANDBY: needs MAX_RESTARTS, and one node (no HOSTFILE)"
    refuse_given "standby ranks rendezvous while running ranks use this port; leave it out, and each start takes a free port" \
        MASTER_PORT
}

# Refuses settings that a launch on these nodes ignores.
check_launch_settings() {
    local of_hosts="has an effect only with MAX_RESTARTS over several hosts of HOSTFILE; leave it out"
    [[ $ENGINE != memory || $LAUNCHER == fork ]] ||
        die "ENGINE=memory: megatron.launch holds the memory of its saves; use LAUNCHER=fork, or another engine$(fork_instead)"
    [[ -z ${STANDBY:-} || $DEVICE == cpu ]] ||
        die "STANDBY=$STANDBY: standby ranks would take memory of the devices that train; leave it out on CUDA devices"
    if [[ $LAUNCHER == fork ]] && fork_coordinates; then
        refuse_given "with MAX_RESTARTS over HOSTFILE the ranks of each start meet on the host of its node 0, by its name in \
HOSTFILE; leave it out (COORDINATOR_ADDR: where the hosts reach this one)" MASTER_ADDR
    else
        refuse_given "$of_hosts" "${OF_A_COORDINATOR[@]}"
        [[ ${SPARES_GIVEN:-0} == 0 ]] || die "SPARES=$SPARES_GIVEN: $of_hosts"
        ((NNODES == 1)) || [[ ${MAX_RESTARTS:-0} == 0 ]] ||
            die "MAX_RESTARTS=$MAX_RESTARTS: launchers that are started on each of $NNODES nodes do not agree on restarts; name the" \
                "hosts in HOSTFILE, without NODE_RANK, or leave it out"
    fi
    over_hosts || refuse_given "has an effect only with LAUNCHER=deepspeed over HOSTFILE; leave it out" HOST_GRACE
    if [[ -z ${NODE_RANK:-} ]] || ((NNODES == 1)); then
        refuse_given "has an effect only if you start the launch on each of several nodes with NODE_RANK; leave it out" MEET_TIMEOUT
    elif [[ $LAUNCHER == deepspeed ]]; then
        die "NODE_RANK=$NODE_RANK: LAUNCHER=deepspeed starts the ranks of all nodes from one; name them in HOSTFILE, and leave it out"
    fi
}
