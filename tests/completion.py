"""Writes the tab completion of the commands, from their own parsers: `python -m tests.completion`.

The file is a part of the repository, so that pressing TAB starts no Python and needs no package. shtab makes it:
`pip install shtab==1.13.0`.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.checkpointing.engines.registry import builtin_engines
from restart_trace.command_line import CommandParser
from tools.ckpt_analysis import cli as analysis
from tools.ckpt_plan.step_time.devices import device_names
from tools.restart_bench.presets import model_names

FILE = Path(__file__).resolve().parents[1] / "examples_deepspeed" / "restart_bench" / "completion.sh"
HEAD = """\
# Tab completion of the commands of this project, for bash; zsh takes it after `autoload -U bashcompinit; bashcompinit`:
#
#   source examples_deepspeed/restart_bench/completion.sh
#
# Written by `python -m tests.completion`.
"""
# Command -> the module whose `main`, or here another function, makes its parser and parses.
COMMANDS = {
    "restart-trace": "restart_trace.run",
    "restart-drill": "tools.restart_drill.options:parse_arguments",
    "restart-launch": "megatron.launch.cli:parse_arguments",
    "restart-sweep": "tools.restart_sweep.cli",
    "ckpt-plan": "tools.ckpt_plan.cli",
    "ckpt-replay": "tools.ckpt_replay.cli",
    "hf-convert": "tools.hf_convert",
    "megatron-preprocess-data": "tools.preprocess_data",
}


# Option -> the names that its value may be, where the parser leaves it to the command to refuse others: for example
# as it takes several, or more from a file.
NAMES: dict[str, Callable[[], list[str]]] = {
    "--engine": lambda: sorted(builtin_engines()),
    "--engines": lambda: sorted(builtin_engines()),
    "--model": model_names,
    "--models": model_names,
    "--step-time": device_names,
}


class _FoundError(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


@contextmanager
def _stopping_where_it_parses() -> Iterator[None]:
    parse = CommandParser.parse_args

    def found(self: CommandParser, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        raise _FoundError(self)

    CommandParser.parse_args = found  # type: ignore[method-assign]
    try:
        yield
    finally:
        CommandParser.parse_args = parse  # type: ignore[method-assign]


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser that the command itself makes."""
    module, _, name = COMMANDS[command].partition(":")
    function: Callable[[list[str]], object] = getattr(importlib.import_module(module), name or "main")
    words = ["run"] if command == "restart-trace" else []
    with _stopping_where_it_parses():
        try:
            function(words)
        except _FoundError as found:
            found.parser.prog = command
            return found.parser
    raise AssertionError(f"{command}: parsed nothing")


def parser_of_analysis() -> argparse.ArgumentParser:
    """ckpt-analysis, which imports one command alone when it runs, with all of them."""
    from tools.ckpt_analysis.commands.common import add_shared_arguments

    parser = argparse.ArgumentParser(analysis.PROGRAM)
    commands = parser.add_subparsers()
    for name, module in analysis.COMMANDS.items():
        command = importlib.import_module(module, analysis.__package__)
        of_command = commands.add_parser(name, help=command.HELP)  # without help shtab leaves it out
        command.add_arguments(of_command)
        add_shared_arguments(of_command)
        if name == analysis.DEFAULT:  # the command of a directory without one
            options = (
                action
                for action in of_command._actions
                if action.option_strings and "--help" not in action.option_strings
            )
            for action in options:
                parser._add_action(action)
    return parser


def script() -> str:
    """The completion of all commands."""
    shtab: Any = importlib.import_module("shtab")
    parts = [HEAD]
    common = ""
    for parser in [parser_of_analysis(), *map(parser_of, COMMANDS)]:
        for action in actions_of(parser):
            action.option_strings = completed_names(action)
            action.choices = values_of(action)
            if action.nargs != 0 and action.choices is None:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        made = re.sub(r"\A(#.*\n|\n)+", "", shtab.complete(parser, shell="bash"))
        if not common:  # functions that are the same for each command
            common = made[made.index("# $1=COMP_WORDS[1]\n") : made.index("# Notes:")]
            parts.append(common)
        # A file where nothing else matches: ckpt-analysis takes a command or a directory.
        parts.append(made.replace(common, "").replace("complete -o bashdefault", "complete -o bashdefault -o default"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts))


def completed_names(action: argparse.Action) -> list[str]:
    """Names of an option without torchrun's spellings, such as --max_restarts, which TAB could not tell from ours."""
    return [name for name in action.option_strings if "_" not in name]


def values_of(action: argparse.Action) -> Any:
    """The names that a value of an option may be; None if it is no name. Of commands: their parsers."""
    known = [NAMES[name]() for name in action.option_strings if name in NAMES]
    return action.choices if action.choices is not None or not known else known[0]


def actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Those of a parser and of its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from actions_of(each)


if __name__ == "__main__":
    FILE.write_text(script(), encoding="utf-8")
