# The command line of the scripts, sourced by each of them first: --help and --version.

USAGE_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# Prints the comment at the top of file $1; if $2 is given, from its line "Settings" on.
print_comment() {
    sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "$1" | if [[ -n ${2:-} ]]; then sed -n '/^Settings/,$p'; else cat; fi
}

# answer_help FILE "$@": --help prints the comment of the script and, if FILE is not empty, the settings of FILE. Words
# after -- belong to another command.
answer_help() {
    local settings=$1 word
    shift
    for word in "$@"; do
        case $word in
        --) return ;;
        -h | --help)
            print_comment "$0"
            [[ -z $settings ]] || { echo && print_comment "$settings" Settings; }
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
