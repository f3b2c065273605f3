# Devices and nodes; sourced by common.sh.

# GPUs of this machine that a process started here would see.
count_gpus() {
    local gpus visible=()
    gpus=$({ nvidia-smi -L 2>/dev/null || true; } | { grep -c '^GPU ' || true; })
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        IFS=, read -r -a visible <<<"$CUDA_VISIBLE_DEVICES"
        gpus=$((gpus < ${#visible[@]} ? gpus : ${#visible[@]}))
    fi
    echo "$gpus"
}

# Sets DEVICE. Only presets made for CPUs run on them, if there are too few GPUs.
settle_device() {
    LOCAL_GPUS=$(count_gpus)
    if [[ -z ${DEVICE:-} ]]; then
        DEVICE=cuda
        if [[ -n $RUNS_ON_CPU && -z ${HOSTFILE:-} ]] && ((LOCAL_GPUS < WORLD_SIZE)); then
            DEVICE=cpu
        fi
    fi
    [[ $DEVICE == cuda || $DEVICE == cpu ]] || die "DEVICE=$DEVICE: use cuda or cpu"
    if [[ $DEVICE == cpu && -z $RUNS_ON_CPU ]]; then
        die "DEVICE=cpu: the $MODEL preset needs GPUs; run_tiny_tp2_pp2_dp2.sh runs on CPUs"
    fi
}

# Within a PBS job, sets HOSTFILE to a list of its hosts, unless one is given. PBS_NODEFILE names a host once for each of
# its tasks (mpiprocs, ppn); if it names each host once, the slots are unknown.
settle_pbs_hosts() {
    [[ -n ${PBS_JOBID:-} && -n ${PBS_NODEFILE:-} && -z ${HOSTFILE:-} && -z ${NODE_RANK:-} && $LAUNCHER != srun ]] || return 0
    [[ -r $PBS_NODEFILE ]] || die "PBS_NODEFILE=$PBS_NODEFILE: cannot be read; set HOSTFILE to a list of the job's hosts"
    HOSTFILE=${TMPDIR:-/tmp}/hosts.$PBS_JOBID HOSTS_SETTING=PBS_NODEFILE=$PBS_NODEFILE
    awk -v slots="${GPUS_PER_NODE:-8}" 'NF { if (!tasks[$1]++) hosts[++count] = $1; most = most < tasks[$1] ? tasks[$1] : most }
         END { for (i = 1; i <= count; i++) print hosts[i] " slots=" (most > 1 ? tasks[hosts[i]] : slots) }' \
        "$PBS_NODEFILE" >"$HOSTFILE" || die "PBS_NODEFILE=$PBS_NODEFILE: its hosts cannot be written to $HOSTFILE"
}

# Sets HOSTS, HOST_SLOTS and HOSTS_SETTING (the user's name for it) from HOSTFILE: lines `HOST slots=N`, or only host names.
read_hostfile() {
    HOSTS=() HOST_SLOTS=()
    [[ -n ${HOSTFILE:-} ]] || return 0
    : "${HOSTS_SETTING:=HOSTFILE=$HOSTFILE}"
    [[ $LAUNCHER != srun ]] || die "HOSTFILE=$HOSTFILE: srun starts the ranks on the hosts of the allocation; leave it out"
    [[ -r $HOSTFILE ]] || die "HOSTFILE=$HOSTFILE: cannot be read"
    local host rest
    while read -r host rest || [[ -n $host ]]; do
        [[ -n $host && $host != \#* ]] || continue
        [[ " ${HOSTS[*]} " != *" $host "* ]] ||
            die "$HOSTS_SETTING: names $host twice; give each host one line, with all of its slots"
        HOSTS+=("$host")
        if [[ $rest =~ ^slots=(0|[1-9][0-9]*)$ ]]; then
            HOST_SLOTS+=("${BASH_REMATCH[1]}")
        elif [[ -z $rest ]]; then
            [[ $LAUNCHER != deepspeed ]] ||
                die "HOSTFILE=$HOSTFILE: '$host' has no slots=N, without which DeepSpeed's launcher reads no line; add it"
            HOST_SLOTS+=("${GPUS_PER_NODE:-8}")
        else
            die "HOSTFILE=$HOSTFILE: '$host $rest' is not of the form HOST slots=N"
        fi
    done <"$HOSTFILE"
    ((${#HOSTS[@]} > 0)) || die "$HOSTS_SETTING: names no host; write lines like: node01 slots=4"
}

# Sets NNODES, GPUS_PER_NODE, MASTER_ADDR and GPUS_SEEN.
settle_nodes() {
    HOSTS_SETTING=
    settle_pbs_hosts
    read_hostfile
    if [[ -z ${GPUS_PER_NODE:-} ]]; then
        if ((${#HOSTS[@]} > 0)); then
            GPUS_PER_NODE=${HOST_SLOTS[0]}
        elif [[ $DEVICE == cpu ]]; then
            GPUS_PER_NODE=$WORLD_SIZE
        elif ((LOCAL_GPUS > 0)); then
            GPUS_PER_NODE=$LOCAL_GPUS
        else
            GPUS_PER_NODE=$((WORLD_SIZE % 8 ? TP : 8))
        fi
    fi
    require_whole_number GPUS_PER_NODE
    ((GPUS_PER_NODE <= WORLD_SIZE)) || GPUS_PER_NODE=$WORLD_SIZE
    count_seen
    NNODES_GIVEN=${NNODES:-}
    NNODES=$(((WORLD_SIZE + GPUS_PER_NODE - 1) / GPUS_PER_NODE))
    MASTER_ADDR_GIVEN=${MASTER_ADDR:-}
    settle_spares
    [[ -n $MASTER_ADDR_GIVEN ]] || settle_master
}

# Whether these variables, where they are set, are numbers of ports.
require_port() {
    local name
    for name in "$@"; do
        [[ -z ${!name:-} ]] || { [[ ${!name} =~ ^[1-9][0-9]{0,4}$ ]] && ((${!name} <= 65535)); } ||
            die "$name=${!name}: give the number of a port, 1 to 65535"
    done
}

# Sets SPARES, the number of hosts that wait to replace a lost one, and COORDINATOR_ADDR, this host.
settle_spares() {
    local further=$((${#HOSTS[@]} > NNODES ? ${#HOSTS[@]} - NNODES : 0))
    SPARES_GIVEN=${SPARES:-} COORDINATOR_ADDR_GIVEN=${COORDINATOR_ADDR:-}
    : "${COORDINATOR_ADDR:=$(hostname)}"
    if [[ -n ${SPARES:-} ]]; then
        ((SPARES <= further)) ||
            die "SPARES=$SPARES: ${HOSTS_SETTING:-HOSTFILE=} names $further hosts beyond the $NNODES of the layout; add hosts"
    elif [[ $LAUNCHER == fork && ${MAX_RESTARTS:-0} != 0 ]]; then
        SPARES=$further
    else
        SPARES=0
    fi
}

# Sets MASTER_ADDR to where rank 0 runs.
settle_master() {
    if ((NNODES == 1 && SPARES == 0)) && is_this_host "${HOSTS[0]:-localhost}"; then
        MASTER_ADDR=127.0.0.1
    elif [[ $LAUNCHER == srun && -n ${SLURM_JOB_ID:-} ]]; then
        MASTER_ADDR=$(first_allocated_host) || exit
    elif [[ $LAUNCHER == srun ]]; then
        [[ -n ${DRY_RUN:-} ]] || die_without_allocation
        MASTER_ADDR=FIRST_HOST_OF_THE_ALLOCATION
    else
        MASTER_ADDR=${HOSTS[0]:-$(hostname)}
    fi
}

check_nodes() {
    if ((WORLD_SIZE % GPUS_PER_NODE)); then
        die "$WORLD_SIZE ranks (TP $TP x PP $PP x DP $DP) do not fill nodes of $GPUS_PER_NODE GPUs;" \
            "set GPUS_PER_NODE to a divisor of $WORLD_SIZE"
    fi
    [[ -z ${NODE_RANK:-} ]] || { [[ $NODE_RANK =~ ^[0-9]+$ ]] && ((10#$NODE_RANK < NNODES)); } ||
        die "NODE_RANK=$NODE_RANK: $WORLD_SIZE ranks (TP $TP x PP $PP x DP $DP) with $GPUS_PER_NODE per node take" \
            "$NNODES nodes; number them from 0 to $((NNODES - 1))"
    if [[ -n $NNODES_GIVEN && $NNODES_GIVEN != "$NNODES" ]]; then
        die "NNODES=$NNODES_GIVEN: $WORLD_SIZE ranks (TP $TP x PP $PP x DP $DP) with $GPUS_PER_NODE per node" \
            "take $NNODES nodes; set NNODES=$NNODES or GPUS_PER_NODE=$((WORLD_SIZE / NNODES_GIVEN))"
    fi
}

# Sets GPUS_SEEN from the hostfile, or from this node, assuming that all NNODES are like it.
count_seen() {
    GPUS_SEEN=0
    local slots
    if ((${#HOSTS[@]} > 0)); then
        for slots in "${HOST_SLOTS[@]}"; do
            GPUS_SEEN=$((GPUS_SEEN + (slots < GPUS_PER_NODE ? slots : GPUS_PER_NODE)))
        done
        SEEN_WHERE="${#HOSTS[@]} hosts in ${HOSTS_SETTING#*=}"
    else
        local nodes=${NNODES:-1}
        GPUS_SEEN=$((nodes * LOCAL_GPUS))
        SEEN_WHERE="NNODES=$nodes x $LOCAL_GPUS on $(hostname)"
    fi
}

# Checks the devices and nodes that the launch needs, before anything expensive is done.
check_devices() {
    if [[ $LAUNCHER == srun && -z ${SLURM_JOB_ID:-}${COMMAND_TO:-} ]]; then
        die_without_allocation
    fi
    check_gpus
    check_nodes
    check_node_rank
    if [[ $LAUNCHER == srun && -n ${SLURM_JOB_ID:-} ]]; then
        check_allocation
    elif ((${#HOSTS[@]} > 0)); then
        check_slots
    fi
}

# Checks that the hosts have slots for the ranks, also on CPUs.
check_slots() {
    local node
    ((${#HOSTS[@]} >= NNODES)) ||
        die "$HOSTS_SETTING: names ${#HOSTS[@]} hosts, and $WORLD_SIZE ranks (TP $TP x PP $PP x DP $DP) with" \
            "$GPUS_PER_NODE per node take $NNODES; add hosts, or set GPUS_PER_NODE"
    for ((node = 0; node < NNODES + SPARES; node++)); do
        ((HOST_SLOTS[node] >= GPUS_PER_NODE)) ||
            die "$HOSTS_SETTING: ${HOSTS[node]} has slots=${HOST_SLOTS[node]}, and every host gets" \
                "$GPUS_PER_NODE ranks; give it more slots, leave it out, or set GPUS_PER_NODE"
    done
}

# Whether this launch starts ranks on other hosts through ssh.
over_hosts() {
    ((${#HOSTS[@]} > 0)) && [[ -z ${NODE_RANK:-} ]] && { ((NNODES + SPARES > 1)) || ! is_this_host "${HOSTS[0]}"; }
}

# Checks that ssh reaches every host and finds this repository there; one message names all hosts that fail.
check_reach() {
    ! over_hosts || ask_hosts true
}

# Runs a command on all hosts concurrently, with --place and the host's number as last arguments. Sets ANSWERS to their
# output; one message names all hosts that fail.
ask_hosts() {
    local node said failed='' advice='' answers
    answers=$(mktemp -d)
    for ((node = 0; node < NNODES + SPARES; node++)); do
        ask_host "${HOSTS[node]}" "$@" --place "$node" </dev/null >"$answers/$node" 2>"$answers/$node.said" ||
            echo "$?" >"$answers/$node.failed" &
    done
    wait
    for ((node = 0; node < NNODES + SPARES; node++)); do
        [[ -e $answers/$node.failed ]] || continue
        said=$(tail -n 1 "$answers/$node.said" | tr -d '\r')
        failed+="${failed:+; }${HOSTS[node]} (${said:-ssh said nothing})"
        [[ $(<"$answers/$node.failed") != 255 ]] || advice=". 'ssh HOST true' must work without a password from here"
    done
    ANSWERS=$(cat "$answers"/*[0-9])
    rm -rf "$answers"
    [[ -z $failed ]] || die "$HOSTS_SETTING: no ranks can be started through ssh on $failed$advice"
}

# Runs a command on host $1, where the repository must be.
ask_host() {
    local host=$1
    shift
    if is_this_host "$host"; then
        "$@"
        return
    fi
    ssh -o BatchMode=yes -o ConnectTimeout=10 "$host" "test -f $(shell_quoted "$ROOT/pretrain_gpt.py") ||
        { echo $(shell_quoted "$ROOT is not there; it must be on a file system that all nodes share") >&2; exit 1; }
        cd $(shell_quoted "$PWD") && exec $(shell_quoted "$@")"
}

# Checks that MASTER_PORT is free where rank 0 will serve the rendezvous, that all hosts resolve the name of that host, and
# that all have the same code and versions: on every host, before any rank starts. Hosts on which this script is started
# by hand compare themselves with meet_hosts instead. A launcher that chooses a port itself finds a free one.
check_hosts() {
    [[ -z ${NODE_RANK:-} && ! ($LAUNCHER == srun && -z ${SLURM_JOB_ID:-}) ]] || return 0
    ((NNODES > 1)) || over_hosts || [[ $LAUNCHER == srun || -n ${MASTER_PORT:-}$MASTER_ADDR_GIVEN ]] || return 0
    local settings wrong tell
    settings=(--address "MASTER_ADDR=$MASTER_ADDR" --port "MASTER_PORT=${MASTER_PORT:-29500}")
    if [[ $LAUNCHER == fork ]] && fork_coordinates; then
        settings=(--address "COORDINATOR_ADDR=$COORDINATOR_ADDR" ${MASTER_PORT:+--port "MASTER_PORT=$MASTER_PORT"})
    fi
    tell=(env PYTHONSAFEPATH=1 PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" "$(python_path)" -m megatron.launch.check_hosts
        tell "${settings[@]}")
    if [[ $LAUNCHER == srun ]]; then
        ask_allocation "${tell[@]}"
    elif over_hosts; then
        ask_hosts "${tell[@]}"
    else
        ANSWERS=$("${tell[@]}") || die "the port and the address of rank 0 could not be checked"
    fi
    wrong=$(run_tool megatron.launch.check_hosts judge <<<"$ANSWERS") || die "${wrong:-the hosts could not be compared}"
}

# Waits for the launches that are started by hand on the other hosts, and compares these hosts.
meet_hosts() {
    local wrong
    trap - EXIT # from here on the meeting itself tells the other nodes what is wrong
    wrong=$(run_tool megatron.launch.check_hosts meet --place "$NODE_RANK" --nodes "$NNODES" \
        --timeout "${MEET_TIMEOUT:-600}" --address "MASTER_ADDR=$MASTER_ADDR" --port "MASTER_PORT=${MASTER_PORT:-29500}") ||
        die "${wrong:-the hosts could not be compared}"
}

# At the exit of a launch that is started by hand on each host: tells the other hosts, which wait in meet_hosts, that it was
# refused. Any interpreter will do, since the training's may not be installed yet.
tell_refusal() {
    local status=$? place=0 python nodes=() port=${MASTER_PORT:-29500}
    trap - EXIT
    if ((status == 0 || status > 128)) || [[ -z ${MASTER_ADDR:-} && ! $NODE_RANK =~ ^0+$ || ${NNODES:-} == 1 || ! $port =~ ^[0-9]+$ ]]; then
        return
    fi
    if [[ ${NNODES:-} =~ ^[1-9][0-9]*$ ]]; then nodes=(--nodes "$NNODES"); fi
    [[ $NODE_RANK =~ ^0+$ ]] || place=1
    python=$(python_path)
    has_environment || python=python3
    PYTHONSAFEPATH=1 PYTHONPATH=$ROOT "$python" -m megatron.launch.check_hosts refuse --place "$place" "${nodes[@]}" \
        --why "NODE_RANK=$NODE_RANK is refused on $(hostname): ${REFUSAL:-see its own messages}" \
        --address "MASTER_ADDR=${MASTER_ADDR:-}" --port "MASTER_PORT=$port" || true
}

check_gpus() {
    # Within an allocation Slurm assigns the devices, and refuses a request for more than it has.
    [[ $DEVICE == cuda && $LAUNCHER != srun ]] || return 0
    if ((GPUS_SEEN < WORLD_SIZE)); then
        local advice="Name"
        [[ -z ${SLURM_JOB_ID:-} || -n ${HOSTFILE:-} ]] ||
            advice="In this Slurm allocation LAUNCHER=srun starts the ranks on all of its nodes. Otherwise name"
        die "needs $WORLD_SIZE GPUs (TP $TP x PP $PP x DP $DP), sees $GPUS_SEEN ($SEEN_WHERE). $advice the nodes in" \
            "HOSTFILE=<file of 'HOST slots=N' lines>, or start this script on every node with NNODES, NODE_RANK and" \
            "MASTER_ADDR set.$(largest_preset "$GPUS_SEEN") DRY_RUN=1 prints the commands. Without these GPUs:" \
            "'MODE=replay DP=$DP bash $0' does the I/O of this layout's checkpoints, 'MODE=scaled DP=$DP bash $0' trains, kills" \
            "and resumes all $WORLD_SIZE ranks on CPUs with a narrow model."
    fi
}

# Names the hosts of HOSTFILE on which nothing will run.
tell_unused_hosts() {
    local used=$((NNODES + SPARES))
    ((${#HOSTS[@]} <= used)) || say "not used of $HOSTS_SETTING: ${HOSTS[*]:used}"
}

# Checks NODE_RANK if the user must start this script on the other nodes.
check_node_rank() {
    ((NNODES > 1 && ${#HOSTS[@]} == 0)) && [[ $LAUNCHER != srun && -z ${COMMAND_TO:-} ]] || return 0
    [[ $LAUNCHER != deepspeed ]] || die "LAUNCHER=deepspeed on $NNODES nodes: name them in HOSTFILE"
    [[ -n ${NODE_RANK:-} && ! ($MASTER_ADDR == "$(hostname)" && $NODE_RANK != 0) ]] ||
        die "$NNODES nodes without HOSTFILE: start this script on each with NODE_RANK=0..$((NNODES - 1)) and" \
            "MASTER_ADDR=<host of node 0>"
}

# An environment that was created on a machine without GPUs, such as a login node, has a torch without CUDA.
check_torch_build() {
    local stamp=${VENV_DIR:-$ROOT/.venv}/.setup_stamp
    [[ $DEVICE == cuda && -z ${SKIP_SETUP:-} ]] || return 0
    [[ $(sed -n 2p "$stamp") == cuda ]] ||
        die "the installed torch is a CPU build; run TORCH_VARIANT=cuda $BENCH_DIR/setup_env.sh first"
}

# Several trainings may run on this node: each gets its own port.
settle_port() { ((NNODES > 1)) || over_hosts || : "${MASTER_PORT:=$(free_port)}"; }

free_port() {
    "$(python_path)" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}
