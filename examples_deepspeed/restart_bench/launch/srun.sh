# Launching with Slurm's srun, within an allocation; sourced by common.sh. One command, one task per rank.

srun_num_commands() { echo 1; }

srun_starts_all() { :; }

# Sets COMMAND. Slurm numbers the tasks; a rank that fails ends the step.
srun_command() {
    COMMAND=(
        env "${LAUNCH_ENV[@]}" MASTER_ADDR="$MASTER_ADDR" MASTER_PORT="${MASTER_PORT:-29500}"
        WORLD_SIZE="$WORLD_SIZE" LOCAL_WORLD_SIZE="$GPUS_PER_NODE"
        srun --nodes "$NNODES" --ntasks "$WORLD_SIZE" --ntasks-per-node "$GPUS_PER_NODE" --kill-on-bad-exit=1
        --export=ALL --unbuffered
        bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$@"' rank
        "$(python_path)" "$ROOT/pretrain_gpt.py" "${TRAINING_ARGS[@]}"
    )
}

srun_launch() {
    srun_command 0
    exec "${COMMAND[@]}"
}
