"""Traces a job without changes to its code.

    restart-trace run [--trace-dir DIR] [--otlp ENDPOINT] -- torchrun --nproc-per-node 8 train.py ...
    torchrun --nproc-per-node 8 -m restart_trace.run [--trace-dir DIR] train.py ...

The first form takes any command: every Python process that it starts installs the hooks, and the ranks of the job
write a trace. The second form is for the command that a launcher runs as each rank. Both replace themselves with the
program, so it receives signals directly and its exit code is passed on.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from restart_trace.command_line import CommandParser
from restart_trace.cycles import make_directory, newest_cycle
from restart_trace.follower import refusal, start_follower
from restart_trace.hooks.variables import DIRECTORY_VARIABLE, FUNCTION_VARIABLES, check_function

_STATUS = "exit status: as the command; 126 or 127 if it cannot be started, 2 for wrong arguments\n"
_EPILOG = f"""\
examples:
  restart-trace run -- torchrun --nproc-per-node 8 train.py ...
  restart-trace run --trace-dir /shared/trace -- srun python train.py ...
  restart-trace run --otlp http://collector:4318 -- torchrun --nproc-per-node 8 train.py ...
      sends OpenTelemetry spans while the job runs
  ckpt-analysis restart-trace
      afterwards, in the directory in which the job was started

{_STATUS}"""
_PROGRAM_EPILOG = f"""\
examples:
  torchrun --nproc-per-node 8 -m restart_trace.run --trace-dir /shared/trace train.py ...

{_STATUS}"""
_OPTIONS = ("--trace-dir", "--otlp", *(f"--{kind}-function" for kind in FUNCTION_VARIABLES))
_SCRIPT_BYTES = 1 << 16
_SHELL = re.compile(rb"#!.*\b(ba|da|k|z)?sh\b")
# An assignment without the variable's former value, and outside of comments
_OWN_PYTHONPATH = re.compile(rb"^[^#]*\b(?:unset\s+PYTHONPATH\b|PYTHONPATH=(?!.*\$\{?PYTHONPATH\b))")
_SITE = Path(__file__).resolve().parent / "hooks" / "site"


def main(arguments: Sequence[str] | None = None) -> int:
    """`restart-trace`: does not return if the command starts; otherwise returns 127 or 126, as a shell does."""
    parser = CommandParser(
        prog="restart-trace", description="Trace the restarts of a job without changes to its code.", epilog=_EPILOG
    )
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="run")
    run = subcommands.add_parser(
        "run",
        help="run a command and trace the ranks that it starts",
        usage="restart-trace run [OPTION ...] -- COMMAND [ARGUMENT ...]",
        epilog=_EPILOG,
    )
    words = list(sys.argv[1:] if arguments is None else arguments)
    _refuse_without_run(parser, words)
    _add_options(run)
    run.add_argument(
        "--otlp", metavar="ENDPOINT",
        help="send the spans to this OpenTelemetry collector while the job runs (OTLP over HTTP, such as "
        "http://collector:4318); needs the extra otlp",
    )  # fmt: skip
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command of the job")
    parsed = parser.parse_args(arguments)
    command = parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command
    if not command:
        run.error("no command is given: restart-trace run -- torchrun ... train.py ...")
    if parsed.otlp is not None and (reason := refusal(parsed.otlp)):
        run.error(f"--otlp {parsed.otlp}: {reason}")
    made = _prepare_directory(run, parsed)
    follower = None if parsed.otlp is None else _follow(run, _trace_directory(parsed), parsed.otlp, made)
    status = _replace_process(command, parsed)
    if follower is not None:  # which has nothing to send, and would miss its directory
        with contextlib.suppress(ProcessLookupError):
            os.kill(follower, signal.SIGKILL)
    _remove(made)
    return status


def run_program(arguments: Sequence[str] | None = None) -> int:
    """`python -m restart_trace.run`: runs a program, or -m and a module, with the same interpreter."""
    parser = CommandParser(
        prog="python -m restart_trace.run",
        usage="python -m restart_trace.run [OPTION ...] [-m] PROGRAM [ARGUMENT ...]",
        description="Run a Python program, and trace it if it is a rank of a job.",
        epilog=_PROGRAM_EPILOG,
    )
    _add_options(parser)
    parser.add_argument("-m", action="store_true", dest="module", help="PROGRAM is the name of a module")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM [ARGUMENT ...]")
    parsed = parser.parse_args(arguments)
    program = parsed.program[1:] if parsed.program[:1] == ["--"] else parsed.program
    if not program:
        parser.error("no program is given: torchrun ... -m restart_trace.run train.py ...")
    command = [sys.executable, *_interpreter_flags(), *(["-m"] if parsed.module else []), *program]
    return _replace_process(command, parsed)


def _replace_process(command: Sequence[str], options: argparse.Namespace) -> int:
    """Replace this process by `command`, traced. Returns 127 or 126, as a shell does, if that fails."""
    os.environ[DIRECTORY_VARIABLE] = str(_trace_directory(options).absolute())
    for kind, variable in FUNCTION_VARIABLES.items():
        functions = getattr(options, f"{kind}_function")
        if functions:
            os.environ[variable] = " ".join(functions)
    for script, line in _scripts_without_pythonpath(command):
        print(
            f"restart-trace: {script}, line {line}, takes the hooks out of PYTHONPATH: what it starts after that is "
            "not traced; write PYTHONPATH=DIRECTORY:$PYTHONPATH there",
            file=sys.stderr,
        )
    path = [str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    sys.stdout.flush()
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a program would inherit that
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        print(f"restart-trace: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


def _follow(parser: argparse.ArgumentParser, directory: Path, endpoint: str, made: Iterable[Path]) -> int:
    """Start the process that sends the spans of the cycles to come: its id. Exits with status 2 if that fails.

    It is no child of this process, in whose place the command will be: that may wait until it has no children.
    `made`: the directories to remove then.
    """
    try:
        newest = newest_cycle(directory)
    except OSError as error:
        parser.error(f"--trace-dir {directory}: {error.filename}: {error.strerror}")
    first, pid = 0 if newest is None else newest[0] + 1, os.getpid()
    started, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(tell, b"%d" % start_follower(directory, endpoint, f"{first}-", pid).pid)
        finally:
            os._exit(0)
    os.close(tell)
    with open(started, "rb") as answer:
        follower = answer.read()
    os.waitpid(child, 0)
    if not follower:
        _remove(made)
        parser.error(f"--otlp {endpoint}: {sys.executable} cannot be started; drop it")
    return int(follower)


def _scripts_without_pythonpath(command: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Shell scripts among the first two words of the command, and their line that sets or unsets PYTHONPATH anew."""
    for word in command[:2]:
        path = shutil.which(word) or word
        if not os.path.isfile(path):  # a pipe, as of `bash <(...)`, can be read only once
            continue
        try:
            with open(path, "rb") as file:
                text = file.read(_SCRIPT_BYTES)
        except OSError:
            continue
        if not _SHELL.match(text) and not word.endswith(".sh"):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if _OWN_PYTHONPATH.search(line):
                yield word, number
                break


