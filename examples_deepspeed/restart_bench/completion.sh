# Tab completion of the commands of this project, for bash; zsh takes it after `autoload -U bashcompinit; bashcompinit`:
#
#   source examples_deepspeed/restart_bench/completion.sh
#
# Written by `python -m tests.completion`.

# $1=COMP_WORDS[1]
_shtab_compgen_files() {
  compgen -f -- $1  # files
}

# $1=COMP_WORDS[1]
_shtab_compgen_dirs() {
  compgen -d -- $1  # recurse into subdirs
}

# $1=COMP_WORDS[1]
_shtab_replace_nonword() {
  echo "${1//[^[:word:]]/_}"
}

# set default values (called for the initial parser & any subparsers)
_set_parser_defaults() {
  local subparsers_var="${prefix}_subparsers[@]"
  sub_parsers=${!subparsers_var-}

  local current_option_strings_var="${prefix}_option_strings[@]"
  current_option_strings=${!current_option_strings_var}

  completed_positional_actions=0

  _set_new_action "pos_$completed_positional_actions" true
}

# $1=action identifier
# $2=positional action (bool)
# set all identifiers for an action's parameters
_set_new_action() {
  current_action="${prefix}_$(_shtab_replace_nonword $1)"

  local current_action_compgen_var=${current_action}_COMPGEN
  current_action_compgen="${!current_action_compgen_var-}"

  local current_action_choices_var="${current_action}_choices[@]"
  current_action_choices="${!current_action_choices_var-}"

  local current_action_nargs_var="${current_action}_nargs"
  if [ -n "${!current_action_nargs_var-}" ]; then
    current_action_nargs="${!current_action_nargs_var}"
  else
    current_action_nargs=1
  fi

  current_action_args_start_index=$(( $word_index + 1 - $pos_only ))

  current_action_is_positional=$2
}

_shtab_ckpt_analysis_subparsers=(report summary compare goodput timeline export follow validate import project sweep bundle)

_shtab_ckpt_analysis_report_option_strings=(-h --help -o --output --figures --checkpoint --format --all --per-rank --strict --target --quiet --run-id --cache-dir --no-cache)
_shtab_ckpt_analysis_summary_option_strings=(-h --help --format --all --per-rank --strict --target --quiet --run-id --cache-dir --no-cache)
_shtab_ckpt_analysis_compare_option_strings=(-h --help -o --output --figures --format --all --fail-if --keep-first --quiet --run-id --cache-dir --no-cache)
_shtab_ckpt_analysis_goodput_option_strings=(-h --help --format --quiet --run-id --cache-dir --no-cache)
_shtab_ckpt_analysis_timeline_option_strings=(-h --help -o --output --ranks --checkpoint --cycle --quiet --run-id --cache-dir --no-cache)
_shtab_ckpt_analysis_export_option_strings=(-h --help -o --output --format --table --quiet --run-id --cache-dir --no-cache)
_shtab_ckpt_analysis_follow_option_strings=(-h --help --otlp --cycles --while-pid --quiet --run-id --cache-dir --no-cache)
_shtab_ckpt_analysis_validate_option_strings=(-h --help --mlperf --quiet --run-id --cache-dir --no-cache)
_shtab_ckpt_analysis_import_option_strings=(-h --help -o --output --from --world-size --force --quiet --run-id --cache-dir --no-cache)
_shtab_ckpt_analysis_project_option_strings=(-h --help --nodes --mtbf-hours --interval-steps --failures-per-day --tier --step-seconds --blocked-seconds --durable-seconds --restart-seconds --checkpoint-bytes --ranks --tp --hosts --cores --checkpoint-files --plan --engine --write-GBps --read-GBps --what-if --placement --replicas --lost-nodes --format --quiet --run-id --cache-dir --no-cache)
_shtab_ckpt_analysis_sweep_option_strings=(-h --help -o --output --figures --quiet --run-id --cache-dir --no-cache)
_shtab_ckpt_analysis_bundle_option_strings=(-h --help -o --output --quiet --run-id --cache-dir --no-cache)
_shtab_ckpt_analysis_option_strings=(-h --help -o --output --figures --checkpoint --format --all --per-rank --strict --target --quiet --run-id --cache-dir --no-cache)

_shtab_ckpt_analysis_report_pos_0_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_report__o_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_report___output_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_report___figures_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_report___checkpoint_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_report___target_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_report___run_id_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_report___cache_dir_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_summary_pos_0_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_summary___target_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_summary___run_id_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_summary___cache_dir_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_compare_pos_0_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_compare__o_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_compare___output_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_compare___figures_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_compare___fail_if_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_compare___run_id_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_compare___cache_dir_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_goodput_pos_0_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_goodput___run_id_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_goodput___cache_dir_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_timeline_pos_0_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_timeline__o_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_timeline___output_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_timeline___ranks_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_timeline___checkpoint_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_timeline___cycle_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_timeline___run_id_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_timeline___cache_dir_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_export_pos_0_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_export__o_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_export___output_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_export___run_id_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_export___cache_dir_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_follow_pos_0_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_follow___otlp_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_follow___cycles_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_follow___while_pid_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_follow___run_id_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_follow___cache_dir_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_validate_pos_0_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_validate___run_id_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_validate___cache_dir_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_import_pos_0_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_import__o_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_import___output_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_import___world_size_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_import___run_id_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_import___cache_dir_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project_pos_0_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___nodes_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___mtbf_hours_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___interval_steps_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___failures_per_day_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___step_seconds_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___blocked_seconds_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___durable_seconds_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___restart_seconds_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___checkpoint_bytes_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___ranks_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___tp_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___hosts_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___cores_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___checkpoint_files_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___plan_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___write_GBps_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___read_GBps_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___what_if_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___replicas_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___lost_nodes_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___run_id_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_project___cache_dir_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_sweep_pos_0_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_sweep__o_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_sweep___output_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_sweep___figures_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_sweep___run_id_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_sweep___cache_dir_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_bundle_pos_0_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_bundle__o_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_bundle___output_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_bundle___run_id_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis_bundle___cache_dir_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis__o_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis___output_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis___figures_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis___checkpoint_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis___target_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis___run_id_COMPGEN=_shtab_compgen_files
_shtab_ckpt_analysis___cache_dir_COMPGEN=_shtab_compgen_files

_shtab_ckpt_analysis_report___format_choices=(table json)
_shtab_ckpt_analysis_summary___format_choices=(table json csv markdown)
_shtab_ckpt_analysis_compare___format_choices=(table json csv markdown)
_shtab_ckpt_analysis_goodput___format_choices=(table json csv markdown)
_shtab_ckpt_analysis_export___format_choices=(parquet csv otlp prometheus tensorboard)
_shtab_ckpt_analysis_export___table_choices=(spans operations iterations events probes samples rank_phases rank_totals summary budget goodput findings problems)
_shtab_ckpt_analysis_import___from_choices=(log otlp nvrx profiler)
_shtab_ckpt_analysis_project___tier_choices=(storage local_memory peer)
_shtab_ckpt_analysis_project___engine_choices=(datastates dcp dcp-async dcp-process fastpersist fastpersist-decoupled lazy memory none torch torchsnapshot)
_shtab_ckpt_analysis_project___placement_choices=(group ring mixed)
_shtab_ckpt_analysis_project___format_choices=(table json csv markdown)
_shtab_ckpt_analysis_pos_0_choices=(report summary compare goodput timeline export follow validate import project sweep bundle)
_shtab_ckpt_analysis___format_choices=(table json)

