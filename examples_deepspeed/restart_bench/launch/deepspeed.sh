# Launching with DeepSpeed's launcher; sourced by common.sh. One command, which starts the ranks on the other nodes itself.

deepspeed_num_commands() { echo 1; }

deepspeed_starts_all() { ((NNODES == 1)) && ! over_hosts; } # its file of variables would be that of the first launch

# Sets COMMAND. Variables reach remote ranks through the file that DS_ENV_FILE names.
deepspeed_command() {
    local hosts=() file=()
    if ((${#HOSTS[@]} > 0)); then
        hosts=(--hostfile "$HOSTFILE" --num_nodes "$NNODES")
        file=(DS_ENV_FILE="$(deepspeed_env_file)")
        collect_deepspeed_env
        ((NNODES > 1)) || ! over_hosts || hosts+=(--force_multi) # without it, the ranks of a single host would start here
    fi
    COMMAND=(
        env "${CARRIED_ENV[@]}" "${LAUNCH_ENV[@]}" "${file[@]}"
        "$(python_path)" -m deepspeed.launcher.runner "${hosts[@]}" --num_gpus "$GPUS_PER_NODE"
        --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}"
        "$ROOT/pretrain_gpt.py" "${TRAINING_ARGS[@]}"
    )
}

deepspeed_env_file() { printf '%s' "$WORK_DIR/deepspeed_env"; }

# Sets DEEPSPEED_ENV to the lines of our file: the user's variables, ours, and the lines of the user's own files, which
# DeepSpeed would read if DS_ENV_FILE did not name ours. The last line of a variable takes effect.
collect_deepspeed_env() {
    local variable name=${DS_ENV_FILE:-.deepspeed_env} directory path line
    DEEPSPEED_ENV=()
    for variable in "${USER_ENV[@]}" "${LAUNCH_ENV[@]}"; do
        [[ $variable != PYTHONPATH=* ]] || variable=PYTHONPATH=$PWD:${variable#*=} # as DeepSpeed does
        DEEPSPEED_ENV+=("$(deepspeed_line "$variable")") || exit
    done
    for directory in "${HOME:-}" .; do
        path=$directory/$name
        [[ $name != /* ]] || path=$name
        [[ -f $path ]] || continue
        while IFS= read -r line || [[ -n $line ]]; do
            [[ -n ${line//[[:space:]]/} && $line != \#* ]] || continue
            [[ $line == *=* ]] || die "$path: '$line' is not of the form NAME=VALUE"
            DEEPSPEED_ENV+=("$line")
        done <"$path"
    done
}

# NAME=VALUE as DeepSpeed reads it: it strips the line, and quotes the value with " for the other node's shell if the value
# contains other characters than those below.
deepspeed_line() {
    local name=${1%%=*} value=${1#*=}
    if [[ $value == *$'\n'* || $value == [[:space:]]* || $value == *[[:space:]] ]]; then
        die "$name: DeepSpeed's launcher cannot carry a value with a line break, or with white space at an end, to" \
            "another node; use LAUNCHER=torchrun or fork"
    fi
    if [[ $value =~ [^a-zA-Z0-9_@%+=:,./-] ]]; then
        value=${value//\\/\\\\}
        value=${value//\"/\\\"}
        value=${value//\$/\\\$}
        value=${value//\`/\\\`}
    fi
    printf '%s=%s' "$name" "$value"
}

deepspeed_launch() {
    settle_port
    deepspeed_command 0
    if ((${#HOSTS[@]} > 0)); then
        printf '%s\n' "${DEEPSPEED_ENV[@]}" | write_private "$(deepspeed_env_file)"
    fi
    over_hosts || exec "${COMMAND[@]}"
    deepspeed_over_hosts
}

# pdsh waits for every host even if the launch on one has failed: HOST_GRACE seconds (30) after that, DeepSpeed's launcher
# gets SIGTERM and ends the launches on all hosts. When all have ended, nothing is left to end: the launcher's own end,
# which takes seconds, decides.
deepspeed_over_hosts() {
    local runner status=0 most=0 now ended=
    "${COMMAND[@]}" &
    runner=$!
    trap 'kill -TERM "$runner" 2>/dev/null || true' TERM INT HUP
    while kill -0 "$runner" 2>/dev/null; do
        sleep 1 &
        wait $! || true # a signal ends this wait
        now=$(deepspeed_connections "$runner")
        ((now <= most)) || most=$now
        ((now > 0 && now < most)) || continue
        : "${ended:=$SECONDS}"
        if ((SECONDS - ended >= ${HOST_GRACE:-30})); then
            echo "the launch on $((most - now)) of $most hosts ended ${HOST_GRACE:-30} s ago: ending the others" >&2
            kill -TERM "$runner" 2>/dev/null || true
            break
        fi
    done
    wait "$runner" || status=$?
    return "$status"
}

# Prints the number of hosts to which pdsh, a child of DeepSpeed's launcher $1, is connected.
deepspeed_connections() {
    local pdsh
    pdsh=$(pgrep -P "$1" -x 'pdsh(\.bin)?') || { echo 0; return; }
    pgrep -c -P "$pdsh" -x ssh || true
}