def _refuse_without_run(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Exit with status 2 and what to type if `run` is missing before its options or the command of the job."""
    first = words[0].partition("=")[0] if words else ""
    if first in _OPTIONS:
        parser.error(f"{first} comes after run: restart-trace run {first} ... -- COMMAND")
    if first != "run" and shutil.which(first):
        parser.error(f"{first} is a command of your job: restart-trace run -- {first} ...")


def _trace_directory(options: argparse.Namespace) -> Path:
    return Path(options.trace_dir or os.environ.get(DIRECTORY_VARIABLE) or "restart-trace")


def _prepare_directory(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Path]:
    """Create the directory of the trace, so that a mistake ends the job before it starts. Exits with status 2 then.

    Returns it and its parents, as far as they were missing: to be removed if the command does not start.
    """
    directory = _trace_directory(options)
    made = [path for path in (directory, *directory.parents) if not os.path.lexists(path)]
    try:
        make_directory(directory)
        reason = "" if os.access(directory, os.W_OK | os.X_OK) else "cannot be written to"
    except OSError as error:
        reason = f"cannot be created: {error.strerror or error}"
    if reason:
        _remove(made)
        given = f" (of {DIRECTORY_VARIABLE})" if not options.trace_dir and os.environ.get(DIRECTORY_VARIABLE) else ""
        fix = "give a directory that all hosts of the job can write to"
        parser.error(f"--trace-dir {directory}{given}: {reason}; {fix}")
    return made


def _remove(made: Iterable[Path]) -> None:
    """Remove these directories, but for those that hold something: another job may write there by now."""
    for directory in made:
        with contextlib.suppress(OSError):
            directory.rmdir()


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace-dir", metavar="DIR",
        help="directory of the trace; one per job, for all its restarts (default: ./restart-trace)",
    )  # fmt: skip
    for kind in FUNCTION_VARIABLES:
        parser.add_argument(
            f"--{kind}-function", metavar="MODULE:NAME", action="append", default=[], type=_function,
            help=f"a function that {kind}s checkpoints other than by DeepSpeed's {kind}_checkpoint, such as "
            f"mypackage.trainer:Trainer.{kind}; may be repeated",
        )  # fmt: skip


def _function(name: str) -> str:
    try:
        return check_function(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _interpreter_flags() -> list[str]:
    """The flags of this interpreter, such as torchrun's -u."""
    given = sys.orig_argv[1:]
    return given[: given.index("-m")] if "-m" in given else []


if __name__ == "__main__":
    sys.exit(run_program())
