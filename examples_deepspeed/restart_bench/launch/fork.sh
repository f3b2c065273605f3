# Launching with megatron.launch, which imports once for all ranks of a node; sourced by common.sh. One command per node.

fork_num_commands() { echo "$NNODES"; }

fork_starts_all() { ((NNODES == 1)); }

# Sets COMMAND for node $1. MAX_RESTARTS: how often it starts all ranks again in place; on one node.
fork_command() {
    local port=()
    if ((NNODES > 1)) || [[ -n ${MASTER_PORT:-} ]]; then
        port=(--master-port "${MASTER_PORT:-29500}")
    fi
    COMMAND=(
        env "${CARRIED_ENV[@]}" "${LAUNCH_ENV[@]}"
        "$(python_path)" "$ROOT/megatron/launch"
        --nnodes "$NNODES" --node-rank "$1" --nproc-per-node "$GPUS_PER_NODE"
        --master-addr "$MASTER_ADDR" "${port[@]}" --max-restarts "${MAX_RESTARTS:-0}"
        "$ROOT/pretrain_gpt.py" "${TRAINING_ARGS[@]}"
    )
}

fork_launch() { launch_per_node; }
