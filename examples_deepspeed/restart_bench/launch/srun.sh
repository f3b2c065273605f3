# Launching with Slurm's srun, within an allocation; sourced by common.sh. One command, one task per rank.

srun_num_commands() { echo 1; }

srun_starts_all() { :; }

# Sets COMMAND. Slurm numbers the tasks; a rank that fails ends the step.
srun_command() {
    COMMAND=(
        env "${CARRIED_ENV[@]}" "${LAUNCH_ENV[@]}" MASTER_ADDR="$MASTER_ADDR" MASTER_PORT="${MASTER_PORT:-29500}"
        WORLD_SIZE="$WORLD_SIZE" LOCAL_WORLD_SIZE="$GPUS_PER_NODE"
        srun --nodes "$NNODES" --ntasks "$WORLD_SIZE" --ntasks-per-node "$GPUS_PER_NODE" --kill-on-bad-exit=1
        --export=ALL --unbuffered
        bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$@"' rank
        "$(python_path)" "$ROOT/pretrain_gpt.py" "${TRAINING_ARGS[@]}"
    )
}

# Prints the first host of the allocation, where Slurm starts rank 0. It may differ from this one: salloc runs on a login node.
first_allocated_host() {
    local nodes=${SLURM_JOB_NODELIST:-${SLURM_NODELIST:-}} hosts=()
    command -v scontrol >/dev/null ||
        die "scontrol, which lists the hosts of SLURM_JOB_NODELIST=$nodes, is not on PATH; set MASTER_ADDR to the first of them"
    mapfile -t hosts < <(scontrol show hostnames "$nodes")
    ((${#hosts[@]} > 0)) || die "scontrol names no host of SLURM_JOB_NODELIST=$nodes; set MASTER_ADDR"
    printf '%s' "${hosts[0]}"
}

# Checks that Slurm's variables agree with each other and with the layout.
check_allocation() {
    local nodes=${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-}} list=${SLURM_JOB_NODELIST:-${SLURM_NODELIST:-}} hosts=()
    [[ -z $nodes || $nodes =~ ^[1-9][0-9]*$ ]] ||
        die "SLURM_JOB_NUM_NODES=$nodes: must be a number of nodes; unset what you have set"
    [[ ${SLURM_NNODES:-$nodes} == "$nodes" ]] ||
        die "SLURM_JOB_NUM_NODES=$nodes and SLURM_NNODES=$SLURM_NNODES contradict each other; unset what you have set"
    [[ -z $nodes ]] || ((nodes >= NNODES)) ||
        die "SLURM_JOB_NUM_NODES=$nodes: $WORLD_SIZE ranks (TP $TP x PP $PP x DP $DP) with $GPUS_PER_NODE per node take" \
            "$NNODES nodes; allocate them, or set GPUS_PER_NODE"
    [[ -n $nodes && -n $list ]] && command -v scontrol >/dev/null || return 0
    mapfile -t hosts < <(scontrol show hostnames "$list")
    ((${#hosts[@]} == nodes)) ||
        die "SLURM_JOB_NODELIST=$list names ${#hosts[@]} hosts, SLURM_JOB_NUM_NODES=$nodes; unset what you have set"
}

# Runs a command on the nodes of the ranks, with --place and the node's number as last arguments. Sets ANSWERS to their
# output.
ask_allocation() {
    local said
    said=$(mktemp)
    ANSWERS=$(srun --nodes "$NNODES" --ntasks "$NNODES" --ntasks-per-node 1 --export=ALL \
        bash -c 'exec "$@" --place "$SLURM_PROCID"' node "$@" </dev/null 2>"$said") ||
        die "srun starts nothing on $NNODES nodes of the allocation: $(tail -n 1 "$said")"
    rm "$said"
}

die_without_allocation() { die "LAUNCHER=srun: no allocation; start within one, by salloc or sbatch"; }

srun_launch() {
    srun_command 0
    exec "${COMMAND[@]}"
}
