"""Command line of the analysis: a table of subcommands. Only the module of the given subcommand is imported."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from restart_trace.command_line import hint

from ..common.cli import COULD_NOT_RUN, make_parser
from ..common.escaping import visible
from .commands.common import add_shared_arguments, holds_sweep, is_json
from .common.errors import CouldNotRunError

PROGRAM = "ckpt-analysis"
# Name -> module of this package, in the order of --help. commands/__init__.py says what each module must define.
COMMANDS: dict[str, str] = {
    "report": ".commands.report",
    "summary": ".commands.summary",
    "compare": ".commands.compare",
    "goodput": ".commands.goodput",
    "timeline": ".commands.timeline",
    "export": ".commands.export",
    "follow": ".commands.follow",
    "validate": ".commands.validate",
    "import": ".commands.import_",
    "project": ".commands.project",
    "sweep": ".commands.sweep",
    "bundle": ".commands.bundle",
}
DEFAULT, SWEEP, REPLAY = "report", "sweep", "compare"  # without a command: of a directory, a sweep, a replay's JSON

_DOCS = "docs/metrics.md defines every number, docs/log_format.md the trace files.\n"
_STATUSES = "exit status: 0 fine, 1 a check failed (--strict, --fail-if, --target), 2 could not run."
_DEMONSTRATION = """\
  trace=$(ls -d runs/tiny/demo-*/trace | tail -n 1)    the trace of the README's demonstration; or your own directory
"""
_EXAMPLES = f"""
examples:
{_DEMONSTRATION}\
  {PROGRAM} $trace                 the same as `{PROGRAM} report $trace`
  {PROGRAM} runs/sweep_tiny        the same as `{PROGRAM} sweep runs/sweep_tiny`, for the --out of a sweep
  {PROGRAM} disk.json shm.json     the same as `{PROGRAM} compare ...`, for what `ckpt-replay --output` wrote
  {PROGRAM} COMMAND --help         flags and examples of a command
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit status.

    Exits with status 2 and a message if the command line is wrong (argparse).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    first = _first(words)
    if not words or words[first] in ("-h", "--help", "--version"):
        _overview().parse_args(words[first:])
        print(f"{PROGRAM}: give a directory of trace files or a command; see --help", file=sys.stderr)
        return COULD_NOT_RUN
    if near := _mistyped(words[first]):
        print(f"{PROGRAM}: {visible(words[first])}: neither a command nor a directory{near}", file=sys.stderr)
        return COULD_NOT_RUN
    name = words.pop(first) if words[first] in COMMANDS else _default(words)
    command = importlib.import_module(COMMANDS[name], __package__)
    arguments = _parser(name, command).parse_args(words)
    try:
        return command.run(arguments)
    except CouldNotRunError as exc:
        print(f"{PROGRAM}: {visible(str(exc))}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
    except ModuleNotFoundError as exc:  # polars and what else the extra brings
        if not exc.name or exc.name.split(".")[0] in (__name__.split(".")[0], "megatron"):
            raise
        print(f"{PROGRAM}: {exc}: it was installed without what it needs: `pip install {exc.name}`", file=sys.stderr)
    return COULD_NOT_RUN


def _first(words: list[str]) -> int:
    """Index of the first word that is not of the flags that every command takes: a command's name, if it is given."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    add_shared_arguments(parser)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    try:
        found, others = parser.parse_known_args(words)
    except argparse.ArgumentError:  # a flag without its value, which the command's own parser tells
        return 0
    if others:
        return words.index(others[0])
    return len(words) - len(found.rest) if found.rest else 0


def _default(words: list[str]) -> str:
    """The command that is meant where a path, or a flag before it, stands in its place."""
    path = next((Path(word) for word in words if not word.startswith("-") and Path(word).exists()), Path(words[0]))
    return SWEEP if holds_sweep(path) else REPLAY if is_json(path) else DEFAULT


def _mistyped(word: str) -> str:
    """A hint for a word that is similar to a command; "" for a command, a directory or an option."""
    return "" if word in COMMANDS or word.startswith("-") or Path(word).exists() else hint(word, COMMANDS)


def _parser(name: str, command: ModuleType) -> argparse.ArgumentParser:
    description = f"{command.HELP[0].upper()}{command.HELP[1:]}."
    demonstration = _DEMONSTRATION if "$trace" in command.EXAMPLES else ""
    epilog = f"examples:\n{demonstration}{command.EXAMPLES}\n{_STATUSES}\n{_DOCS}"
    parser = make_parser(f"{PROGRAM} {name}", description, epilog)
    command.add_arguments(parser)
    add_shared_arguments(parser)
    return parser


def _overview() -> argparse.ArgumentParser:
    """The parser for --help, which lists the commands."""
    width = max(map(len, COMMANDS))
    modules = {name: importlib.import_module(module, __package__) for name, module in COMMANDS.items()}
    lines = [f"  {name:<{width}}  {module.HELP}" for name, module in modules.items()]
    parser = make_parser(PROGRAM, "commands:\n" + "\n".join(lines), f"{_EXAMPLES}\n{_STATUSES}\n{_DOCS}")
    parser.usage = f"{PROGRAM} [COMMAND] LOGDIR ... [flags]"
    return parser
