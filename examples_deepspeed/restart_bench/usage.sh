# The command line of the scripts, sourced by each of them first: --help and --version.

USAGE_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# answer_help "$@": --help prints the comment at the top of the script. Words after -- belong to another command.
answer_help() {
    local word
    for word in "$@"; do
        case $word in
        --) return ;;
        -h | --help)
            sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$0"
            exit 0
            ;;
        --version)
            sed -n 's/^__version__ = "\(.*\)"/megatron-restart \1/p' "$USAGE_DIR/../../restart_trace/version.py"
            exit 0
            ;;
        esac
    done
}

# no_arguments "$@": refuses any argument, and suggests what was probably meant.
no_arguments() {
    (($# > 0)) || return 0
    local meant="see --help"
    case $1 in
    [A-Z]*=*) meant="settings are environment variables: $1 bash $0" ;;
    -h* | --h*) meant="did you mean --help?" ;;
    -v* | -V* | --v*) meant="did you mean --version?" ;;
    esac
    printf '%s: error: %s: this script takes no arguments; %s\n' "$(basename "$0")" "$1" "$meant" >&2
    exit 2
}
