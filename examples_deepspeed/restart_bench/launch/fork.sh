# Launching with megatron.launch, which imports once for all ranks of a node; sourced by common.sh. One command per node.
#
# Over HOSTFILE with MAX_RESTARTS a coordinator on this host decides which nodes train, and starts all ranks again when one
# fails or a node is lost. Hosts beyond those that the layout takes are spares (SPARES: how many of them).

fork_num_commands() {
    local commands=$((NNODES + SPARES))
    ! fork_coordinates || commands=$((commands + 1))
    echo "$commands"
}

fork_starts_all() { torchrun_starts_all; }

# Whether this launch has a coordinator.
fork_coordinates() {
    ((${#HOSTS[@]} > 0 && NNODES + SPARES > 1 && ${MAX_RESTARTS:-0} > 0)) && [[ -z ${NODE_RANK:-} ]]
}

# Sets COMMAND for node $1, or for the coordinator, whose number follows the nodes'. COORDINATOR: its address.
fork_command() {
    local options=(--master-addr "$MASTER_ADDR")
    if (($1 == NNODES + SPARES)); then
        fork_coordinate
        return
    fi
    if fork_coordinates; then
        options=(--coordinator "${COORDINATOR:-$COORDINATOR_ADDR:PORT}" --node-rank "$1" --address "${HOSTS[$1]}")
        [[ -z ${MASTER_PORT:-} ]] || options+=(--master-port "$MASTER_PORT")
    else
        options+=(--nnodes "$NNODES" --node-rank "$1" --max-restarts "${MAX_RESTARTS:-0}" ${STANDBY:+--standby})
        [[ ${STANDBY:-} != load ]] || options+=(--standby-load)
        if ((NNODES > 1)) || [[ -n ${MASTER_PORT:-} ]]; then
            options+=(--master-port "${MASTER_PORT:-29500}")
        fi
    fi
    COMMAND=(
        env "${CARRIED_ENV[@]}" "${LAUNCH_ENV[@]}"
        "$(python_path)" "$ROOT/megatron/launch" --nproc-per-node "$GPUS_PER_NODE" "${options[@]}"
        "$ROOT/pretrain_gpt.py" "${TRAINING_ARGS[@]}"
    )
}

# Sets COMMAND to the coordinator's, which writes its port to PORT_FILE.
fork_coordinate() {
    COMMAND=(
        env "${LAUNCH_ENV[@]}"
        "$(python_path)" "$ROOT/megatron/launch" coordinate --nnodes "$NNODES" --spares "$SPARES"
        --nproc-per-node "$GPUS_PER_NODE" --max-restarts "${MAX_RESTARTS:-0}"
        --heartbeat-timeout "${HEARTBEAT_TIMEOUT:-2}" ${ALLOW_SHRINK:+--allow-shrink}
        --address "$COORDINATOR_ADDR" ${COORDINATOR_PORT:+--port "$COORDINATOR_PORT"} ${PORT_FILE:+--port-file "$PORT_FILE"}
        "$ROOT/pretrain_gpt.py" "${TRAINING_ARGS[@]}"
    )
}

fork_launch() {
    if fork_coordinates; then
        launch_with_coordinator
    else
        launch_per_node
    fi
}

# The coordinator decides the exit status of the launch: this shell ignores lost nodes.
launch_with_coordinator() {
    local node coordinator status=0
    PORT_FILE=$(mktemp -u)
    trap 'rm -f "$PORT_FILE"; stop_jobs' EXIT
    carry_user_env
    fork_coordinate
    "${COMMAND[@]}" &
    coordinator=$!
    while [[ ! -e $PORT_FILE ]]; do
        kill -0 "$coordinator" 2>/dev/null || { wait "$coordinator" || exit; }
        sleep 0.02
    done
    COORDINATOR=$COORDINATOR_ADDR:$(<"$PORT_FILE")
    for ((node = 0; node < NNODES + SPARES; node++)); do
        start_node "$node"
    done
    # SIGUSR1 tells the coordinator that a node's command failed before all had joined; later it notices by itself.
    while kill -0 "$coordinator" 2>/dev/null; do
        status=0
        wait -n || status=$?
        ((status == 0)) || kill -USR1 "$coordinator" 2>/dev/null || true
    done
    # The coordinator's status, unless the loop has just waited for it
    wait "$coordinator" || { (($? == 127)) || wait "$coordinator" || status=$?; }
    return "$status"
}
