"""The commands that the scripts of examples_deepspeed/restart_bench start."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from restart_trace.version import __version__

from . import drilled, modes, usage
from .effects import check_given, injects_fault
from .errors import LaunchEnded, SettingsError
from .kill_resume import drill_slurm, kill_resume
from .places import PROGRAM
from .presets import SCRIPTED, Preset, preset_named, scripted_names
from .run import Start
from .settings_file import NOT_OF_A_DRILL, taken_from, use, with_settings_of

Run = Callable[[Sequence[str], Mapping[str, str]], int]


class Command(NamedTuple):
    """`name`: what its errors begin with. `refused`, `own`: of --config FILE, as settings_file.use takes them."""

    name: str
    help: Callable[[], str]
    run: Run
    refused: Sequence[str] = ()
    own: Sequence[str] = ()


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Exit status of a command, unless the launcher replaces this process."""
    words = list(sys.argv[1:] if argv is None else argv)
    command, arguments = _command_of(words)
    if _answer(command.help, arguments):
        return 0
    try:
        arguments, file = taken_from(arguments)
        if environ is None:
            use(file, command.refused, command.own)
            environ = os.environ
        elif file is not None:
            environ = with_settings_of(file, environ, command.refused, command.own)
        return command.run(arguments, dict(environ))
    except SettingsError as error:
        print(f"{command.name}: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"{command.name}: error: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except LaunchEnded as ended:
        return ended.status


def _command_of(words: list[str]) -> tuple[Command, list[str]]:
    preset = preset_named(words[1]) if words[:1] == ["run"] and len(words) > 1 else None
    if preset is not None:
        name = f"run_{preset.name}.sh" if preset in SCRIPTED else "run.sh"
        return Command(name, partial(usage.of_preset, preset), partial(run, preset)), words[2:]
    if words and words[0] in _COMMANDS:
        return _COMMANDS[words[0]], words[1:]
    return Command("restart_bench", lambda: usage.COMMAND, _no_command), words


def _answer(help_text: Callable[[], str], arguments: Sequence[str]) -> bool:
    """Answer --help and --version. Words after -- belong to another command."""
    for word in arguments:
        if word == "--":
            return False
        if word in ("-h", "--help"):
            print(help_text(), end="")
            return True
        if word == "--version":
            print(f"megatron-restart {__version__}")
            return True
    return False


def run(preset: Preset, arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Do with a preset what MODE says.

    Users give no arguments; for a launch over several nodes a drill gives `pretrain_gpt.py FLAG ...`, which trains with
    these flags.
    """
    start = Start(preset, environ)
    if arguments[:1] == [PROGRAM]:
        return modes.train(start, arguments[1:])
    _no_arguments(start.command, arguments)
    check_given(environ, start.given)
    if injects_fault(start.given):
        return drilled.kill_and_resume(start)
    return modes.replay(start) if start.given.mode == "replay" else modes.train(start)


def _no_arguments(command: str, arguments: Sequence[str]) -> None:
    """Refuse any argument, and suggest what was probably meant."""
    if not arguments:
        return
    word, meant = arguments[0], "see --help"
    if re.match("[A-Z].*=", word):
        word = f"{word.partition('=')[0]}=..."  # its value may be a secret
        meant = f"settings are environment variables: {word} {command}"
    for option, pattern in (("--help", "-h|--h"), ("--version", "-v|-V|--v")):
        meant = f"did you mean {option}?" if re.match(pattern, word) else meant
    raise SettingsError(f"{word}: this script takes no arguments but --config FILE; {meant}")


def _no_command(words: Sequence[str], environ: Mapping[str, str]) -> int:
    if words[:1] == ["run"]:
        named = words[1] if len(words) > 1 else "run"
        known = " ".join(scripted_names())
        raise SettingsError(f"{named}: there is no such preset; give one of {known}, or MODEL_tpT_ppP")
    raise SettingsError(f"{words[0] if words else 'no command'}: give run, {', '.join(_COMMANDS)}; see --help")


def _submit(words: Sequence[str], environ: Mapping[str, str]) -> int:
    from .submit import submit  # launches do not wait for it

    return submit(words, environ, run)


_COMMANDS = {
    "submit": Command("submit.sh", lambda: usage.SUBMIT, _submit),
    "kill-resume": Command("kill_resume.sh", usage.of_kill_resume, kill_resume, NOT_OF_A_DRILL, ("OUT_DIR",)),
    "drill-slurm": Command("drill_slurm.sh", lambda: usage.DRILL_SLURM, drill_slurm, NOT_OF_A_DRILL, ("OUT_DIR",)),
}
