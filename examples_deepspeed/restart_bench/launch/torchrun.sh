# Launching with torchrun; sourced by common.sh. One command per node; over HOSTFILE they are started through ssh.
# launch/fork.sh starts its commands in the same way.

torchrun_num_commands() { echo "$NNODES"; }

torchrun_starts_all() { ((NNODES == 1)) && ! over_hosts; }

# Sets COMMAND for node $1. Static rendezvous is the fastest to start, and a failed rank ends the launch.
torchrun_command() {
    COMMAND=(
        env "${CARRIED_ENV[@]}" "${LAUNCH_ENV[@]}"
        "$(python_path)" -m torch.distributed.run
        --nnodes "$NNODES" --node_rank "$1" --nproc_per_node "$GPUS_PER_NODE"
        --rdzv_backend static --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}"
        --max_restarts 0
        "$ROOT/pretrain_gpt.py" "${TRAINING_ARGS[@]}"
    )
}

torchrun_launch() {
    settle_port
    launch_per_node
}

launch_per_node() {
    if over_hosts; then
        launch_over_hosts
        return
    fi
    ((NNODES == 1)) || meet_hosts
    trap - EXIT
    node_command "${NODE_RANK:-0}"
    exec "${COMMAND[@]}"
}

# Whether $1 is this host: by the full name, or by its first part if one of the two names is not full.
is_this_host() {
    local name
    name=$(hostname)
    [[ $1 == localhost || $1 == 127.0.0.1 || $1 == "$name" || $1 == "${name%%.*}" || $name != *.* && ${1%%.*} == "$name" ]]
}

# Runs at exit, so no command in it may fail: that would replace the exit code.
stop_jobs() {
    [[ -z $SECRETS ]] || rm -f "$SECRETS" || true
    kill $(jobs -pr) 2>/dev/null || true
    wait || true
}

# Starts the command of node $1 in the background, on its host.
start_node() {
    node_command "$1"
    if is_this_host "${HOSTS[$1]}"; then
        "${COMMAND[@]}" &
    else
        # With a terminal (-tt), the remote processes end with the connection.
        ssh -tt -o BatchMode=yes "${HOSTS[$1]}" \
            "cd $(shell_quoted "$PWD") ${SECRETS:+&& . $(shell_quoted "$SECRETS")} && exec $(shell_quoted "${COMMAND[@]}")" \
            </dev/null &
    fi
}

# Node 0 is the first host. If the command of one node fails, the commands of the others are stopped.
launch_over_hosts() {
    local node pid pids=() status=0
    trap stop_jobs EXIT
    carry_user_env
    for ((node = 0; node < NNODES; node++)); do
        start_node "$node"
        pids+=($!)
    done
    while [[ -n $(jobs -pr) ]] && ((status == 0)); do
        wait -n || status=$?
    done
    if ((status == 0)); then
        # Commands that had ended before `wait -n` was called
        for pid in "${pids[@]}"; do
            wait "$pid" || status=$?
            ((status != 127)) || status=0
        done
    fi
    return "$status"
}
