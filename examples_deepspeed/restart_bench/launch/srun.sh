# Launching with Slurm's srun, within an allocation; sourced by common.sh. One command, one task per rank.

srun_num_commands() { echo 1; }

srun_starts_all() { :; }

# Sets SRUN_SHAPE: the nodes and tasks of a step.
srun_shape() { SRUN_SHAPE=(--nodes "$NNODES" --ntasks "$WORLD_SIZE" --ntasks-per-node "$GPUS_PER_NODE" --export=ALL); }

# Sets COMMAND. Slurm numbers the tasks; a rank that fails ends the step.
srun_command() {
    srun_shape
    COMMAND=(
        env "${CARRIED_ENV[@]}" "${LAUNCH_ENV[@]}" MASTER_ADDR="$MASTER_ADDR" MASTER_PORT="${MASTER_PORT:-29500}"
        WORLD_SIZE="$WORLD_SIZE" LOCAL_WORLD_SIZE="$GPUS_PER_NODE"
        srun "${SRUN_SHAPE[@]}" --kill-on-bad-exit=1 --unbuffered
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

# Checks that Slurm's variables agree with each other, and that the allocation has what the layout needs.
check_allocation() {
    local nodes=${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-}} list=${SLURM_JOB_NODELIST:-${SLURM_NODELIST:-}} hosts=()
    local layout="$WORLD_SIZE ranks (TP $TP x PP $PP x DP $DP) with $GPUS_PER_NODE per node take $NNODES nodes"
    [[ -z $nodes || $nodes =~ ^[1-9][0-9]*$ ]] ||
        die "SLURM_JOB_NUM_NODES=$nodes: must be a number of nodes; unset what you have set"
    [[ ${SLURM_NNODES:-$nodes} == "$nodes" ]] ||
        die "SLURM_JOB_NUM_NODES=$nodes and SLURM_NNODES=$SLURM_NNODES contradict each other; unset what you have set"
    [[ -z $nodes ]] || ((nodes >= NNODES)) ||
        die "SLURM_JOB_NUM_NODES=$nodes: $layout; allocate them (--nodes $NNODES), or set GPUS_PER_NODE"
    check_processors "$layout"
    [[ $DEVICE == cpu || ! ${SLURM_GPUS_ON_NODE:-} =~ ^[0-9]+$ ]] || ((SLURM_GPUS_ON_NODE >= GPUS_PER_NODE)) ||
        die "SLURM_GPUS_ON_NODE=$SLURM_GPUS_ON_NODE: $layout with a GPU for each rank; allocate them" \
            "(--gpus-per-node $GPUS_PER_NODE), or set GPUS_PER_NODE"
    [[ -n $nodes && -n $list ]] && command -v scontrol >/dev/null || return 0
    mapfile -t hosts < <(scontrol show hostnames "$list")
    ((${#hosts[@]} == nodes)) ||
        die "SLURM_JOB_NODELIST=$list names ${#hosts[@]} hosts, SLURM_JOB_NUM_NODES=$nodes; unset what you have set"
}

# Checks that enough nodes have a processor for each of their ranks: srun's own message names neither the layout nor the nodes.
# $1: what the layout needs.
check_processors() {
    local each=${SLURM_JOB_CPUS_PER_NODE:-} part fit=0
    [[ -n $each && -z ${SLURM_OVERCOMMIT:-} ]] || return 0
    for part in ${each//,/ }; do # as 8(x2),4
        [[ $part =~ ^([0-9]+)(\(x([0-9]+)\))?$ ]] ||
            die "SLURM_JOB_CPUS_PER_NODE=$each: must be numbers of processors, as 8(x2),4; unset what you have set"
        ((BASH_REMATCH[1] < GPUS_PER_NODE)) || fit=$((fit + ${BASH_REMATCH[3]:-1}))
    done
    ((fit >= NNODES)) ||
        die "SLURM_JOB_CPUS_PER_NODE=$each: $1 with a processor for each rank, and the allocation has $fit such nodes;" \
            "allocate them (--nodes $NNODES --ntasks-per-node $GPUS_PER_NODE), or set GPUS_PER_NODE"
}

# Runs a command on the nodes of the ranks, with --place and the node's number as last arguments. Sets ANSWERS to their
# output. The step requests the nodes and tasks of the ranks, so that Slurm refuses here what it cannot give them.
ask_allocation() {
    local said
    said=$(mktemp)
    srun_shape
    ANSWERS=$(srun "${SRUN_SHAPE[@]}" --immediate="$SRUN_WAIT_S" \
        bash -c '((SLURM_LOCALID > 0)) || exec "$@" --place "$SLURM_NODEID"' node "$@" </dev/null 2>"$said") ||
        die "srun does not start $WORLD_SIZE tasks, $GPUS_PER_NODE on each of $NNODES nodes, in allocation $SLURM_JOB_ID:" \
            "$(tail -n 1 "$said" | sed 's/^srun: error: //'); allocate what the ranks take, and start the script outside any step"
    rm "$said"
}
SRUN_WAIT_S=60 # how long srun waits where the processors of the allocation are taken, as by a step that runs this script

die_without_allocation() { die "LAUNCHER=srun: no allocation; start within one, by salloc or sbatch"; }

srun_launch() {
    make_launch_secret
    srun_command 0
    exec "${COMMAND[@]}"
}
