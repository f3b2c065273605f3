# Launching with DeepSpeed's launcher; sourced by common.sh. One command, which reaches the other nodes by itself.

deepspeed_num_commands() { echo 1; }

deepspeed_starts_all() { ((NNODES == 1)); } # its file of variables would be of the first launch only

# Sets COMMAND. Variables reach remote ranks through the file that DS_ENV_FILE names.
deepspeed_command() {
    local hosts=()
    if ((${#HOSTS[@]} > 0)); then
        hosts=(--hostfile "$HOSTFILE" --num_nodes "$NNODES")
        LAUNCH_ENV+=(DS_ENV_FILE="$(deepspeed_env_file)")
    elif ((NNODES > 1)) && [[ -z ${DRY_RUN:-} ]]; then
        die "LAUNCHER=deepspeed on $NNODES nodes: name them in HOSTFILE"
    fi
    COMMAND=(
        env "${LAUNCH_ENV[@]}"
        "$(python_path)" -m deepspeed.launcher.runner "${hosts[@]}" --num_gpus "$GPUS_PER_NODE"
        --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}"
        "$ROOT/pretrain_gpt.py" "${TRAINING_ARGS[@]}"
    )
}

deepspeed_env_file() { printf '%s' "$WORK_DIR/deepspeed_env"; }

deepspeed_launch() {
    if ((NNODES == 1)); then
        : "${MASTER_PORT:=$(free_port)}"
    fi
    if ((${#HOSTS[@]} > 0)); then
        printf '%s\n' "${LAUNCH_ENV[@]}" >"$(deepspeed_env_file)"
    fi
    deepspeed_command 0
    exec "${COMMAND[@]}"
}