_shtab_ckpt_analysis_report_pos_0_nargs=+
_shtab_ckpt_analysis_report__h_nargs=0
_shtab_ckpt_analysis_report___help_nargs=0
_shtab_ckpt_analysis_report___all_nargs=0
_shtab_ckpt_analysis_report___per_rank_nargs=0
_shtab_ckpt_analysis_report___strict_nargs=0
_shtab_ckpt_analysis_report___quiet_nargs=0
_shtab_ckpt_analysis_report___no_cache_nargs=0
_shtab_ckpt_analysis_summary__h_nargs=0
_shtab_ckpt_analysis_summary___help_nargs=0
_shtab_ckpt_analysis_summary___all_nargs=0
_shtab_ckpt_analysis_summary___per_rank_nargs=0
_shtab_ckpt_analysis_summary___strict_nargs=0
_shtab_ckpt_analysis_summary___quiet_nargs=0
_shtab_ckpt_analysis_summary___no_cache_nargs=0
_shtab_ckpt_analysis_compare_pos_0_nargs=+
_shtab_ckpt_analysis_compare__h_nargs=0
_shtab_ckpt_analysis_compare___help_nargs=0
_shtab_ckpt_analysis_compare___all_nargs=0
_shtab_ckpt_analysis_compare___keep_first_nargs=0
_shtab_ckpt_analysis_compare___quiet_nargs=0
_shtab_ckpt_analysis_compare___no_cache_nargs=0
_shtab_ckpt_analysis_goodput__h_nargs=0
_shtab_ckpt_analysis_goodput___help_nargs=0
_shtab_ckpt_analysis_goodput___quiet_nargs=0
_shtab_ckpt_analysis_goodput___no_cache_nargs=0
_shtab_ckpt_analysis_timeline__h_nargs=0
_shtab_ckpt_analysis_timeline___help_nargs=0
_shtab_ckpt_analysis_timeline___quiet_nargs=0
_shtab_ckpt_analysis_timeline___no_cache_nargs=0
_shtab_ckpt_analysis_export__h_nargs=0
_shtab_ckpt_analysis_export___help_nargs=0
_shtab_ckpt_analysis_export___quiet_nargs=0
_shtab_ckpt_analysis_export___no_cache_nargs=0
_shtab_ckpt_analysis_follow__h_nargs=0
_shtab_ckpt_analysis_follow___help_nargs=0
_shtab_ckpt_analysis_follow___quiet_nargs=0
_shtab_ckpt_analysis_follow___no_cache_nargs=0
_shtab_ckpt_analysis_validate__h_nargs=0
_shtab_ckpt_analysis_validate___help_nargs=0
_shtab_ckpt_analysis_validate___mlperf_nargs=0
_shtab_ckpt_analysis_validate___quiet_nargs=0
_shtab_ckpt_analysis_validate___no_cache_nargs=0
_shtab_ckpt_analysis_import__h_nargs=0
_shtab_ckpt_analysis_import___help_nargs=0
_shtab_ckpt_analysis_import___force_nargs=0
_shtab_ckpt_analysis_import___quiet_nargs=0
_shtab_ckpt_analysis_import___no_cache_nargs=0
_shtab_ckpt_analysis_project_pos_0_nargs='*'
_shtab_ckpt_analysis_project__h_nargs=0
_shtab_ckpt_analysis_project___help_nargs=0
_shtab_ckpt_analysis_project___quiet_nargs=0
_shtab_ckpt_analysis_project___no_cache_nargs=0
_shtab_ckpt_analysis_sweep__h_nargs=0
_shtab_ckpt_analysis_sweep___help_nargs=0
_shtab_ckpt_analysis_sweep___quiet_nargs=0
_shtab_ckpt_analysis_sweep___no_cache_nargs=0
_shtab_ckpt_analysis_bundle__h_nargs=0
_shtab_ckpt_analysis_bundle___help_nargs=0
_shtab_ckpt_analysis_bundle___quiet_nargs=0
_shtab_ckpt_analysis_bundle___no_cache_nargs=0
_shtab_ckpt_analysis_pos_0_nargs=A...
_shtab_ckpt_analysis__h_nargs=0
_shtab_ckpt_analysis___help_nargs=0
_shtab_ckpt_analysis___all_nargs=0
_shtab_ckpt_analysis___per_rank_nargs=0
_shtab_ckpt_analysis___strict_nargs=0
_shtab_ckpt_analysis___quiet_nargs=0
_shtab_ckpt_analysis___no_cache_nargs=0

