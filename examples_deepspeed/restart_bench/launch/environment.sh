# Exports variables of the user's environment to ranks on other nodes; sourced by common.sh.
#
# Processes that this script starts here inherit them; processes that ssh or DeepSpeed's launcher starts elsewhere do not.

CARRIED_FAMILIES='^(NCCL|GLOO|FI|UCX|OMP|CUDA|TORCH|HF|AWS)_|^(LD_LIBRARY_PATH|PYTHONPATH|MEGATRON_LAUNCH_SECRET)$'
# Settings of setup_env.sh, which runs on this node only, and variables that describe this container or machine of a cloud.
NOT_CARRIED='^TORCH_(VARIANT|INDEX_URL)$|^AWS_(CONTAINER_|EXECUTION_ENV$|LAMBDA_)'

# Sets USER_ENV to NAME=VALUE of each variable of the families above and of each that EXPORT names.
collect_user_env() {
    USER_ENV=() CARRIED_ENV=() SECRETS=
    local name further=()
    read -r -d '' -a further <<<"${EXPORT:-}" || true
    for name in "${further[@]}"; do
        [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || die "EXPORT=$EXPORT: $name is not the name of a variable; give names only"
        [[ -n ${!name+set} ]] || die "EXPORT=$EXPORT: $name is not set; set it, or leave it out"
    done
    for name in $(compgen -e | sort); do
        if [[ $name =~ $CARRIED_FAMILIES && ! $name =~ $NOT_CARRIED || " ${further[*]} " == *" $name "* ]]; then
            USER_ENV+=("$name=${!name}")
        fi
    done
}

# Whether NAME=VALUE is a secret: by its name, or because the value is an address with a password.
is_secret() {
    local name=${1%%=*}
    [[ ${name^^} =~ TOKEN|KEY|SECRET|PASSW|CREDENTIAL || ${1#*=} =~ ://[^/@]*:[^/@]*@ ]]
}

# Sets CARRIED_ENV, which each launcher prefixes to its command, for display: with *** in place of secrets.
show_user_env() {
    local variable
    CARRIED_ENV=()
    for variable in "${USER_ENV[@]}"; do
        ! is_secret "$variable" || variable="${variable%%=*}=***"
        CARRIED_ENV+=("$variable")
    done
}

# Exports a secret by which the parts of this launch on several nodes know each other (docs/security.md), unless one is
# set. DeepSpeed's launcher would show it in process lists.
make_launch_secret() {
    [[ -z ${MEGATRON_LAUNCH_SECRET:-} && -z ${NODE_RANK:-} && $LAUNCHER != deepspeed ]] && ((NNODES + SPARES > 1)) || return 0
    MEGATRON_LAUNCH_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    export MEGATRON_LAUNCH_SECRET
    USER_ENV+=("MEGATRON_LAUNCH_SECRET=$MEGATRON_LAUNCH_SECRET")
}

# Sets CARRIED_ENV for commands on other nodes, and SECRETS to a file with variables that must not show in process lists.
carry_user_env() {
    local variable secrets=()
    make_launch_secret
    CARRIED_ENV=() SECRETS=
    for variable in "${USER_ENV[@]}"; do
        if is_secret "$variable"; then secrets+=("$variable"); else CARRIED_ENV+=("$variable"); fi
    done
    if ((${#secrets[@]} > 0)); then
        SECRETS=$WORK_DIR/launch_secrets
        write_private "$SECRETS" <<<"export $(shell_quoted "${secrets[@]}")"
    fi
}

# Writes standard input to file $1, which only this user may read.
write_private() {
    mkdir -p "$(dirname "$1")"
    rm -f "$1"
    (umask 077 && cat >"$1")
}

# Quotes words for any POSIX shell: the user's shell on the other node may not support $'...'.
shell_quoted() {
    local word quoted= apostrophe="'\\''"
    for word in "$@"; do
        quoted+=" '${word//\'/"$apostrophe"}'"
    done
    printf '%s' "${quoted# }"
}
