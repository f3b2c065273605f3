"""The subcommands of the analysis, one module each; tools/ckpt_analysis/cli.py lists them.

A command module defines `HELP` (one line), `EXAMPLES` (lines of "%(prog)s ..." with a comment each, % doubled; $trace
is the trace of the README's demonstration), `add_arguments(parser)` and `run(arguments) -> exit status`. It imports
nothing heavy before `run`, so that --help is fast. Flags that all commands share are in `common`.
"""