# Notes:
# `COMPREPLY`: what will be rendered after completion is triggered
# `completing_word`: currently typed word to generate completions for
# `${!var}`: evaluates the content of `var` and expand its content as a variable
#     hello="world"
#     x="hello"
#     ${!x} -> ${hello} -> "world"
_shtab_ckpt_analysis() {
  local completing_word="${COMP_WORDS[COMP_CWORD]}"
  local previous_word="${COMP_WORDS[COMP_CWORD-1]}"
  local completed_positional_actions
  local current_action
  local current_action_args_start_index
  local current_action_choices
  local current_action_compgen
  local current_action_is_positional
  local current_action_nargs
  local current_option_strings
  local sub_parsers
  COMPREPLY=()

  local prefix=_shtab_ckpt_analysis
  local word_index=0
  local pos_only=0 # "--" delimiter not encountered yet
  _set_parser_defaults
  word_index=1

  # determine what arguments are appropriate for the current state
  # of the arg parser
  while [ $word_index -ne $COMP_CWORD ]; do
    local this_word="${COMP_WORDS[$word_index]}"

    if [[ $pos_only = 1 || " $this_word " != " -- " ]]; then
      if [[ -n $sub_parsers && " ${sub_parsers[@]} " == *" $this_word "* ]]; then
        # valid subcommand: add it to the prefix & reset the current action
        prefix="${prefix}_$(_shtab_replace_nonword $this_word)"
        _set_parser_defaults
      fi

      if [[ " ${current_option_strings[@]} " == *" $this_word "* ]]; then
        # a new action should be acquired (due to recognised option string or
        # no more input expected from current action);
        # the next positional action can fill in here
        _set_new_action $this_word false
      fi

      if [[ "$current_action_nargs" != "*" ]] && \
         [[ "$current_action_nargs" != "+" ]] && \
         [[ "$current_action_nargs" != "?" ]] && \
         [[ "$current_action_nargs" != *"..." ]] && \
         (( $word_index + 1 - $current_action_args_start_index - $pos_only >= \
            $current_action_nargs )); then
        $current_action_is_positional && let "completed_positional_actions += 1"
        _set_new_action "pos_$completed_positional_actions" true
      fi
    else
      pos_only=1 # "--" delimiter encountered
    fi

    let "word_index+=1"
  done

  # Generate the completions

  COMPREPLY=()
  if [[ $pos_only = 0 && "$completing_word" == -* &&
        ( -z "$current_action_compgen" || "$current_action_is_positional" = true ) ]]; then
    # optional argument started: use option strings
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
      compgen -W "${current_option_strings[*]}" -- "$completing_word")
  elif [[ "$previous_word" =~ ^[0-9\&]*[\<\>]\>?$ ]]; then
    # handle redirection operators
    compopt -o filenames 2>/dev/null || : # bash>=4
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "$completing_word")
  else
    # use choices & compgen
    local action_compgen_word="$completing_word"
    # handle tab-completing in the middle of a line (#248 <- #116)
    [[ -n "$current_action_compgen" && "$completing_word" == -* ]] && action_compgen_word=""
    [ -n "$current_action_compgen" ] && {
      [[ "$current_action_compgen" =~ _(file|dir|glob|FILE|DIR|GLOB)|File|Dir|Glob ]] &&
        compopt -o filenames 2>/dev/null || : # bash>=4
      while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
        "$current_action_compgen" "$action_compgen_word")
    }
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
      compgen -W "${current_action_choices[*]}" -- "$completing_word")
  fi

  if [[ ${#COMPREPLY[@]} = 0 ]]; then
    # native fallback matches are not necessarily filenames (e.g. variables)
    compopt +o filenames 2>/dev/null || : # bash>=4
  fi

  return 0
}

complete -o bashdefault -o default -F _shtab_ckpt_analysis ckpt-analysis
_shtab_restart_trace_subparsers=(run)

_shtab_restart_trace_run_option_strings=(-h --help --version --trace-dir --save-function --load-function --otlp)
_shtab_restart_trace_option_strings=(-h --help --version)

_shtab_restart_trace_run_pos_0_COMPGEN=_shtab_compgen_files
_shtab_restart_trace_run___trace_dir_COMPGEN=_shtab_compgen_files
_shtab_restart_trace_run___save_function_COMPGEN=_shtab_compgen_files
_shtab_restart_trace_run___load_function_COMPGEN=_shtab_compgen_files
_shtab_restart_trace_run___otlp_COMPGEN=_shtab_compgen_files

_shtab_restart_trace_pos_0_choices=(run)

_shtab_restart_trace_run_pos_0_nargs=...
_shtab_restart_trace_run__h_nargs=0
_shtab_restart_trace_run___help_nargs=0
_shtab_restart_trace_run___version_nargs=0
_shtab_restart_trace_pos_0_nargs=A...
_shtab_restart_trace__h_nargs=0
_shtab_restart_trace___help_nargs=0
_shtab_restart_trace___version_nargs=0

# Notes:
# `COMPREPLY`: what will be rendered after completion is triggered
# `completing_word`: currently typed word to generate completions for
# `${!var}`: evaluates the content of `var` and expand its content as a variable
#     hello="world"
#     x="hello"
#     ${!x} -> ${hello} -> "world"
_shtab_restart_trace() {
  local completing_word="${COMP_WORDS[COMP_CWORD]}"
  local previous_word="${COMP_WORDS[COMP_CWORD-1]}"
  local completed_positional_actions
  local current_action
  local current_action_args_start_index
  local current_action_choices
  local current_action_compgen
  local current_action_is_positional
  local current_action_nargs
  local current_option_strings
  local sub_parsers
  COMPREPLY=()

  local prefix=_shtab_restart_trace
  local word_index=0
  local pos_only=0 # "--" delimiter not encountered yet
  _set_parser_defaults
  word_index=1

  # determine what arguments are appropriate for the current state
  # of the arg parser
  while [ $word_index -ne $COMP_CWORD ]; do
    local this_word="${COMP_WORDS[$word_index]}"

    if [[ $pos_only = 1 || " $this_word " != " -- " ]]; then
      if [[ -n $sub_parsers && " ${sub_parsers[@]} " == *" $this_word "* ]]; then
        # valid subcommand: add it to the prefix & reset the current action
        prefix="${prefix}_$(_shtab_replace_nonword $this_word)"
        _set_parser_defaults
      fi

      if [[ " ${current_option_strings[@]} " == *" $this_word "* ]]; then
        # a new action should be acquired (due to recognised option string or
        # no more input expected from current action);
        # the next positional action can fill in here
        _set_new_action $this_word false
      fi

      if [[ "$current_action_nargs" != "*" ]] && \
         [[ "$current_action_nargs" != "+" ]] && \
         [[ "$current_action_nargs" != "?" ]] && \
         [[ "$current_action_nargs" != *"..." ]] && \
         (( $word_index + 1 - $current_action_args_start_index - $pos_only >= \
            $current_action_nargs )); then
        $current_action_is_positional && let "completed_positional_actions += 1"
        _set_new_action "pos_$completed_positional_actions" true
      fi
    else
      pos_only=1 # "--" delimiter encountered
    fi

    let "word_index+=1"
  done

  # Generate the completions

  COMPREPLY=()
  if [[ $pos_only = 0 && "$completing_word" == -* &&
        ( -z "$current_action_compgen" || "$current_action_is_positional" = true ) ]]; then
    # optional argument started: use option strings
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
      compgen -W "${current_option_strings[*]}" -- "$completing_word")
  elif [[ "$previous_word" =~ ^[0-9\&]*[\<\>]\>?$ ]]; then
    # handle redirection operators
    compopt -o filenames 2>/dev/null || : # bash>=4
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "$completing_word")
  else
    # use choices & compgen
    local action_compgen_word="$completing_word"
    # handle tab-completing in the middle of a line (#248 <- #116)
    [[ -n "$current_action_compgen" && "$completing_word" == -* ]] && action_compgen_word=""
    [ -n "$current_action_compgen" ] && {
      [[ "$current_action_compgen" =~ _(file|dir|glob|FILE|DIR|GLOB)|File|Dir|Glob ]] &&
        compopt -o filenames 2>/dev/null || : # bash>=4
      while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
        "$current_action_compgen" "$action_compgen_word")
    }
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
      compgen -W "${current_action_choices[*]}" -- "$completing_word")
  fi

  if [[ ${#COMPREPLY[@]} = 0 ]]; then
    # native fallback matches are not necessarily filenames (e.g. variables)
    compopt +o filenames 2>/dev/null || : # bash>=4
  fi

  return 0
}

complete -o bashdefault -o default -F _shtab_restart_trace restart-trace
_shtab_restart_drill_option_strings=(-h --help --version --fault --matrix --soak --stops --out --time-limit --checkpoints --disk-limit --hang-limit --nodes-command --config --dry-run --at --cycles --supervisor --checkpoint-engine --cold-cache --resume-tp --resume-pp --resume-dp --no-reference --until-caught-up --no-analysis --reference --node --quiet --persist-interval --seed --faults --engines --supervisors --injection-points --sample --spares --minutes --saves --restarts --memory-limit --stop)

_shtab_restart_drill_pos_0_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___stops_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___out_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___time_limit_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___checkpoints_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___disk_limit_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___hang_limit_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___nodes_command_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___config_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___at_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___cycles_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___checkpoint_engine_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___resume_tp_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___resume_pp_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___resume_dp_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___reference_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___node_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___persist_interval_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___seed_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___faults_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___supervisors_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___injection_points_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___sample_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___spares_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___minutes_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___saves_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___restarts_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___memory_limit_COMPGEN=_shtab_compgen_files
_shtab_restart_drill___stop_COMPGEN=_shtab_compgen_files

_shtab_restart_drill___fault_choices=(sigkill-one sigkill-all sigkill-launcher sigkill-node sigterm sigstop exception device-error disk-full truncate bitflip storage-fault:drop storage-fault:delay storage-fault:500 storage-fault:503 storage-fault:truncate storage-fault:etag storage-fault:first-byte storage-fault:rate-limit node-loss link-cut link-slow disk-slow rank-stopped)
_shtab_restart_drill___supervisor_choices=(relaunch torchrun launch in-process)
_shtab_restart_drill___engines_choices=(datastates dcp dcp-async dcp-process fastpersist fastpersist-decoupled lazy memory none torch torchsnapshot)

_shtab_restart_drill_pos_0_nargs='*'
_shtab_restart_drill__h_nargs=0
_shtab_restart_drill___help_nargs=0
_shtab_restart_drill___version_nargs=0
_shtab_restart_drill___matrix_nargs=0
_shtab_restart_drill___soak_nargs=0
_shtab_restart_drill___dry_run_nargs=0
_shtab_restart_drill___cold_cache_nargs=0
_shtab_restart_drill___no_reference_nargs=0
_shtab_restart_drill___until_caught_up_nargs=0
_shtab_restart_drill___no_analysis_nargs=0
_shtab_restart_drill___quiet_nargs=0

# Notes:
# `COMPREPLY`: what will be rendered after completion is triggered
# `completing_word`: currently typed word to generate completions for
# `${!var}`: evaluates the content of `var` and expand its content as a variable
#     hello="world"
#     x="hello"
#     ${!x} -> ${hello} -> "world"
_shtab_restart_drill() {
  local completing_word="${COMP_WORDS[COMP_CWORD]}"
  local previous_word="${COMP_WORDS[COMP_CWORD-1]}"
  local completed_positional_actions
  local current_action
  local current_action_args_start_index
  local current_action_choices
  local current_action_compgen
  local current_action_is_positional
  local current_action_nargs
  local current_option_strings
  local sub_parsers
  COMPREPLY=()

  local prefix=_shtab_restart_drill
  local word_index=0
  local pos_only=0 # "--" delimiter not encountered yet
  _set_parser_defaults
  word_index=1

  # determine what arguments are appropriate for the current state
  # of the arg parser
  while [ $word_index -ne $COMP_CWORD ]; do
    local this_word="${COMP_WORDS[$word_index]}"

    if [[ $pos_only = 1 || " $this_word " != " -- " ]]; then
      if [[ -n $sub_parsers && " ${sub_parsers[@]} " == *" $this_word "* ]]; then
        # valid subcommand: add it to the prefix & reset the current action
        prefix="${prefix}_$(_shtab_replace_nonword $this_word)"
        _set_parser_defaults
      fi

      if [[ " ${current_option_strings[@]} " == *" $this_word "* ]]; then
        # a new action should be acquired (due to recognised option string or
        # no more input expected from current action);
        # the next positional action can fill in here
        _set_new_action $this_word false
      fi

      if [[ "$current_action_nargs" != "*" ]] && \
         [[ "$current_action_nargs" != "+" ]] && \
         [[ "$current_action_nargs" != "?" ]] && \
         [[ "$current_action_nargs" != *"..." ]] && \
         (( $word_index + 1 - $current_action_args_start_index - $pos_only >= \
            $current_action_nargs )); then
        $current_action_is_positional && let "completed_positional_actions += 1"
        _set_new_action "pos_$completed_positional_actions" true
      fi
    else
      pos_only=1 # "--" delimiter encountered
    fi

    let "word_index+=1"
  done

  # Generate the completions

  COMPREPLY=()
  if [[ $pos_only = 0 && "$completing_word" == -* &&
        ( -z "$current_action_compgen" || "$current_action_is_positional" = true ) ]]; then
    # optional argument started: use option strings
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
      compgen -W "${current_option_strings[*]}" -- "$completing_word")
  elif [[ "$previous_word" =~ ^[0-9\&]*[\<\>]\>?$ ]]; then
    # handle redirection operators
    compopt -o filenames 2>/dev/null || : # bash>=4
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "$completing_word")
  else
    # use choices & compgen
    local action_compgen_word="$completing_word"
    # handle tab-completing in the middle of a line (#248 <- #116)
    [[ -n "$current_action_compgen" && "$completing_word" == -* ]] && action_compgen_word=""
    [ -n "$current_action_compgen" ] && {
      [[ "$current_action_compgen" =~ _(file|dir|glob|FILE|DIR|GLOB)|File|Dir|Glob ]] &&
        compopt -o filenames 2>/dev/null || : # bash>=4
      while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
        "$current_action_compgen" "$action_compgen_word")
    }
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
      compgen -W "${current_action_choices[*]}" -- "$completing_word")
  fi

  if [[ ${#COMPREPLY[@]} = 0 ]]; then
    # native fallback matches are not necessarily filenames (e.g. variables)
    compopt +o filenames 2>/dev/null || : # bash>=4
  fi

  return 0
}

complete -o bashdefault -o default -F _shtab_restart_drill restart-drill
_shtab_restart_launch_option_strings=(-h --help --version --nproc-per-node --nnodes --node-rank --master-addr --master-port --max-restarts --standby --standby-load --in-process-restart --return-timeout --max-returns --shutdown-timeout --coordinator --health-directory --health-interval --address --bind --secret-file --tls-cert-file --tls-key-file --tls-ca-cert-file)

_shtab_restart_launch_pos_0_COMPGEN=_shtab_compgen_files
_shtab_restart_launch___nproc_per_node_COMPGEN=_shtab_compgen_files
_shtab_restart_launch___nnodes_COMPGEN=_shtab_compgen_files
_shtab_restart_launch___node_rank_COMPGEN=_shtab_compgen_files
_shtab_restart_launch___master_addr_COMPGEN=_shtab_compgen_files
_shtab_restart_launch___master_port_COMPGEN=_shtab_compgen_files
_shtab_restart_launch___max_restarts_COMPGEN=_shtab_compgen_files
_shtab_restart_launch___return_timeout_COMPGEN=_shtab_compgen_files
_shtab_restart_launch___max_returns_COMPGEN=_shtab_compgen_files
_shtab_restart_launch___shutdown_timeout_COMPGEN=_shtab_compgen_files
_shtab_restart_launch___coordinator_COMPGEN=_shtab_compgen_files
_shtab_restart_launch___health_directory_COMPGEN=_shtab_compgen_files
_shtab_restart_launch___health_interval_COMPGEN=_shtab_compgen_files
_shtab_restart_launch___address_COMPGEN=_shtab_compgen_files
_shtab_restart_launch___bind_COMPGEN=_shtab_compgen_files
_shtab_restart_launch___secret_file_COMPGEN=_shtab_compgen_files
_shtab_restart_launch___tls_cert_file_COMPGEN=_shtab_compgen_files
_shtab_restart_launch___tls_key_file_COMPGEN=_shtab_compgen_files
_shtab_restart_launch___tls_ca_cert_file_COMPGEN=_shtab_compgen_files

_shtab_restart_launch__h_nargs=0
_shtab_restart_launch___help_nargs=0
_shtab_restart_launch___version_nargs=0
_shtab_restart_launch___standby_nargs=0
_shtab_restart_launch___standby_load_nargs=0
_shtab_restart_launch___in_process_restart_nargs=0

# Notes:
# `COMPREPLY`: what will be rendered after completion is triggered
# `completing_word`: currently typed word to generate completions for
# `${!var}`: evaluates the content of `var` and expand its content as a variable
#     hello="world"
#     x="hello"
#     ${!x} -> ${hello} -> "world"
_shtab_restart_launch() {
  local completing_word="${COMP_WORDS[COMP_CWORD]}"
  local previous_word="${COMP_WORDS[COMP_CWORD-1]}"
  local completed_positional_actions
  local current_action
  local current_action_args_start_index
  local current_action_choices
  local current_action_compgen
  local current_action_is_positional
  local current_action_nargs
  local current_option_strings
  local sub_parsers
  COMPREPLY=()

  local prefix=_shtab_restart_launch
  local word_index=0
  local pos_only=0 # "--" delimiter not encountered yet
  _set_parser_defaults
  word_index=1

  # determine what arguments are appropriate for the current state
  # of the arg parser
  while [ $word_index -ne $COMP_CWORD ]; do
    local this_word="${COMP_WORDS[$word_index]}"

    if [[ $pos_only = 1 || " $this_word " != " -- " ]]; then
      if [[ -n $sub_parsers && " ${sub_parsers[@]} " == *" $this_word "* ]]; then
        # valid subcommand: add it to the prefix & reset the current action
        prefix="${prefix}_$(_shtab_replace_nonword $this_word)"
        _set_parser_defaults
      fi

      if [[ " ${current_option_strings[@]} " == *" $this_word "* ]]; then
        # a new action should be acquired (due to recognised option string or
        # no more input expected from current action);
        # the next positional action can fill in here
        _set_new_action $this_word false
      fi

      if [[ "$current_action_nargs" != "*" ]] && \
         [[ "$current_action_nargs" != "+" ]] && \
         [[ "$current_action_nargs" != "?" ]] && \
         [[ "$current_action_nargs" != *"..." ]] && \
         (( $word_index + 1 - $current_action_args_start_index - $pos_only >= \
            $current_action_nargs )); then
        $current_action_is_positional && let "completed_positional_actions += 1"
        _set_new_action "pos_$completed_positional_actions" true
      fi
    else
      pos_only=1 # "--" delimiter encountered
    fi

    let "word_index+=1"
  done

  # Generate the completions

  COMPREPLY=()
  if [[ $pos_only = 0 && "$completing_word" == -* &&
        ( -z "$current_action_compgen" || "$current_action_is_positional" = true ) ]]; then
    # optional argument started: use option strings
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
      compgen -W "${current_option_strings[*]}" -- "$completing_word")
  elif [[ "$previous_word" =~ ^[0-9\&]*[\<\>]\>?$ ]]; then
    # handle redirection operators
    compopt -o filenames 2>/dev/null || : # bash>=4
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "$completing_word")
  else
    # use choices & compgen
    local action_compgen_word="$completing_word"
    # handle tab-completing in the middle of a line (#248 <- #116)
    [[ -n "$current_action_compgen" && "$completing_word" == -* ]] && action_compgen_word=""
    [ -n "$current_action_compgen" ] && {
      [[ "$current_action_compgen" =~ _(file|dir|glob|FILE|DIR|GLOB)|File|Dir|Glob ]] &&
        compopt -o filenames 2>/dev/null || : # bash>=4
      while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
        "$current_action_compgen" "$action_compgen_word")
    }
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
      compgen -W "${current_action_choices[*]}" -- "$completing_word")
  fi

  if [[ ${#COMPREPLY[@]} = 0 ]]; then
    # native fallback matches are not necessarily filenames (e.g. variables)
    compopt +o filenames 2>/dev/null || : # bash>=4
  fi

  return 0
}

complete -o bashdefault -o default -F _shtab_restart_launch restart-launch
_shtab_restart_sweep_option_strings=(-h --help --version --out --dir --config --dry-run --models --engines --reduced --submit --allocation --retry-failed --no-report)

_shtab_restart_sweep_pos_0_COMPGEN=_shtab_compgen_files
_shtab_restart_sweep___out_COMPGEN=_shtab_compgen_files
_shtab_restart_sweep___dir_COMPGEN=_shtab_compgen_files
_shtab_restart_sweep___config_COMPGEN=_shtab_compgen_files
_shtab_restart_sweep___allocation_COMPGEN=_shtab_compgen_files

_shtab_restart_sweep___models_choices=(tiny 1b 3b 7b llama7b 13b llama30b 33b llama65b 70b mlperf70b 405b 1t)
_shtab_restart_sweep___engines_choices=(datastates dcp dcp-async dcp-process fastpersist fastpersist-decoupled lazy memory none torch torchsnapshot)

_shtab_restart_sweep__h_nargs=0
_shtab_restart_sweep___help_nargs=0
_shtab_restart_sweep___version_nargs=0
_shtab_restart_sweep___dry_run_nargs=0
_shtab_restart_sweep___reduced_nargs=0
_shtab_restart_sweep___submit_nargs=0
_shtab_restart_sweep___retry_failed_nargs=0
_shtab_restart_sweep___no_report_nargs=0

# Notes:
# `COMPREPLY`: what will be rendered after completion is triggered
# `completing_word`: currently typed word to generate completions for
# `${!var}`: evaluates the content of `var` and expand its content as a variable
#     hello="world"
#     x="hello"
#     ${!x} -> ${hello} -> "world"
_shtab_restart_sweep() {
  local completing_word="${COMP_WORDS[COMP_CWORD]}"
  local previous_word="${COMP_WORDS[COMP_CWORD-1]}"
  local completed_positional_actions
  local current_action
  local current_action_args_start_index
  local current_action_choices
  local current_action_compgen
  local current_action_is_positional
  local current_action_nargs
  local current_option_strings
  local sub_parsers
  COMPREPLY=()

  local prefix=_shtab_restart_sweep
  local word_index=0
  local pos_only=0 # "--" delimiter not encountered yet
  _set_parser_defaults
  word_index=1

  # determine what arguments are appropriate for the current state
  # of the arg parser
  while [ $word_index -ne $COMP_CWORD ]; do
    local this_word="${COMP_WORDS[$word_index]}"

    if [[ $pos_only = 1 || " $this_word " != " -- " ]]; then
      if [[ -n $sub_parsers && " ${sub_parsers[@]} " == *" $this_word "* ]]; then
        # valid subcommand: add it to the prefix & reset the current action
        prefix="${prefix}_$(_shtab_replace_nonword $this_word)"
        _set_parser_defaults
      fi

      if [[ " ${current_option_strings[@]} " == *" $this_word "* ]]; then
        # a new action should be acquired (due to recognised option string or
        # no more input expected from current action);
        # the next positional action can fill in here
        _set_new_action $this_word false
      fi

      if [[ "$current_action_nargs" != "*" ]] && \
         [[ "$current_action_nargs" != "+" ]] && \
         [[ "$current_action_nargs" != "?" ]] && \
         [[ "$current_action_nargs" != *"..." ]] && \
         (( $word_index + 1 - $current_action_args_start_index - $pos_only >= \
            $current_action_nargs )); then
        $current_action_is_positional && let "completed_positional_actions += 1"
        _set_new_action "pos_$completed_positional_actions" true
      fi
    else
      pos_only=1 # "--" delimiter encountered
    fi

    let "word_index+=1"
  done

  # Generate the completions

  COMPREPLY=()
  if [[ $pos_only = 0 && "$completing_word" == -* &&
        ( -z "$current_action_compgen" || "$current_action_is_positional" = true ) ]]; then
    # optional argument started: use option strings
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
      compgen -W "${current_option_strings[*]}" -- "$completing_word")
  elif [[ "$previous_word" =~ ^[0-9\&]*[\<\>]\>?$ ]]; then
    # handle redirection operators
    compopt -o filenames 2>/dev/null || : # bash>=4
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "$completing_word")
  else
    # use choices & compgen
    local action_compgen_word="$completing_word"
    # handle tab-completing in the middle of a line (#248 <- #116)
    [[ -n "$current_action_compgen" && "$completing_word" == -* ]] && action_compgen_word=""
    [ -n "$current_action_compgen" ] && {
      [[ "$current_action_compgen" =~ _(file|dir|glob|FILE|DIR|GLOB)|File|Dir|Glob ]] &&
        compopt -o filenames 2>/dev/null || : # bash>=4
      while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
        "$current_action_compgen" "$action_compgen_word")
    }
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
      compgen -W "${current_action_choices[*]}" -- "$completing_word")
  fi

  if [[ ${#COMPREPLY[@]} = 0 ]]; then
    # native fallback matches are not necessarily filenames (e.g. variables)
    compopt +o filenames 2>/dev/null || : # bash>=4
  fi

  return 0
}

complete -o bashdefault -o default -F _shtab_restart_sweep restart-sweep
_shtab_ckpt_plan_option_strings=(-h --help --version --model --tp --pp --dp --zero --engine --vocab-size --iteration --upstream --compare-listing --files --run --all --tensors --host-memory --step-time --device-facts --recompute --recompute-on --ranks-per-host --blocked-target --durable-target --compress-rate --compressed-share --link-rate --no-coordinator --format --verbose)

_shtab_ckpt_plan___tp_COMPGEN=_shtab_compgen_files
_shtab_ckpt_plan___pp_COMPGEN=_shtab_compgen_files
_shtab_ckpt_plan___dp_COMPGEN=_shtab_compgen_files
_shtab_ckpt_plan___zero_COMPGEN=_shtab_compgen_files
_shtab_ckpt_plan___vocab_size_COMPGEN=_shtab_compgen_files
_shtab_ckpt_plan___iteration_COMPGEN=_shtab_compgen_files
_shtab_ckpt_plan___compare_listing_COMPGEN=_shtab_compgen_files
_shtab_ckpt_plan___device_facts_COMPGEN=_shtab_compgen_files
_shtab_ckpt_plan___recompute_on_COMPGEN=_shtab_compgen_files
_shtab_ckpt_plan___ranks_per_host_COMPGEN=_shtab_compgen_files
_shtab_ckpt_plan___blocked_target_COMPGEN=_shtab_compgen_files
_shtab_ckpt_plan___durable_target_COMPGEN=_shtab_compgen_files
_shtab_ckpt_plan___compress_rate_COMPGEN=_shtab_compgen_files
_shtab_ckpt_plan___compressed_share_COMPGEN=_shtab_compgen_files
_shtab_ckpt_plan___link_rate_COMPGEN=_shtab_compgen_files

_shtab_ckpt_plan___model_choices=(tiny 1b 3b 7b llama7b 13b llama30b 33b llama65b 70b mlperf70b 405b 1t)
_shtab_ckpt_plan___engine_choices=(datastates dcp dcp-async dcp-process fastpersist fastpersist-decoupled lazy memory none torch torchsnapshot)
_shtab_ckpt_plan___step_time_choices=(h100 h200 a100)
_shtab_ckpt_plan___recompute_choices=(auto none selective full)
_shtab_ckpt_plan___format_choices=(table json)

_shtab_ckpt_plan__h_nargs=0
_shtab_ckpt_plan___help_nargs=0
_shtab_ckpt_plan___version_nargs=0
_shtab_ckpt_plan___upstream_nargs=0
_shtab_ckpt_plan___files_nargs=0
_shtab_ckpt_plan___run_nargs=0
_shtab_ckpt_plan___all_nargs=0
_shtab_ckpt_plan___tensors_nargs=0
_shtab_ckpt_plan___host_memory_nargs=0
_shtab_ckpt_plan___no_coordinator_nargs=0
_shtab_ckpt_plan___verbose_nargs=0

# Notes:
# `COMPREPLY`: what will be rendered after completion is triggered
# `completing_word`: currently typed word to generate completions for
# `${!var}`: evaluates the content of `var` and expand its content as a variable
#     hello="world"
#     x="hello"
#     ${!x} -> ${hello} -> "world"
_shtab_ckpt_plan() {
  local completing_word="${COMP_WORDS[COMP_CWORD]}"
  local previous_word="${COMP_WORDS[COMP_CWORD-1]}"
  local completed_positional_actions
  local current_action
  local current_action_args_start_index
  local current_action_choices
  local current_action_compgen
  local current_action_is_positional
  local current_action_nargs
  local current_option_strings
  local sub_parsers
  COMPREPLY=()

  local prefix=_shtab_ckpt_plan
  local word_index=0
  local pos_only=0 # "--" delimiter not encountered yet
  _set_parser_defaults
  word_index=1

  # determine what arguments are appropriate for the current state
  # of the arg parser
  while [ $word_index -ne $COMP_CWORD ]; do
    local this_word="${COMP_WORDS[$word_index]}"

    if [[ $pos_only = 1 || " $this_word " != " -- " ]]; then
      if [[ -n $sub_parsers && " ${sub_parsers[@]} " == *" $this_word "* ]]; then
        # valid subcommand: add it to the prefix & reset the current action
        prefix="${prefix}_$(_shtab_replace_nonword $this_word)"
        _set_parser_defaults
      fi

      if [[ " ${current_option_strings[@]} " == *" $this_word "* ]]; then
        # a new action should be acquired (due to recognised option string or
        # no more input expected from current action);
        # the next positional action can fill in here
        _set_new_action $this_word false
      fi

      if [[ "$current_action_nargs" != "*" ]] && \
         [[ "$current_action_nargs" != "+" ]] && \
         [[ "$current_action_nargs" != "?" ]] && \
         [[ "$current_action_nargs" != *"..." ]] && \
         (( $word_index + 1 - $current_action_args_start_index - $pos_only >= \
            $current_action_nargs )); then
        $current_action_is_positional && let "completed_positional_actions += 1"
        _set_new_action "pos_$completed_positional_actions" true
      fi
    else
      pos_only=1 # "--" delimiter encountered
    fi

    let "word_index+=1"
  done

  # Generate the completions

  COMPREPLY=()
  if [[ $pos_only = 0 && "$completing_word" == -* &&
        ( -z "$current_action_compgen" || "$current_action_is_positional" = true ) ]]; then
    # optional argument started: use option strings
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
      compgen -W "${current_option_strings[*]}" -- "$completing_word")
  elif [[ "$previous_word" =~ ^[0-9\&]*[\<\>]\>?$ ]]; then
    # handle redirection operators
    compopt -o filenames 2>/dev/null || : # bash>=4
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "$completing_word")
  else
    # use choices & compgen
    local action_compgen_word="$completing_word"
    # handle tab-completing in the middle of a line (#248 <- #116)
    [[ -n "$current_action_compgen" && "$completing_word" == -* ]] && action_compgen_word=""
    [ -n "$current_action_compgen" ] && {
      [[ "$current_action_compgen" =~ _(file|dir|glob|FILE|DIR|GLOB)|File|Dir|Glob ]] &&
        compopt -o filenames 2>/dev/null || : # bash>=4
      while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
        "$current_action_compgen" "$action_compgen_word")
    }
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
      compgen -W "${current_action_choices[*]}" -- "$completing_word")
  fi

  if [[ ${#COMPREPLY[@]} = 0 ]]; then
    # native fallback matches are not necessarily filenames (e.g. variables)
    compopt +o filenames 2>/dev/null || : # bash>=4
  fi

  return 0
}

complete -o bashdefault -o default -F _shtab_ckpt_plan ckpt-plan
_shtab_ckpt_replay_option_strings=(-h --help --version --model --tp --pp --dp --sharding --ranks --copies --vocab-size --limit-bytes --small-tensors --small-tensor-bytes --engine --readers --operations --throughput-target-gbps --striping --stripe-command --dir --repeat --cold --no-cold --steps-between --step-seconds --step-work --warmup-saves --no-storage --storage-bytes --format --all --output --no-verdict --trace-dir --keep --checkpoint-durability --checkpoint-files-per-node --host-cache-size --io-threads --io-block-size --direct-io --checksum --checkpoint-verify --storage-cache --storage-deadline)

_shtab_ckpt_replay___tp_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___pp_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___dp_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___ranks_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___copies_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___vocab_size_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___limit_bytes_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___small_tensors_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___small_tensor_bytes_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___readers_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___throughput_target_gbps_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___striping_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___stripe_command_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___dir_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___repeat_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___steps_between_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___step_seconds_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___warmup_saves_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___storage_bytes_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___output_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___trace_dir_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___checkpoint_files_per_node_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___host_cache_size_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___io_threads_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___io_block_size_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___storage_cache_COMPGEN=_shtab_compgen_files
_shtab_ckpt_replay___storage_deadline_COMPGEN=_shtab_compgen_files

_shtab_ckpt_replay___model_choices=(tiny 1b 3b 7b llama7b 13b llama30b 33b llama65b 70b mlperf70b 405b 1t)
_shtab_ckpt_replay___sharding_choices=(zero1 full)
_shtab_ckpt_replay___engine_choices=(datastates dcp dcp-async dcp-process fastpersist fastpersist-decoupled lazy memory none torch torchsnapshot)
_shtab_ckpt_replay___operations_choices=(save_and_load save load saves_then_loads)
_shtab_ckpt_replay___step_work_choices=(matmul idle)
_shtab_ckpt_replay___format_choices=(table json)
_shtab_ckpt_replay___checkpoint_durability_choices=(fsync none)
_shtab_ckpt_replay___direct_io_choices=(auto on off)
_shtab_ckpt_replay___checksum_choices=(crc32 none)
_shtab_ckpt_replay___checkpoint_verify_choices=(checksum size none)

_shtab_ckpt_replay__h_nargs=0
_shtab_ckpt_replay___help_nargs=0
_shtab_ckpt_replay___version_nargs=0
_shtab_ckpt_replay___cold_nargs=0
_shtab_ckpt_replay___no_cold_nargs=0
_shtab_ckpt_replay___no_storage_nargs=0
_shtab_ckpt_replay___all_nargs=0
_shtab_ckpt_replay___no_verdict_nargs=0
_shtab_ckpt_replay___keep_nargs=0

# Notes:
# `COMPREPLY`: what will be rendered after completion is triggered
# `completing_word`: currently typed word to generate completions for
# `${!var}`: evaluates the content of `var` and expand its content as a variable
#     hello="world"
#     x="hello"
#     ${!x} -> ${hello} -> "world"
_shtab_ckpt_replay() {
  local completing_word="${COMP_WORDS[COMP_CWORD]}"
  local previous_word="${COMP_WORDS[COMP_CWORD-1]}"
  local completed_positional_actions
  local current_action
  local current_action_args_start_index
  local current_action_choices
  local current_action_compgen
  local current_action_is_positional
  local current_action_nargs
  local current_option_strings
  local sub_parsers
  COMPREPLY=()

  local prefix=_shtab_ckpt_replay
  local word_index=0
  local pos_only=0 # "--" delimiter not encountered yet
  _set_parser_defaults
  word_index=1

  # determine what arguments are appropriate for the current state
  # of the arg parser
  while [ $word_index -ne $COMP_CWORD ]; do
    local this_word="${COMP_WORDS[$word_index]}"

    if [[ $pos_only = 1 || " $this_word " != " -- " ]]; then
      if [[ -n $sub_parsers && " ${sub_parsers[@]} " == *" $this_word "* ]]; then
        # valid subcommand: add it to the prefix & reset the current action
        prefix="${prefix}_$(_shtab_replace_nonword $this_word)"
        _set_parser_defaults
      fi

      if [[ " ${current_option_strings[@]} " == *" $this_word "* ]]; then
        # a new action should be acquired (due to recognised option string or
        # no more input expected from current action);
        # the next positional action can fill in here
        _set_new_action $this_word false
      fi

      if [[ "$current_action_nargs" != "*" ]] && \
         [[ "$current_action_nargs" != "+" ]] && \
         [[ "$current_action_nargs" != "?" ]] && \
         [[ "$current_action_nargs" != *"..." ]] && \
         (( $word_index + 1 - $current_action_args_start_index - $pos_only >= \
            $current_action_nargs )); then
        $current_action_is_positional && let "completed_positional_actions += 1"
        _set_new_action "pos_$completed_positional_actions" true
      fi
    else
      pos_only=1 # "--" delimiter encountered
    fi

    let "word_index+=1"
  done

  # Generate the completions

  COMPREPLY=()
  if [[ $pos_only = 0 && "$completing_word" == -* &&
        ( -z "$current_action_compgen" || "$current_action_is_positional" = true ) ]]; then
    # optional argument started: use option strings
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
      compgen -W "${current_option_strings[*]}" -- "$completing_word")
  elif [[ "$previous_word" =~ ^[0-9\&]*[\<\>]\>?$ ]]; then
    # handle redirection operators
    compopt -o filenames 2>/dev/null || : # bash>=4
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "$completing_word")
  else
    # use choices & compgen
    local action_compgen_word="$completing_word"
    # handle tab-completing in the middle of a line (#248 <- #116)
    [[ -n "$current_action_compgen" && "$completing_word" == -* ]] && action_compgen_word=""
    [ -n "$current_action_compgen" ] && {
      [[ "$current_action_compgen" =~ _(file|dir|glob|FILE|DIR|GLOB)|File|Dir|Glob ]] &&
        compopt -o filenames 2>/dev/null || : # bash>=4
      while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
        "$current_action_compgen" "$action_compgen_word")
    }
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
      compgen -W "${current_action_choices[*]}" -- "$completing_word")
  fi

  if [[ ${#COMPREPLY[@]} = 0 ]]; then
    # native fallback matches are not necessarily filenames (e.g. variables)
    compopt +o filenames 2>/dev/null || : # bash>=4
  fi

  return 0
}

complete -o bashdefault -o default -F _shtab_ckpt_replay ckpt-replay
_shtab_hf_convert_subparsers=(export import)

_shtab_hf_convert_export_option_strings=(-h --help --version --load --load-tag --out --max-shard-size)
_shtab_hf_convert_import_option_strings=(-h --help --version --load --out --params-dtype --make-vocab-size-divisible-by)
_shtab_hf_convert_option_strings=(-h --help --version)

_shtab_hf_convert_export___load_COMPGEN=_shtab_compgen_files
_shtab_hf_convert_export___load_tag_COMPGEN=_shtab_compgen_files
_shtab_hf_convert_export___out_COMPGEN=_shtab_compgen_files
_shtab_hf_convert_export___max_shard_size_COMPGEN=_shtab_compgen_files
_shtab_hf_convert_import___load_COMPGEN=_shtab_compgen_files
_shtab_hf_convert_import___out_COMPGEN=_shtab_compgen_files
_shtab_hf_convert_import___make_vocab_size_divisible_by_COMPGEN=_shtab_compgen_files

_shtab_hf_convert_import___params_dtype_choices=(bf16 fp16 fp32)
_shtab_hf_convert_pos_0_choices=(export import)

_shtab_hf_convert_export__h_nargs=0
_shtab_hf_convert_export___help_nargs=0
_shtab_hf_convert_export___version_nargs=0
_shtab_hf_convert_import__h_nargs=0
_shtab_hf_convert_import___help_nargs=0
_shtab_hf_convert_import___version_nargs=0
_shtab_hf_convert_pos_0_nargs=A...
_shtab_hf_convert__h_nargs=0
_shtab_hf_convert___help_nargs=0
_shtab_hf_convert___version_nargs=0

# Notes:
# `COMPREPLY`: what will be rendered after completion is triggered
# `completing_word`: currently typed word to generate completions for
# `${!var}`: evaluates the content of `var` and expand its content as a variable
#     hello="world"
#     x="hello"
#     ${!x} -> ${hello} -> "world"
_shtab_hf_convert() {
  local completing_word="${COMP_WORDS[COMP_CWORD]}"
  local previous_word="${COMP_WORDS[COMP_CWORD-1]}"
  local completed_positional_actions
  local current_action
  local current_action_args_start_index
  local current_action_choices
  local current_action_compgen
  local current_action_is_positional
  local current_action_nargs
  local current_option_strings
  local sub_parsers
  COMPREPLY=()

  local prefix=_shtab_hf_convert
  local word_index=0
  local pos_only=0 # "--" delimiter not encountered yet
  _set_parser_defaults
  word_index=1

  # determine what arguments are appropriate for the current state
  # of the arg parser
  while [ $word_index -ne $COMP_CWORD ]; do
    local this_word="${COMP_WORDS[$word_index]}"

    if [[ $pos_only = 1 || " $this_word " != " -- " ]]; then
      if [[ -n $sub_parsers && " ${sub_parsers[@]} " == *" $this_word "* ]]; then
        # valid subcommand: add it to the prefix & reset the current action
        prefix="${prefix}_$(_shtab_replace_nonword $this_word)"
        _set_parser_defaults
      fi

      if [[ " ${current_option_strings[@]} " == *" $this_word "* ]]; then
        # a new action should be acquired (due to recognised option string or
        # no more input expected from current action);
        # the next positional action can fill in here
        _set_new_action $this_word false
      fi

      if [[ "$current_action_nargs" != "*" ]] && \
         [[ "$current_action_nargs" != "+" ]] && \
         [[ "$current_action_nargs" != "?" ]] && \
         [[ "$current_action_nargs" != *"..." ]] && \
         (( $word_index + 1 - $current_action_args_start_index - $pos_only >= \
            $current_action_nargs )); then
        $current_action_is_positional && let "completed_positional_actions += 1"
        _set_new_action "pos_$completed_positional_actions" true
      fi
    else
      pos_only=1 # "--" delimiter encountered
    fi

    let "word_index+=1"
  done

  # Generate the completions

  COMPREPLY=()
  if [[ $pos_only = 0 && "$completing_word" == -* &&
        ( -z "$current_action_compgen" || "$current_action_is_positional" = true ) ]]; then
    # optional argument started: use option strings
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
      compgen -W "${current_option_strings[*]}" -- "$completing_word")
  elif [[ "$previous_word" =~ ^[0-9\&]*[\<\>]\>?$ ]]; then
    # handle redirection operators
    compopt -o filenames 2>/dev/null || : # bash>=4
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "$completing_word")
  else
    # use choices & compgen
    local action_compgen_word="$completing_word"
    # handle tab-completing in the middle of a line (#248 <- #116)
    [[ -n "$current_action_compgen" && "$completing_word" == -* ]] && action_compgen_word=""
    [ -n "$current_action_compgen" ] && {
      [[ "$current_action_compgen" =~ _(file|dir|glob|FILE|DIR|GLOB)|File|Dir|Glob ]] &&
        compopt -o filenames 2>/dev/null || : # bash>=4
      while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
        "$current_action_compgen" "$action_compgen_word")
    }
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
      compgen -W "${current_action_choices[*]}" -- "$completing_word")
  fi

  if [[ ${#COMPREPLY[@]} = 0 ]]; then
    # native fallback matches are not necessarily filenames (e.g. variables)
    compopt +o filenames 2>/dev/null || : # bash>=4
  fi

  return 0
}

complete -o bashdefault -o default -F _shtab_hf_convert hf-convert
_shtab_megatron_preprocess_data_option_strings=(-h --help --version --input --json-keys --tokenizer-type --tokenizer-model --vocab-file --merge-file --vocab-size --append-eod --output-prefix --dataset-impl --document-sizes --workers --partitions --log-interval --split-sentences)

_shtab_megatron_preprocess_data___input_COMPGEN=_shtab_compgen_files
_shtab_megatron_preprocess_data___json_keys_COMPGEN=_shtab_compgen_files
_shtab_megatron_preprocess_data___tokenizer_type_COMPGEN=_shtab_compgen_files
_shtab_megatron_preprocess_data___tokenizer_model_COMPGEN=_shtab_compgen_files
_shtab_megatron_preprocess_data___vocab_file_COMPGEN=_shtab_compgen_files
_shtab_megatron_preprocess_data___merge_file_COMPGEN=_shtab_compgen_files
_shtab_megatron_preprocess_data___vocab_size_COMPGEN=_shtab_compgen_files
_shtab_megatron_preprocess_data___output_prefix_COMPGEN=_shtab_compgen_files
_shtab_megatron_preprocess_data___workers_COMPGEN=_shtab_compgen_files
_shtab_megatron_preprocess_data___partitions_COMPGEN=_shtab_compgen_files
_shtab_megatron_preprocess_data___log_interval_COMPGEN=_shtab_compgen_files

_shtab_megatron_preprocess_data___dataset_impl_choices=(mmap)
_shtab_megatron_preprocess_data___document_sizes_choices=(upstream exact)

_shtab_megatron_preprocess_data__h_nargs=0
_shtab_megatron_preprocess_data___help_nargs=0
_shtab_megatron_preprocess_data___version_nargs=0
_shtab_megatron_preprocess_data___json_keys_nargs=+
_shtab_megatron_preprocess_data___append_eod_nargs=0
_shtab_megatron_preprocess_data___split_sentences_nargs=0

# Notes:
# `COMPREPLY`: what will be rendered after completion is triggered
# `completing_word`: currently typed word to generate completions for
# `${!var}`: evaluates the content of `var` and expand its content as a variable
#     hello="world"
#     x="hello"
#     ${!x} -> ${hello} -> "world"
_shtab_megatron_preprocess_data() {
  local completing_word="${COMP_WORDS[COMP_CWORD]}"
  local previous_word="${COMP_WORDS[COMP_CWORD-1]}"
  local completed_positional_actions
  local current_action
  local current_action_args_start_index
  local current_action_choices
  local current_action_compgen
  local current_action_is_positional
  local current_action_nargs
  local current_option_strings
  local sub_parsers
  COMPREPLY=()

  local prefix=_shtab_megatron_preprocess_data
  local word_index=0
  local pos_only=0 # "--" delimiter not encountered yet
  _set_parser_defaults
  word_index=1

  # determine what arguments are appropriate for the current state
  # of the arg parser
  while [ $word_index -ne $COMP_CWORD ]; do
    local this_word="${COMP_WORDS[$word_index]}"

    if [[ $pos_only = 1 || " $this_word " != " -- " ]]; then
      if [[ -n $sub_parsers && " ${sub_parsers[@]} " == *" $this_word "* ]]; then
        # valid subcommand: add it to the prefix & reset the current action
        prefix="${prefix}_$(_shtab_replace_nonword $this_word)"
        _set_parser_defaults
      fi

      if [[ " ${current_option_strings[@]} " == *" $this_word "* ]]; then
        # a new action should be acquired (due to recognised option string or
        # no more input expected from current action);
        # the next positional action can fill in here
        _set_new_action $this_word false
      fi

      if [[ "$current_action_nargs" != "*" ]] && \
         [[ "$current_action_nargs" != "+" ]] && \
         [[ "$current_action_nargs" != "?" ]] && \
         [[ "$current_action_nargs" != *"..." ]] && \
         (( $word_index + 1 - $current_action_args_start_index - $pos_only >= \
            $current_action_nargs )); then
        $current_action_is_positional && let "completed_positional_actions += 1"
        _set_new_action "pos_$completed_positional_actions" true
      fi
    else
      pos_only=1 # "--" delimiter encountered
    fi

    let "word_index+=1"
  done

  # Generate the completions

  COMPREPLY=()
  if [[ $pos_only = 0 && "$completing_word" == -* &&
        ( -z "$current_action_compgen" || "$current_action_is_positional" = true ) ]]; then
    # optional argument started: use option strings
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
      compgen -W "${current_option_strings[*]}" -- "$completing_word")
  elif [[ "$previous_word" =~ ^[0-9\&]*[\<\>]\>?$ ]]; then
    # handle redirection operators
    compopt -o filenames 2>/dev/null || : # bash>=4
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "$completing_word")
  else
    # use choices & compgen
    local action_compgen_word="$completing_word"
    # handle tab-completing in the middle of a line (#248 <- #116)
    [[ -n "$current_action_compgen" && "$completing_word" == -* ]] && action_compgen_word=""
    [ -n "$current_action_compgen" ] && {
      [[ "$current_action_compgen" =~ _(file|dir|glob|FILE|DIR|GLOB)|File|Dir|Glob ]] &&
        compopt -o filenames 2>/dev/null || : # bash>=4
      while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
        "$current_action_compgen" "$action_compgen_word")
    }
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
      compgen -W "${current_action_choices[*]}" -- "$completing_word")
  fi

  if [[ ${#COMPREPLY[@]} = 0 ]]; then
    # native fallback matches are not necessarily filenames (e.g. variables)
    compopt +o filenames 2>/dev/null || : # bash>=4
  fi

  return 0
}

complete -o bashdefault -o default -F _shtab_megatron_preprocess_data megatron-preprocess-data